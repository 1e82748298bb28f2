"""Layers to writes: post each layer's finished pages as soon as the layer counter has passed it.

    step starts at counter b      layer counter             posted
      chunks of some attempts       b + 1          layer 0's finished pages of each chunk
                                    b + 2          layer 1's ...
                                    b + L + 1      the tails of the last chunks

    attempt   open --all its writes handed over---> no more --all completed--> gone
                '--cancelled, failed, peer lost---> (PrefillStopped)           (ReleasePrefill)

A page is written once per layer: with the chunk that fills its last token, or with the last chunk,
so the number of writes does not depend on how a prompt is cut into chunks. Messages are
`prefiller.py`'s, but for the one that ends an attempt.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from disagg.hooks import ReleasePrefill, Span
from disagg.kv_layout import KVLayout, TailLayout
from disagg.messenger.messages import Hello, PrefillRequest, PrefillStopped, encode
from disagg.messenger.messenger import Wiring
from disagg.messenger.pace import Pace
from disagg.messenger.sharding import Slice
from disagg.transfer.interface import Pages, Peer, Ticket, TransferError, WritesDone

logger = logging.getLogger(__name__)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A greeted peer: the `layout` of each of its ranks, the replica sets by which our pages are
    written into theirs (`plan`)."""

    peer: Peer
    hello: Hello
    layout: KVLayout
    plan: Sequence[Sequence[Slice]]


class Attempt(msgspec.Struct, kw_only=True):
    """One PrefillRequest in work, by the `slices` of the replica set that was drawn for it.

    `open_tickets` has what was handed to the transfer engine and did not end yet: what it is, its
    number of writes, when it was handed over. `num_ended` counts the writes of all others.
    `opened` and `first_post`, of the first write, are times in seconds.
    """

    link: Link
    request: PrefillRequest
    slices: Sequence[Slice]
    opened: float
    open_tickets: dict[Ticket, tuple[str, int, float]] = {}
    num_ended: int = 0
    is_stopped: bool = False
    first_post: float = math.inf


