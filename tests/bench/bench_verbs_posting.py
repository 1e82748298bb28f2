"""What our own code costs for each RDMA write, beside what the NIC and its driver take.

    python -m tests.bench.bench_verbs_posting --writes 64 512 2048 8192

The queue pairs take every list, and their completions are there at once: no device is needed. Shown
are: building the list of requests; posting it and taking the sender's completions, that included;
taking the receiver's completions and counting their immediates.
"""

import argparse
import contextlib
import statistics
import time

import numpy as np

from disagg.shared_memory import SharedMemory
from disagg.transfer.interface import ImmReached, Memory, MessageReceived, WritesDone
from disagg.transfer.transfer_engine import TransferEngine
from disagg.transfer.verbs import Depths, VerbsMedium
from disagg.transfer.verbs_device import POLL_COMPLETIONS, RECEIVE, WC
from tests.engines import write_pages
from tests.fake_verbs import Fabric

PAGE_BYTES = 4096


def prepared(wr_ids, imm=0):
    """A `poll` that gives these completions, as many as it may at once."""
    found = np.zeros(len(wr_ids), WC)
    found["wr_id"], found["imm"] = wr_ids, imm
    parts = [found[i : i + POLL_COMPLETIONS] for i in range(0, len(found), POLL_COMPLETIONS)]
    none = found[:0]
    return lambda: parts.pop(0) if parts else none


class Pair:
    """Two engines whose queue pairs were joined by fakes, and then replaced by nothing."""

    def __init__(self, nbytes, stack):
        fabric = Fabric()
        depths = Depths(sends=16384, receives=16384)
        self.writer, self.reader = (
            stack.enter_context(TransferEngine([VerbsMedium([fabric.nic()], depths)]))
            for _ in range(2)
        )
        memory = stack.enter_context(SharedMemory(nbytes))
        self.source, self.target = (
            engine.register(Memory(address=memory.address, nbytes=nbytes))
            for engine in (self.writer, self.reader)
        )
        self.there = self.writer.connect(*self.reader.listen("127.0.0.1", 0))
        self.writer.send(self.there, b"hello")
        events = []
        while not events:
            self.writer.poll(0)
            events = [e for e in self.reader.poll(0) if isinstance(e, MessageReceived)]
        self.back = events[0].peer
        (self.sends,) = self.writer._link(self.there)._lanes
        (self.receives,) = self.reader._link(self.back)._lanes
        self.sends.qp.post_sends = lambda requests: None
        self.receives.qp.post_receives = lambda: None
        self.imm = 0

    def measure(self, num_writes):
        """Nanoseconds a write: built; posted and completed; received and counted."""
        self.imm += 1
        order = np.random.default_rng(1).permutation(num_writes) * PAGE_BYTES
        self.reader.expect(self.back, self.imm, num_writes)
        arguments = self.target.descriptor, PAGE_BYTES, order, order, self.imm
        write_pages(self.writer, self.there, self.source, *arguments)
        link = self.writer._link(self.there)
        lane = self.sends
        start = time.perf_counter_ns()
        for first in range(0, num_writes, 512):
            offsets = order[first : first + 512]
            source, target = link.medium.regions[0], link.theirs.regions[0]
            lane.post(source, target, (offsets, offsets), PAGE_BYTES, self.imm)
        built = time.perf_counter_ns() - start
        lane.posted = lane.returned

        lane.qp.poll = prepared([])
        start = time.perf_counter_ns()
        while link.jobs:
            link.post()
        lane.qp.poll = prepared([lane.posted])
        while not any(isinstance(event, WritesDone) for event in self.writer.poll(0)):
            pass
        posted = time.perf_counter_ns() - start
        self.receives.qp.poll = prepared(np.full(num_writes, RECEIVE), self.imm)
        start = time.perf_counter_ns()
        while not any(isinstance(event, ImmReached) for event in self.reader.poll(0)):
            pass
        return [ns / num_writes for ns in (built, posted, time.perf_counter_ns() - start)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--writes", type=int, nargs="+", default=[64, 512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=25, help="the median of so many is shown")
    options = parser.parse_args(arguments)
    print(f"ns a write, median of {options.repeats}; limits for 512 or more: 100, and 500 in sum")
    print(f"{'writes':>7} {'build':>6} {'build, post, complete':>22} {'receive, count':>15}")
    with contextlib.ExitStack() as stack:
        pair = Pair(max(options.writes) * PAGE_BYTES, stack)
        for num_writes in options.writes:
            taken = [pair.measure(num_writes) for _ in range(options.repeats)]
            medians = [statistics.median(column) for column in zip(*taken, strict=True)]
            print("{:>7} {:>6.0f} {:>22.0f} {:>15.0f}".format(num_writes, *medians))


if __name__ == "__main__":
    main()
