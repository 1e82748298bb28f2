"""Layers to writes: post each layer's finished pages as soon as the layer counter has passed it.

    step starts at counter b      layer counter             posted
      chunks of some attempts       b + 1          layer 0's finished pages of each chunk
                                    b + 2          layer 1's ...
                                    b + L + 1      the tails of the last chunks

    attempt   OPEN --tail posted--> POSTED --writes done--> GONE (ReleasePrefill)
                '--stopped, lost--> STOPPED --writes done--> GONE
                                       ^ also from POSTED

A page is written once per layer: with the chunk that fills its last token, or with the last chunk,
so the number of writes does not depend on how a prompt is cut into chunks. Messages are
`prefiller.py`'s.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from disagg.hooks import PrefillChunk, ReleasePrefill, StopPrefill
from disagg.kv_layout import KVLayout, TailLayout
from disagg.messenger.messages import Hello, PrefillRequest
from disagg.messenger.messenger import Wiring
from disagg.messenger.pace import MIN_PAUSE, Pace
from disagg.messenger.sharding import Slice
from disagg.transfer.interface import Peer, Ticket, TransferError, TransferFailed, WritesDone

#: How a ticket ends.
WritesEnded = WritesDone | TransferFailed


@enum.unique
class AttemptState(enum.Enum):
    """How far an attempt has come on the prefiller, and the states that may follow."""

    OPEN = ("POSTED", "STOPPED")  # chunks still to come
    POSTED = ("STOPPED", "GONE")  # all handed to the transfer engine, the tail too
    STOPPED = ("GONE",)  # cancelled or failed: nothing more is posted
    GONE = ()  # no write reads its pages; they are the engine's again


@dataclass(frozen=True, kw_only=True)
class Link:
    """A greeted peer: where its pages lie, how ours map onto them, and its attempts by id."""

    peer: Peer
    hello: Hello
    layout: KVLayout
    slices: tuple[Slice, ...]
    attempts: dict[int, Attempt] = field(default_factory=dict)


@dataclass(kw_only=True)
class Attempt:
    """One PrefillRequest in work.

    `open_tickets` maps each ticket to its number of writes. `posted` counts writes handed to the
    medium: those of ended tickets, and of all once the attempt is stopped; None if unknown.
    `first_post` is when the first one was handed to the transfer engine, in seconds.
    """

    link: Link
    request: PrefillRequest
    job: int
    state: AttemptState = AttemptState.OPEN
    open_tickets: dict[Ticket, int] = field(default_factory=dict)
    posted: int | None = 0
    first_post: float = math.inf

    def move(self, to: AttemptState) -> None:
        """Change state along the table."""
        assert to.name in self.state.value, f"attempt went {self.state} -> {to}"
        self.state = to

    def add_posted(self, posted: int | None) -> None:
        """Count writes handed to the medium; once unknown, it stays so."""
        if self.posted is not None:
            self.posted = None if posted is None else self.posted + posted


@dataclass(kw_only=True)
class Step:
    """A step the engine announced; layers below `next_layer` are posted."""

    base: int
    chunks: Sequence[PrefillChunk]
    next_layer: int = 0


class LayerWriter:
    """All attempts of a prefiller, from the first chunk to the last completed write.

    `pause` is the seconds until the next look at the layer counter. `on_failed(attempt, why)` is
    called once posting for an attempt has stopped.
    """

    def __init__(
        self,
        wiring: Wiring,
        read_counter: Callable[[], int],
        on_failed: Callable[[Attempt, str], None],
    ) -> None:
        self._transfer = wiring.transfer
        self._memory = wiring.memory
        self._post = wiring.post
        self._clock = wiring.clock
        self._trace = wiring.trace
        self._read_counter = read_counter
        self._on_failed = on_failed
        self._jobs: dict[int, Attempt] = {}
        self._tickets: dict[Ticket, Attempt] = {}
        self._steps: deque[Step] = deque()
        self._pace, self.pause = Pace(), math.inf

    def __len__(self) -> int:
        """Attempts that still hold source pages."""
        return len(self._jobs)

    def open(self, attempt: Attempt) -> None:
        """Take an attempt whose job the engine will compute."""
        self._jobs[attempt.job] = attempt
        num_tokens = len(attempt.request.token_ids) - 1
        self._trace.begin("prefills", attempt.job, f"{num_tokens} tokens", job=attempt.job)
        attempt.link.attempts[attempt.request.attempt_id] = attempt

    def add_step(self, step: Step) -> None:
        """A step was scheduled. Steps come in the order of their bases."""
        self._steps.append(step)
        self._pace.start(self._read_counter(), self._clock())
        self.pause = MIN_PAUSE

    # --- Posting ---

    def post_finished_layers(self) -> None:
        """Post every layer that the counter has passed; it may have passed several at once."""
        num_layers = self._memory.layout.num_layers
        if self._steps:
            # Read before posting, which reads it anew: what is posted is then never slept over.
            counter = self._read_counter()
            runs = counter < self._steps[0].base + num_layers
            self.pause = self._pace.pause(counter, self._clock(), layer_runs=runs)
        counter = self._read_counter()
        while self._steps:
            step = self._steps[0]
            num_finished = min(counter - step.base, num_layers)
            for layer in range(step.next_layer, num_finished):
                for chunk in step.chunks:
                    self._post_layer(chunk, layer)
                step.next_layer = layer + 1
            if counter < step.base + num_layers + 1:
                return
            for chunk in step.chunks:
                self._post_tail(chunk)
            self._steps.popleft()
        self.pause = math.inf

    def _post_layer(self, chunk: PrefillChunk, layer: int) -> None:
        attempt = self._jobs.get(chunk.job)
        if attempt is None or attempt.state is AttemptState.STOPPED:
            return
        layout, link, request = self._memory.layout, attempt.link, attempt.request
        first = max(chunk.first_token // layout.page_size, request.num_held_pages)
        end = (chunk.first_token + chunk.num_tokens) // layout.page_size
        if chunk.is_last:
            end = len(request.page_indices)
        if first >= end:
            return
        sources = np.array(chunk.page_indices[first:end], dtype=np.int64)
        destinations = np.array(request.page_indices[first:end], dtype=np.int64)
        source_offsets = layout.page_offsets(layer, sources)
        destination_offsets = link.layout.page_offsets(layer, destinations)
        try:
            for part in link.slices:
                there = link.hello.kv_regions[part.destination_rank]
                src = source_offsets + part.source_offset
                dst = destination_offsets + part.destination_offset
                ticket = self._transfer.write_pages(
                    link.peer, self._memory.kv_region, there, part.nbytes, src, dst, request.imm
                )
                self._note(attempt, ticket, end - first, f"layer {layer}")
        except TransferError as error:
            self._fail(attempt, str(error))

    def _post_tail(self, chunk: PrefillChunk) -> None:
        attempt = self._jobs.get(chunk.job)
        if not chunk.is_last or attempt is None or attempt.state is AttemptState.STOPPED:
            return
        assert chunk.tail_slot is not None, f"the last chunk of job {chunk.job} has no tail slot"
        link, request = attempt.link, attempt.request
        tail, here = self._memory.tail, self._memory.tail_region
        words = self._memory.tail_words(chunk.tail_slot)
        words[TailLayout.ATTEMPT_ID] = request.attempt_id
        words[TailLayout.FIRST_POST_NS] = round(min(attempt.first_post, self._clock()) * 1e9)
        src, dst = (np.array([tail.slot_offset(s)]) for s in (chunk.tail_slot, request.tail_slot))
        try:
            ticket = self._transfer.write_pages(
                link.peer, here, link.hello.tail_region, tail.slot_bytes, src, dst, request.imm
            )
        except TransferError as error:
            self._fail(attempt, str(error))
            return
        self._note(attempt, ticket, 1, "tail")
        attempt.move(AttemptState.POSTED)

    def _note(self, attempt: Attempt, ticket: Ticket, num_writes: int, what: str) -> None:
        self._trace.begin("layer writes", ticket, what, writes=num_writes, job=attempt.job)
        attempt.first_post = min(attempt.first_post, self._clock())
        attempt.open_tickets[ticket] = num_writes
        self._tickets[ticket] = attempt

    # --- Ends ---

    def settle(self, ended: Iterable[WritesEnded]) -> None:
        """Account for ended tickets; unknown ones are a probe's, or of a lost peer."""
        failed: dict[int, str] = {}
        for event in ended:
            attempt = self._tickets.pop(event.ticket, None)
            if attempt is None:
                continue
            self._trace.end("layer writes", event.ticket)
            num_writes = attempt.open_tickets.pop(event.ticket)
            posted = num_writes if isinstance(event, WritesDone) else event.posted
            if attempt.state is not AttemptState.STOPPED:
                attempt.add_posted(posted)
            elif isinstance(event, TransferFailed):
                # `stop` has told the decoder how many to wait for; that is not true any more.
                attempt.add_posted(None)
            if isinstance(event, TransferFailed):
                failed.setdefault(attempt.job, event.why)
        for job, why in failed.items():
            self._fail(self._jobs[job], why)
        for attempt in list(self._jobs.values()):
            self._release_if_idle(attempt)

    def on_peer_lost(self, link: Link) -> None:
        """No write of ours to a lost peer reads its source any more: its attempts end here."""
        for attempt in list(link.attempts.values()):
            for ticket in attempt.open_tickets:
                del self._tickets[ticket]
            attempt.open_tickets.clear()
            self.stop(attempt)
            self._release_if_idle(attempt)

    def stop(self, attempt: Attempt) -> None:
        """Post nothing more; afterwards `attempt.posted` is what the decoder will count."""
        if attempt.state is AttemptState.STOPPED:
            return
        attempt.move(AttemptState.STOPPED)
        self._post(StopPrefill(job=attempt.job))
        attempt.add_posted(self._transfer.withdraw(list(attempt.open_tickets)))
        self._release_if_idle(attempt)

    def _fail(self, attempt: Attempt, why: str) -> None:
        self.stop(attempt)
        self._on_failed(attempt, why)

    def _release_if_idle(self, attempt: Attempt) -> None:
        """Rule 4: source pages go back only when no write of ours reads them."""
        if attempt.open_tickets or attempt.state in (AttemptState.OPEN, AttemptState.GONE):
            return
        attempt.move(AttemptState.GONE)
        self._trace.end("prefills", attempt.job)
        del self._jobs[attempt.job]
        del attempt.link.attempts[attempt.request.attempt_id]
        self._post(ReleasePrefill(job=attempt.job))