class LayerWriter:
    """All attempts of a prefiller, from the first chunk to the last completed write.

    `pause` is the seconds until the next look at the layer counter.
    """

    def __init__(self, wiring: Wiring, read_counter: Callable[[], int]) -> None:
        self._transfer = wiring.transfer
        self._memory = wiring.memory
        self._post = wiring.post
        self._clock = wiring.clock
        self._trace = wiring.trace
        self._read_counter = read_counter
        #: By attempt id, which is the job's number, too: those that still hold source pages.
        self.attempts: dict[int, Attempt] = {}
        #: Announced and not at their ends; what `pace.counter` has counted is posted.
        self._steps: deque[tuple[Pace, Sequence[Span]]] = deque()
        self.pause = math.inf

    def open(self, link: Link, request: PrefillRequest, slices: Sequence[Slice]) -> None:
        """Take an attempt whose job the engine will compute."""
        attempt = Attempt(link=link, request=request, slices=slices, opened=self._clock())
        self.attempts[request.attempt_id] = attempt

    def add_step(self, base: int, chunks: Sequence[Span]) -> None:
        """A step is about to run; from the engine's thread, in the order of the bases."""
        self._steps.append((Pace(base, self._clock()), chunks))

    # --- Posting ---

    def post_finished_layers(self) -> None:
        """Post every layer that the counter has passed; it may have passed several at once."""
        num_layers = self._memory.layout.num_layers
        counter, now = self._read_counter(), self._clock()
        while self._steps:
            pace, chunks = self._steps[0]
            # What follows the last layer are the tails.
            num_finished = min(counter - pace.base, num_layers + 1)
            for layer in range(pace.counter - pace.base, num_finished):
                for chunk in chunks:
                    self._post_chunk(chunk, layer)
            if num_finished <= num_layers:
                self.pause = pace.pause(counter, now, layer_runs=num_finished < num_layers)
                return
            self._steps.popleft()
        self.pause = math.inf

    def _post_chunk(self, chunk: Span, layer: int) -> None:
        attempt = self.attempts.get(chunk.number)
        if attempt is None or attempt.is_stopped:
            return
        if layer < self._memory.layout.num_layers:
            what, writes = f"layer {layer}", self._layer_writes(attempt, chunk, layer)
        else:
            what, writes = "tail", self._tail_writes(attempt, chunk)
        peer, imm = attempt.link.peer, attempt.request.imm
        try:
            for write in writes:
                ticket = self._transfer.write_pages(peer, write, imm)
                now = self._clock()
                attempt.first_post = min(attempt.first_post, now)
                attempt.open_tickets[ticket] = what, len(write.source_offsets), now
        except TransferError as error:
            # Rule 6: a write that will not come becomes a message, or the decoder waits in vain.
            logger.warning("attempt %#x failed: %s", attempt.request.attempt_id, error)
            self.stop(attempt, str(error))

    def _layer_writes(self, attempt: Attempt, chunk: Span, layer: int) -> Iterator[Pages]:
        """Of the pages that a chunk finishes."""
        layout, link, request = self._memory.layout, attempt.link, attempt.request
        first = chunk.first_token // layout.page_size
        end = (chunk.first_token + len(chunk.token_ids)) // layout.page_size
        if chunk.tail_slot is not None:
            end = len(request.page_indices)
        if first >= end:
            return
        here = np.fromiter(chunk.page_indices[first:end], np.int64)
        there = np.fromiter(request.page_indices[first:end], np.int64)
        src, dst = layout.page_offsets(layer, here), link.layout.page_offsets(layer, there)
        ours, theirs = self._memory.kv_regions, link.hello.kv_regions
        group = theirs[request.dp_rank * link.hello.tp :]
        for s in attempt.slices:
            regions = ours[s.source_rank], group[s.destination_rank]
            yield Pages(*regions, s.nbytes, *s.offsets(src, dst))

    def _tail_writes(self, attempt: Attempt, chunk: Span) -> Iterator[Pages]:
        if chunk.tail_slot is None:
            return
        tail, request = self._memory.tail, attempt.request
        words = self._memory.tail_words(chunk.tail_slot)
        words[TailLayout.ATTEMPT_ID] = request.attempt_id
        words[TailLayout.FIRST_POST_NS] = round(min(attempt.first_post, self._clock()) * 1e9)
        src, dst = (np.array([tail.slot_offset(s)]) for s in (chunk.tail_slot, request.tail_slot))
        there = attempt.link.hello.tail_region
        yield Pages(self._memory.tail_region, there, tail.slot_bytes, src, dst)

    # --- Ends ---

    def settle(self, ended: Iterable[WritesDone]) -> None:
        """Account for ended tickets; unknown ones are a probe's, or of a lost peer."""
        for event in ended:
            mine = (each for each in self.attempts.values() if event.ticket in each.open_tickets)
            for attempt in list(mine):  # one or none
                what, count, start = attempt.open_tickets.pop(event.ticket)
                number, now = hex(attempt.request.attempt_id), self._clock()
                self._trace.span("layer writes", what, start, now, attempt=number, writes=count)
                attempt.num_ended += count
                self._release_if_idle(attempt)

    def on_peer_lost(self, link: Link, why: str) -> None:
        """No write of ours to a lost peer reads its source any more: its attempts end here."""
        for attempt in [each for each in self.attempts.values() if each.link is link]:
            logger.warning("attempt %#x lost its decoder: %s", attempt.request.attempt_id, why)
            attempt.open_tickets.clear()
            self.stop(attempt, why)

    def stop(self, attempt: Attempt, why: str) -> None:
        """Post nothing more and say how many writes were posted: the decoder counts them. If it was
        stopped before, say nothing."""
        if not attempt.is_stopped:
            attempt.is_stopped = True
            # None: the peer is lost, and nobody will hear how many there were.
            posted = attempt.num_ended + (self._transfer.withdraw(list(attempt.open_tickets)) or 0)
            stopped = PrefillStopped(attempt_id=attempt.request.attempt_id, why=why, posted=posted)
            self._transfer.send(attempt.link.peer, encode(stopped))
        self._release_if_idle(attempt)

    def _release_if_idle(self, attempt: Attempt) -> None:
        """Rule 4: source pages go back only when no write of ours reads them."""
        all_ended = attempt.num_ended == attempt.request.expected_count
        if attempt.open_tickets or not (all_ended or attempt.is_stopped):
            return
        number, name = attempt.request.attempt_id, f"{len(attempt.request.token_ids) - 1} tokens"
        self._trace.span("prefills", name, attempt.opened, self._clock(), attempt=hex(number))
        del self.attempts[number]
        self._post(ReleasePrefill(job=number))
