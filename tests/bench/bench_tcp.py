"""How fast tcp moves scattered pages between two processes, beside plain sockets and one buffer.

    python -m tests.bench.bench_tcp --mib 256 --pages 65536 16384 4096 --repeats 5

Both sides' page order is random. A ratio of 1.00 is `sendall` of the whole memory in order,
received with `recv_into`; it is measured next to each transfer, since machines change their speed
within minutes. Loopback copies twice, so the two processes' cores and memory are the limit.
"""

import argparse
import contextlib
import multiprocessing
import socket
import statistics
import time

import numpy as np

from disagg.shared_memory import SharedMemory
from disagg.transfer.auto import make_engine
from disagg.transfer.interface import Memory, MessageReceived, PeerLost
from tests.bench.bench_shm import measure, poll_until, write_scattered


def writer_main(address, plain_address, nbytes):
    """For each "page_bytes imm" message, write the whole region; for "plain", send it in order."""
    rng = np.random.default_rng(1)
    with (
        SharedMemory(nbytes) as memory,
        contextlib.closing(make_engine("tcp")) as engine,
        socket.create_connection(plain_address) as plain,
    ):
        memory.bytes[:] = 1
        region = engine.register(Memory(address=memory.address, nbytes=nbytes))
        peer = engine.connect(*address)
        engine.send(peer, b"hello")
        descriptor = int(poll_until(engine, MessageReceived)[0].data)
        while (order := poll_until(engine, MessageReceived)[0].data) != b"end":
            if order == b"plain":
                plain.sendall(memory.bytes)
            else:
                page_bytes, imm = map(int, order.split())
                write_scattered(engine, peer, region, descriptor, page_bytes, imm, rng)


def measure_plain(engine, peer, plain, memory):
    """Seconds from asking until every byte of the one buffer is here."""
    left = memory.bytes.data
    start = time.perf_counter()
    engine.send(peer, b"plain")
    while left:
        left = left[plain.recv_into(left) :]
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="MiB moved each time")
    parser.add_argument("--pages", type=int, nargs="+", default=[65536, 16384, 4096])
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many is shown")
    options = parser.parse_args()
    nbytes = options.mib << 20
    with (
        SharedMemory(nbytes) as memory,
        contextlib.closing(make_engine("tcp")) as engine,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        region = engine.register(Memory(address=memory.address, nbytes=nbytes))
        address = engine.listen("127.0.0.1", 0)
        writer = multiprocessing.get_context("spawn").Process(
            target=writer_main, args=(address, server.getsockname(), nbytes), daemon=True
        )
        writer.start()
        plain, _ = server.accept()
        peer = poll_until(engine, MessageReceived)[0].peer
        engine.send(peer, b"%d" % region.descriptor)
        print(f"tcp over loopback, {options.mib} MiB, random page order, {options.repeats} repeats")
        print(f"{'page':>8} {'GB/s':>6} {'plain':>6} {'ratio':>6}")
        imm = 0
        for page_bytes in options.pages:
            pages, buffer = [], []
            for _ in range(options.repeats + 1):
                imm += 1
                pages.append(measure(engine, peer, memory, page_bytes, imm))
                buffer.append(measure_plain(engine, peer, plain, memory))
            # The first of each is warm-up: pages are touched for the first time.
            tcp, one = (nbytes / statistics.median(t[1:]) / 1e9 for t in (pages, buffer))
            print(f"{page_bytes:>8} {tcp:>6.2f} {one:>6.2f} {tcp / one:>6.2f}")
        engine.send(peer, b"end")
        poll_until(engine, PeerLost)
        writer.join()
        plain.close()


if __name__ == "__main__":
    main()
