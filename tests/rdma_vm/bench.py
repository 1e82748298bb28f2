"""Paged writes between two RDMA devices, beside those of perftest's `ib_write_bw`.

    python -m tests.rdma_vm bench                      boots a machine for it
    python -m tests.rdma_vm.bench rxe0/1/1 rxe1/1/1    uses devices here: NAME/PORT/GID_INDEX

    ours     reader on the first device <== pages in random order, imm == writer on the second
    theirs   server on the first device <== one buffer, no imm          == client on the second

Both are two processes, and take turns. MB/s of what completed at the writer; the median of all
turns, and of their ratios. Emulation is slow: nothing but the ratios of one boot means something.
"""

import argparse
import multiprocessing
import os
import re
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from disagg.shared_memory import SharedMemory
from disagg.transfer.interface import ImmReached, Memory, MessageReceived, WritesDone
from disagg.transfer.transfer_engine import TransferEngine
from disagg.transfer.verbs import VerbsMedium
from disagg.transfer.verbs_device import Nic
from tests.engines import write_pages

REGION_BYTES = 16 << 20
#: Tickets that are open at once: the next one is queued before the last is done.
OPEN_TICKETS = 4
DEADLINE_SECONDS = 60.0
#: Of `ib_write_bw`, and where the kernel shows who listens.
PORT, LISTENERS = 18515, ("/proc/net/tcp", "/proc/net/tcp6")


class End:
    """One engine with one region."""

    def __init__(self, device: str) -> None:
        name, port, gid_index = device.split("/")
        self.engine = TransferEngine([VerbsMedium([Nic(name, int(port), int(gid_index))])])
        memory = SharedMemory(REGION_BYTES)
        self.memory = memory
        self.region = self.engine.register(
            Memory(address=memory.address, nbytes=memory.nbytes, fd=memory.fd)
        )

    def wait(self, kind: type) -> list:
        """Some events of that kind, which are the next ones."""
        end = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < end:
            if events := self.engine.poll(0.01):
                assert {type(event) for event in events} == {kind}, events
                return events
        raise TimeoutError(f"no {kind.__name__} within {DEADLINE_SECONDS} s")


def reader_main(device: str, pipe) -> None:
    """Says where it is. Then for each (imm, count): expects it, says so, says when it is here."""
    reader = End(device)
    pipe.send((reader.engine.listen("127.0.0.1", 0), reader.region.descriptor))
    peer = reader.wait(MessageReceived)[0].peer
    reader.engine.send(peer, b"welcome")
    while (order := pipe.recv()) is not None:
        reader.engine.expect(peer, *order)
        pipe.send(None)
        reader.wait(ImmReached)
        pipe.send(None)


class Ours:
    """The writer, and its reader in a process of its own."""

    def __init__(self, devices: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=reader_main, args=(devices[0], theirs), daemon=True)
        self.process.start()
        self.writer = End(devices[1])
        address, self.target = self.pipe.recv()
        self.peer = self.writer.engine.connect(*address)
        self.writer.engine.send(self.peer, b"hello")
        self.writer.wait(MessageReceived)
        self.imm = 0

    def megabytes_per_second(self, page_bytes: int, num_pages: int) -> float:
        """Of `num_pages` writes, in tickets of a region's pages or of a part of them."""
        self.imm += 1
        rng = np.random.default_rng(self.imm)
        per_ticket = min(REGION_BYTES // page_bytes, -(-num_pages // OPEN_TICKETS))
        tickets = num_pages // per_ticket
        orders = [
            [rng.permutation(REGION_BYTES // page_bytes)[:per_ticket] * page_bytes for _ in "sd"]
            for _ in range(tickets)
        ]
        self.pipe.send((self.imm, tickets * per_ticket))
        self.pipe.recv()
        start, queued, done = time.perf_counter(), 0, 0
        while done < tickets:
            while queued < min(tickets, done + OPEN_TICKETS):
                write_pages(
                    self.writer.engine,
                    self.peer,
                    self.writer.region,
                    self.target,
                    page_bytes,
                    *orders[queued],
                    self.imm,
                )
                queued += 1
            done += len(self.writer.wait(WritesDone))
        seconds = time.perf_counter() - start
        self.pipe.recv()
        return tickets * per_ticket * page_bytes / seconds / 1e6


def wait_until_listening() -> None:
    """`ib_write_bw` does not say when it does, and its client does not wait."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not any(f":{PORT:04X} 0" in Path(file).read_text() for file in LISTENERS):
        assert time.monotonic() < end, "ib_write_bw does not listen"
        time.sleep(0.05)


def theirs(devices: list[str], page_bytes: int, num_pages: int) -> float:
    """What `ib_write_bw` reports as its average, in MB/s."""
    commands = []
    for device in devices:
        name, port, gid_index = device.split("/")
        where = ["-d", name, "-i", port, "-x", gid_index, "-p", str(PORT)]
        commands.append(["ib_write_bw", *where, "-F", "-s", str(page_bytes), "-n", str(num_pages)])
    with subprocess.Popen(commands[0], stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_listening()
            done = subprocess.run(
                [*commands[1], "127.0.0.1"],
                capture_output=True,
                text=True,
                check=True,
                timeout=DEADLINE_SECONDS,
            )
            server.wait(DEADLINE_SECONDS)
        finally:
            server.kill()
    row = re.findall(rf"^ *{page_bytes}\s+\d+\s+[\d.]+\s+([\d.]+)", done.stdout, re.M)
    return float(row[0]) * 2**20 / 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("devices", nargs="*", default=os.environ.get("RDMA_DEVICES", "").split())
    parser.add_argument("--kib", nargs="+", type=int, default=[64, 32, 4])
    parser.add_argument("--mib", type=int, default=32, help="of each measurement (a quarter at 4)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if len(options.devices) != 2:
        parser.error("expected two devices, each NAME/PORT/GID_INDEX")
    ours = Ours(options.devices)
    print(f"{options.repeats} turns of {options.mib} MiB (a quarter of it below 16 KiB)")
    print("| page | disagg MB/s | ib_write_bw MB/s | ratio | turns |\n|---|---|---|---|---|")
    for kib in options.kib:
        load = kib << 10, (options.mib << 10) // kib // (1 if kib >= 16 else 4)
        ours.megabytes_per_second(kib << 10, 256)
        turns = [
            (ours.megabytes_per_second(*load), theirs(options.devices, *load))
            for _ in range(options.repeats)
        ]
        ratios = sorted(mine / other for mine, other in turns)
        mine, other = (statistics.median(side) for side in zip(*turns, strict=True))
        print(
            f"| {kib} KiB | {mine:.1f} | {other:.1f} | {statistics.median(ratios):.2f} |"
            f" {ratios[0]:.2f} to {ratios[-1]:.2f} |",
            flush=True,
        )
    ours.pipe.send(None)
    ours.process.join(DEADLINE_SECONDS)


if __name__ == "__main__":
    main()
