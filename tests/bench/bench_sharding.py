"""What a request's pages cost to turn into offset arrays, between nodes that shard differently.

    python -m tests.bench.bench_sharding --prefill-tp 8 --decode-tp 4 --layers 94 --pages 256

`plan` is made once for each peer. `offsets` is all of a request: for each layer its pages as
arrays, and from them the offsets of each slice. `posted` is the same through the prefiller's own
messenger, with a transfer engine that takes the arrays and does nothing.
"""

import argparse
import statistics
import time

import numpy as np

from disagg.config import MessengerConfig
from disagg.hooks import Span
from disagg.kv_layout import KVLayout, PageOrder, heads_of_rank, tail_slot
from disagg.messenger.messages import Hello, PrefillRequest, Role
from disagg.messenger.prefiller import Attempt, Link, PrefillerMessenger
from disagg.messenger.sharding import expected_count, make_plan, page_of


class TakesAll:
    """A transfer engine that moves nothing; counts writes."""

    def __init__(self):
        self.num_tickets = self.num_writes = 0

    def register(self, memory):
        """Nothing is read."""

    def write_pages(self, peer, pages, imm):
        self.num_tickets += 1
        self.num_writes += len(pages.source_offsets)
        return self.num_tickets

    def wake(self):
        """Nobody waits."""


def timed(function, *arguments):
    """CPU seconds of this thread, and what was returned."""
    start = time.thread_time()
    found = function(*arguments)
    return time.thread_time() - start, found


def all_offsets(slices, layouts, num_layers, pages):
    """What a prefiller's messenger does to a prompt's pages, without all the rest."""
    here, there = layouts
    num_writes = 0
    for layer in range(num_layers):
        src, dst = (
            layout.page_offsets(layer, np.fromiter(indices, np.int64))
            for layout, indices in zip((here, there), pages, strict=True)
        )
        for s in slices:
            num_writes += len(s.offsets(src, dst)[0])
    return num_writes


def writer_of(given, layouts, plan, pages):
    """A messenger before a step that computes the whole prompt, and its transfer engine."""
    here, there = layouts
    transfer = TakesAll()
    hello = Hello(
        epoch=1,
        role=Role.DECODER,
        identity=None,
        num_pages=there.num_pages,
        num_tail_slots=1,
        tp=given.decode_tp,
        kv_regions=(0,) * given.decode_tp,
        tail_region=0,
    )
    num_tokens = given.pages * given.page_size
    request = PrefillRequest(
        attempt_id=1,
        token_ids=(0,) * (num_tokens + 1),
        page_indices=pages[1],
        tail_slot=0,
        imm=1,
        expected_count=expected_count(given.pages, [(given.layers, plan[0])]),
        dp_rank=0,
    )
    writer = PrefillerMessenger(
        transfer=transfer,
        hello=hello,
        kinds=[(here, (1, 1, 1))],
        kv_regions=(None,) * given.prefill_tp,
        tail_region=None,
        tails=np.zeros(1, tail_slot(16)),
        config=MessengerConfig(),
        clock=time.monotonic,
        post=lambda event: None,
        read_counter=lambda: given.layers + 1,
    )
    link = Link(peer=1, hello=hello, layouts=[there], plans=[plan])
    writer._attempts[1] = Attempt(link=link, request=request, slices=[plan[0]], opened=0.0)
    token_ids = request.token_ids[:-1]
    chunk = Span(number=1, first_token=0, token_ids=token_ids, page_indices=pages[0], tail_slot=0)
    writer.on_step_scheduled(0, (chunk,))
    return writer, transfer


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for flag, default in (
        *(("--heads", 8), ("--head-dim", 128), ("--page-size", 16), ("--layers", 94)),
        *(("--prefill-tp", 8), ("--decode-tp", 4), ("--pages", 256), ("--repeats", 15)),
    ):
        parser.add_argument(flag, type=int, default=default)
    given = parser.parse_args(arguments)
    print(
        f"{given.heads} heads, tp {given.prefill_tp} : {given.decode_tp}, {given.layers} layers,"
        f" {given.pages} pages: ms of one core, median of {given.repeats} (least)"
    )
    rng = np.random.default_rng(1)
    pages = [tuple(rng.permutation(2 * given.pages)[: given.pages].tolist()) for _ in range(2)]
    print(f"{'':>6} {'writes':>9} {'plan':>14} {'offsets':>16} {'posted':>16}")
    for order in PageOrder:
        layouts = [
            KVLayout(
                order=order,
                num_layers=given.layers,
                num_pages=2 * given.pages,
                page_size=given.page_size,
                num_kv_heads=len(heads_of_rank(given.heads, tp, 0)),
                head_dim=given.head_dim,
                itemsize=2,
            )
            for tp in (given.prefill_tp, given.decode_tp)
        ]
        page = page_of(order, given.page_size, given.heads, 2 * given.head_dim)
        columns = ([], [], [])
        for _ in range(given.repeats):
            seconds, plan = timed(make_plan, page, given.prefill_tp, given.decode_tp)
            columns[0].append(seconds)
            columns[1].append(timed(all_offsets, plan[0], layouts, given.layers, pages)[0])
            writer, transfer = writer_of(given, layouts, plan, pages)
            columns[2].append(timed(writer._post_finished_layers)[0])
            if transfer.num_writes != expected_count(given.pages, [(given.layers, plan[0])]):
                raise SystemExit(f"{transfer.num_writes} writes were posted")
        cells = [f"{1e3 * statistics.median(c):.2f} ({1e3 * min(c):.2f})" for c in columns]
        print(f"{order:>6} {transfer.num_writes:>9} {cells[0]:>14} {cells[1]:>16} {cells[2]:>16}")


if __name__ == "__main__":
    main()
