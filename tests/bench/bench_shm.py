"""How fast shm moves pages between two processes, beside one plain memcpy of the same bytes.

    python -m tests.bench.bench_shm --mib 256 --pages 65536 16384 4096 --repeats 5

Both sides' page order is random. A ratio of 1.00 is a memcpy of the whole memory by one thread; it
is measured next to each transfer, since machines change their speed within minutes.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import time

import numpy as np

from disagg.shared_memory import SharedMemory
from disagg.transfer.auto import make_engine
from disagg.transfer.interface import ImmReached, Memory, MessageReceived, PeerLost
from tests.engines import write_pages

#: A layer's share of a transfer: tickets of this many bytes are posted at once.
TICKET_BYTES = 8 << 20


#: Of each engine, what came and was not asked for yet.
LEFT = {}


def poll_until(engine, kind, count=1):
    """Poll until `count` events of a kind came; returns them, and keeps what comes beside them."""
    left = LEFT.setdefault(engine, [])
    while len(found := [event for event in left if isinstance(event, kind)][:count]) < count:
        for event in engine.poll(1.0):
            if isinstance(event, PeerLost) and kind is not PeerLost:
                raise SystemExit(f"the peer was lost: {event.why}")
            if isinstance(event, MessageReceived | ImmReached | PeerLost):
                left.append(event)
    for event in found:
        left.remove(event)
    return found


def writer_main(address, nbytes):
    """For each "page_bytes imm" message, write the whole region in random order."""
    rng = np.random.default_rng(1)
    with SharedMemory(nbytes) as memory, contextlib.closing(make_engine("shm")) as engine:
        memory.bytes[:] = 1
        region = engine.register(Memory(address=memory.address, nbytes=nbytes, fd=memory.fd))
        peer = engine.connect(*address)
        engine.send(peer, b"hello")
        descriptor = int(poll_until(engine, MessageReceived)[0].data)
        while order := poll_until(engine, MessageReceived)[0].data:
            if order == b"end":
                return
            page_bytes, imm = map(int, order.split())
            write_scattered(engine, peer, region, descriptor, page_bytes, imm, rng)


def write_scattered(engine, peer, region, descriptor, page_bytes, imm, rng):
    """Say "ready", wait for "go", write every page from a random place to a random place."""
    nbytes = region.memory.nbytes
    parts = max(1, nbytes // TICKET_BYTES)
    sources, destinations = (
        np.array_split(rng.permutation(nbytes // page_bytes) * page_bytes, parts) for _ in range(2)
    )
    engine.send(peer, b"ready")
    poll_until(engine, MessageReceived)
    for source, destination in zip(sources, destinations, strict=True):
        write_pages(engine, peer, region, descriptor, page_bytes, source, destination, imm)


def measure(engine, peer, memory, page_bytes, imm):
    """Seconds from "go" until every byte is here and counted."""
    memory.bytes[:] = 0
    engine.expect(peer, imm, memory.nbytes // page_bytes)
    engine.send(peer, b"%d %d" % (page_bytes, imm))
    poll_until(engine, MessageReceived)
    start = time.perf_counter()
    engine.send(peer, b"go")
    poll_until(engine, ImmReached)
    seconds = time.perf_counter() - start
    if not memory.bytes.all():
        raise SystemExit("bytes are missing although all were counted")
    return seconds


def measure_memcpy(memory, other):
    start = time.perf_counter()
    np.copyto(memory.bytes, other.bytes)
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
        SharedMemory(nbytes) as other,
        contextlib.closing(make_engine("shm")) as engine,
    ):
        other.bytes[:] = 1
        region = engine.register(Memory(address=memory.address, nbytes=nbytes, fd=memory.fd))
        address = engine.listen("127.0.0.1", 0)
        context = multiprocessing.get_context("spawn")
        writer = context.Process(target=writer_main, args=(address, nbytes), daemon=True)
        writer.start()
        peer = poll_until(engine, MessageReceived)[0].peer
        engine.send(peer, b"%d" % region.descriptor)
        print(f"shm, {options.mib} MiB, random page order, median of {options.repeats}")
        print(f"{'page':>8} {'GB/s':>6} {'memcpy':>7} {'ratio':>6}")
        imm = 0
        for page_bytes in options.pages:
            taken, copied = [], []
            for _ in range(options.repeats + 1):
                imm += 1
                taken.append(measure(engine, peer, memory, page_bytes, imm))
                copied.append(measure_memcpy(memory, other))
            # The first of each is warm-up: pages are touched for the first time.
            shm, plain = (nbytes / statistics.median(t[1:]) / 1e9 for t in (taken, copied))
            print(f"{page_bytes:>8} {shm:>6.2f} {plain:>7.2f} {shm / plain:>6.2f}")
        engine.send(peer, b"end")
        poll_until(engine, PeerLost)
        writer.join()


if __name__ == "__main__":
    main()
