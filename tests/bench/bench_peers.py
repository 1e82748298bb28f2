"""Scattered pages between two processes: disagg beside NIXL and Mooncake, as far as installed.

    pip install --no-deps nixl-cu12 mooncake-transfer-engine-non-cuda
    python -m tests.bench.bench_peers --mib 64 --pages 65536 4096 --repeats 5

Both sides' page order is random and new each time, as in a KV transfer. The clock runs from the
first call with this order (so it includes what a library makes of the list of pages) until the
last page is written: counted by its owner for disagg, when NIXL's notification has reached the
owner, reported as done to the writer by Mooncake. One library runs after the other: NIXL's threads
never sleep, and would slow the rest. It uses UCX; `nixl tcp` is UCX with nothing but TCP.
"""

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import time

import numpy as np

from disagg.shared_memory import SharedMemory
from disagg.transfer.auto import make_engine
from disagg.transfer.interface import Memory, MessageReceived
from tests.bench.bench_shm import measure, poll_until, write_scattered

#: Over TCP it fails with some thousands of writes in one call.
MOONCAKE_BATCH = 512


def owner_main(name, pipe, nbytes):
    """Owns the memory that is written into; measures for disagg, where the owner counts."""
    with SharedMemory(nbytes) as memory, contextlib.ExitStack() as stack:
        if name.startswith("nixl"):
            agent = nixl_agent(name, memory)
            pipe.send((memory.address, agent.get_agent_metadata()))
        elif name == "mooncake":
            engine = mooncake_engine(memory)
            pipe.send((memory.address, f"127.0.0.1:{engine.get_rpc_port()}"))
        else:
            engine = stack.enter_context(contextlib.closing(make_engine(name.split()[1])))
            own = Memory(address=memory.address, nbytes=nbytes, fd=memory.fd)
            region = engine.register(own)
            pipe.send(engine.listen("127.0.0.1", 0))
            peer = poll_until(engine, MessageReceived)[0].peer
            engine.send(peer, b"%d" % region.descriptor)
            while order := pipe.recv():
                pipe.send(measure(engine, peer, memory, *order))
            return
        while pipe.recv():
            while name.startswith("nixl") and not agent.get_new_notifs():
                pass  # its writer is done earlier than its writes
            end, right = time.monotonic(), bool(memory.bytes.all())
            memory.bytes[:] = 0
            pipe.send((end, right))


def writer_main(name, pipe, owner, nbytes):
    """Writes the whole region, page by page, for each order; sends back the seconds it took."""
    rng = np.random.default_rng(1)
    with SharedMemory(nbytes) as memory:
        memory.bytes[:] = 1
        if name.startswith("disagg"):
            run_disagg(name, owner, memory, rng)
            return
        address, where = owner
        write = (nixl_writer if name.startswith("nixl") else mooncake_writer)(name, memory, where)
        while order := pipe.recv():
            page_bytes, _ = order
            pages = nbytes // page_bytes
            sources, destinations = (rng.permutation(pages) * page_bytes for _ in range(2))
            start = time.monotonic()
            write(sources + memory.address, destinations + address, page_bytes)
            pipe.send((start, time.monotonic()))


def run_disagg(name, address, memory, rng):
    with contextlib.closing(make_engine(name.split()[1])) as engine:
        own = Memory(address=memory.address, nbytes=memory.nbytes, fd=memory.fd)
        region = engine.register(own)
        peer = engine.connect(*address)
        engine.send(peer, b"hello")
        descriptor = int(poll_until(engine, MessageReceived)[0].data)
        while True:
            order = poll_until(engine, MessageReceived)[0].data
            page_bytes, imm = map(int, order.split())
            write_scattered(engine, peer, region, descriptor, page_bytes, imm, rng)


def nixl_agent(name, memory):
    if name == "nixl tcp":
        os.environ["UCX_TLS"] = "tcp"
    from nixl_cu12 import nixl_agent as make_agent

    agent = make_agent(f"{name} {os.getpid()}")
    agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
    return agent


def nixl_writer(name, memory, metadata):
    agent = nixl_agent(name, memory)
    remote = agent.add_remote_agent(metadata)

    def write(sources, destinations, page_bytes):
        columns = (np.full_like(sources, page_bytes), np.zeros_like(sources))
        lists = [
            agent.get_xfer_descs(np.stack((starts, *columns), axis=1).astype(np.uint64), "DRAM")
            for starts in (sources, destinations)
        ]
        handle = agent.initialize_xfer("WRITE", *lists, remote, b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"{name}: {state}")
        agent.release_xfer_handle(handle)

    return write


def mooncake_engine(memory):
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("mooncake does not start")
    engine.register_memory(memory.address, memory.nbytes)
    return engine


def mooncake_writer(name, memory, where):
    engine = mooncake_engine(memory)

    def write(sources, destinations, page_bytes):
        for first in range(0, len(sources), MOONCAKE_BATCH):
            starts, ends = (o[first : first + MOONCAKE_BATCH] for o in (sources, destinations))
            sizes = [page_bytes] * len(starts)
            if engine.batch_transfer_sync_write(where, starts.tolist(), ends.tolist(), sizes):
                raise SystemExit(f"{name}: the transfer failed")

    return write


class Pair:
    """The two processes of one library."""

    def __init__(self, name, nbytes):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.to_owner, end = context.Pipe()
        owner = context.Process(target=owner_main, args=(name, end, nbytes), daemon=True)
        owner.start()
        self.processes = [owner]
        self.to_writer, end = context.Pipe()
        where = self.to_owner.recv()
        writer = context.Process(target=writer_main, args=(name, end, where, nbytes), daemon=True)
        writer.start()
        self.processes.append(writer)

    def run(self, page_bytes, imm):
        """Seconds of one round."""
        order = (page_bytes, imm)
        if self.name.startswith("disagg"):
            self.to_owner.send(order)
            return self.to_owner.recv()
        self.to_writer.send(order)
        if self.name.startswith("nixl"):
            self.to_owner.send(True)
        start, done = self.to_writer.recv()
        if self.name == "mooncake":
            self.to_owner.send(True)
        landed, right = self.to_owner.recv()
        if not right:
            raise SystemExit(f"{self.name}: bytes are missing although all were written")
        return (landed if self.name.startswith("nixl") else done) - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=64, help="MiB moved each time")
    parser.add_argument("--pages", type=int, nargs="+", default=[65536, 16384, 4096])
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many is shown")
    options = parser.parse_args()
    nbytes = options.mib << 20
    names = ["disagg shm", "disagg tcp"]
    names += ["nixl", "nixl tcp"] if importlib.util.find_spec("nixl_cu12") else []
    names += ["mooncake"] if importlib.util.find_spec("mooncake") else []
    print(f"GB/s of {options.mib} MiB, random page order, median of {options.repeats}")
    print(f"{'':>12}", *(f"{page_bytes:>9}" for page_bytes in options.pages))
    for name in names:
        pair, imm, rates = Pair(name, nbytes), 0, []
        for page_bytes in options.pages:
            taken = []
            for _ in range(options.repeats + 1):  # the first is warm-up
                imm += 1
                taken.append(pair.run(page_bytes, imm))
            rates.append(nbytes / statistics.median(taken[1:]) / 1e9)
        print(f"{name:>12}", *(f"{rate:>9.2f}" for rate in rates), flush=True)
        for process in pair.processes:
            process.kill()  # some of these libraries do not end by themselves


if __name__ == "__main__":
    main()
