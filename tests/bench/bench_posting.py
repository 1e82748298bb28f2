"""What posting, moving and counting cost for each page, over the number of pages of one call.

    python -m tests.bench.bench_posting --pages 64 256 1024 4096 16384

Both engines run in this one thread, so that each side's time can be told apart: in `write_pages`,
in the writer's polls (which move the bytes) and in the reader's (which count, and with tcp place
them). Pages are small and in random order. Costs that are linear stay the same down the table.
"""

import argparse
import contextlib
import statistics
import time

import numpy as np

from disagg.shared_memory import SharedMemory
from disagg.transfer.auto import make_engine
from disagg.transfer.interface import ImmReached, Memory, MessageReceived, PeerLost, WritesDone
from tests.engines import write_pages


class Clock:
    """Adds up the seconds of its calls."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self, function, *arguments):
        start = time.perf_counter()
        found = function(*arguments)
        self.seconds += time.perf_counter() - start
        return found


def poll_both(engines, wanted, clocks):
    """Poll in turns until the events of all `wanted` types came; returns them by type."""
    found = {}
    while not wanted <= found.keys():
        for engine, clock in zip(engines, clocks, strict=True):
            for event in clock(engine.poll, 0.0):
                if isinstance(event, PeerLost):
                    raise SystemExit(f"the peer was lost: {event.why}")
                found[type(event)] = event
    return found


class Pair:
    """A writer and a reader of one transport, connected, each with one region."""

    def __init__(self, transport, nbytes, stack):
        self.engines = [stack.enter_context(make_engine(transport)) for _ in range(2)]
        self.memories = [stack.enter_context(SharedMemory(nbytes)) for _ in range(2)]
        writer, reader = self.engines
        self.source, self.target = (
            engine.register(Memory(address=memory.address, nbytes=nbytes, fd=memory.fd))
            for engine, memory in zip(self.engines, self.memories, strict=True)
        )
        self.to_reader = writer.connect(*reader.listen("127.0.0.1", 0))
        writer.send(self.to_reader, b"hello")
        found = poll_both(self.engines, {MessageReceived}, [Clock(), Clock()])
        self.to_writer = found[MessageReceived].peer
        self.rng = np.random.default_rng(1)
        self.imm = 0

    def measure(self, page_bytes, num_pages):
        """Nanoseconds a page: in `write_pages`, in the writer's polls, in the reader's."""
        writer, reader = self.engines
        source, target = self.memories
        source.bytes[:], target.bytes[:] = 1, 0
        orders = [self.rng.permutation(num_pages) * page_bytes for _ in range(2)]
        self.imm += 1
        reader.expect(self.to_writer, self.imm, num_pages)
        clocks = post, move, count = Clock(), Clock(), Clock()
        post(
            write_pages,
            *(writer, self.to_reader, self.source, self.target.descriptor),
            *(page_bytes, *orders, self.imm),
        )
        poll_both(self.engines, {WritesDone, ImmReached}, [move, count])
        if not target.bytes[: num_pages * page_bytes].all():
            raise SystemExit("bytes are missing although all were counted")
        return [1e9 * clock.seconds / num_pages for clock in clocks]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--page-bytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15, help="the median of so many is shown")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    options = parser.parse_args(arguments)
    print(f"ns a page of {options.page_bytes} bytes, median of {options.repeats}")
    print(f"{'':>9} {'pages':>6} {'write_pages':>12} {'writer polls':>13} {'reader polls':>13}")
    for transport in options.transports:
        with contextlib.ExitStack() as stack:
            pair = Pair(transport, max(options.pages) * options.page_bytes, stack)
            for num_pages in options.pages:
                taken = [
                    pair.measure(options.page_bytes, num_pages) for _ in range(options.repeats + 1)
                ]
                medians = map(statistics.median, zip(*taken[1:], strict=True))
                print(
                    "{:>9} {:>6} {:>12.0f} {:>13.0f} {:>13.0f}".format(
                        transport, num_pages, *medians
                    )
                )


if __name__ == "__main__":
    main()
