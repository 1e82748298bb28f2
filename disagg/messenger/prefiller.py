"""The prefiller's half of the hand-over: take requests, post each layer's pages as it is finished.

    engine                     PrefillerMessenger                      decoder
      | <-- StartPrefill ---------- | <---------- PrefillRequest --------- |
      | on_step_scheduled(b, ...) ->|                                      |
      | layer counter: b+1 -------> | == layer 0's finished pages, imm ==> |
      |                b+2 -------> | == layer 1's finished pages, imm ==> |
      |                b+L+1 -----> | == tail (last chunk only), imm ====> |
      | <-- ReleasePrefill -------- | once its own writes completed        |

    attempt   opened --all its writes handed over---> no more --all completed--> gone
                '--cancelled, failed, peer lost-----> (PrefillStopped)      (ReleasePrefill)

A page is written once per layer: with the chunk that fills its last token, or with the last chunk,
so the number of writes does not depend on how a prompt is cut into chunks. Whatever could never be
served is refused at once. One thread makes every call but `on_step_scheduled`.
"""

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from disagg.hooks import ReleasePrefill, Span, StartPrefill
from disagg.kv_layout import KVLayout, heads_of_rank, pages_for, stacked
from disagg.messenger import messages
from disagg.messenger.messages import Hello, Message, PrefillStopped, ProtocolError, Role
from disagg.messenger.messenger import Messenger
from disagg.messenger.pace import Pace
from disagg.messenger.sharding import Page, Slice, expected_count, make_plan
from disagg.transfer import interface
from disagg.transfer.interface import MemoryRegion, Pages, Peer, Ticket, TransferError, WritesDone

logger = logging.getLogger(__name__)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A greeted peer. For each model: the layout of its ranks' regions, and the replica sets by
    which our pages are written into theirs (`plans`)."""

    peer: Peer
    hello: Hello
    layouts: Sequence[KVLayout]
    plans: Sequence[Sequence[Sequence[Slice]]]


class Attempt(msgspec.Struct, kw_only=True):
    """One PrefillRequest in work, by the `slices` of the replica sets that were drawn for it.

    `open_tickets` has what was handed to the transfer engine and did not end yet: what it is, its
    number of writes, when it was handed over. `num_ended` counts the writes of all others.
    `opened` and `first_post`, of the first write, are times in seconds.
    """

    link: Link
    request: messages.PrefillRequest
    slices: Sequence[Sequence[Slice]]
    opened: float
    open_tickets: dict[Ticket, tuple[str, int, float]] = msgspec.field(default_factory=dict)
    num_ended: int = 0
    is_stopped: bool = False
    first_post: float = math.inf


@dataclass(kw_only=True, eq=False)
class PrefillerMessenger(Messenger):
    """See the module's docstring. `read_counter` reads the layer counter, `rng` draws the replica
    set of each request. Of `kv_regions` each rank has one."""

    kv_regions: Sequence[MemoryRegion]
    tail_region: MemoryRegion
    read_counter: Callable[[], int]
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Where the layers of all models are: of which kind, which layer there.
        self._layers = [
            (kind, layer)
            for kind, (layout, _) in enumerate(self.kinds)
            for layer in range(layout.num_layers)
        ]
        self._links: dict[Peer, Link] = {}
        #: By attempt id, which is the job's number, too: those that still hold source pages.
        self._attempts: dict[int, Attempt] = {}
        #: Announced and not at their ends; what `pace.counter` has counted is posted.
        self._steps: deque[tuple[Pace, Sequence[Span]]] = deque()
        self._pause = math.inf  # seconds until the next look at the layer counter
        #: What a probe may ask for.
        pattern = self._pattern = messages.probe_pattern()
        self._scratch = self.transfer.register(
            interface.Memory(address=pattern.ctypes.data, nbytes=pattern.nbytes, writable=False)
        )

    # --- From the engine, any thread ---

    def on_step_scheduled(self, base: int, chunks: Sequence[Span]) -> None:
        """`PrefillHooks`: a step with these chunks starts at counter `base`."""
        self._steps.append((Pace(base, self.clock()), chunks))
        self.transfer.wake()

    # --- The loop ---

    def poll(self, timeout: float) -> None:
        """One look at everything: transfer events, the layer counter, the clocks."""
        events = self.transfer.poll(min(timeout, self.config.heartbeat_interval / 2, self._pause))
        # Ended tickets first, all of them: only open ones can be withdrawn by what follows.
        for event in events:
            if isinstance(event, WritesDone):
                self._settle(event.ticket)
        for event in events:
            self._on_event(event)
        self._post_finished_layers()
        self._watch_silence()

    # --- Messages ---

    def _on_word(self, peer: Peer, message: Message) -> None:
        link = self._links[peer]
        match message:
            case messages.PrefillRequest():
                self._on_request(peer, link, message)
            case messages.Cancel():
                attempt = self._attempts.get(message.attempt_id)
                # Unknown: all was posted and completed (or its end was told before and crossed it).
                if attempt is not None and attempt.link is link:
                    self._stop(attempt, "cancelled")
            case messages.ProbeRequest():
                self._on_probe(peer, link, message)
            case _:
                super()._on_word(peer, message)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        for other, greeted in self._greeted.items():
            if greeted.epoch == hello.epoch:
                self._close_peer(other, "the same process connected again")
        tp = 1 if hello.role == Role.PROBE else hello.tp
        layouts = stacked(
            replace(ours, num_pages=hello.num_pages, num_kv_heads=len(heads_of_rank(heads, tp, 0)))
            for ours, (_, heads, _) in self.kinds
        )
        plans = [make_plan(page, self.hello.tp, tp) for _, page in self.kinds]
        self._links[peer] = Link(peer=peer, hello=hello, layouts=layouts, plans=plans)
        self._send(peer, self.hello)
        self._beat(peer)  # so that it can read our clock before the first tail comes

    def _on_request(self, peer: Peer, link: Link, request: messages.PrefillRequest) -> None:
        if link.hello.role != Role.DECODER:
            raise ProtocolError(f"a {link.hello.role} has no pages to fill")
        if request.attempt_id in self._attempts:
            raise ProtocolError(f"attempt {request.attempt_id:#x} was asked for twice")
        if len(self._attempts) >= self.config.max_open_attempts:
            why = f"{len(self._attempts)} prompts are in work here already; try again later"
            self._reject(peer, request.attempt_id, why, permanent=False)
            return
        slices = [self.rng.choice(plan) for plan in link.plans]
        attempt = Attempt(link=link, request=request, slices=slices, opened=self.clock())
        try:
            check(attempt, self.kinds)
            self.post(StartPrefill(job=request.attempt_id, token_ids=request.token_ids))
        except ValueError as error:  # the engine has a word on what it can never compute
            self._reject(peer, request.attempt_id, str(error), permanent=True)
        else:
            self._attempts[request.attempt_id] = attempt

    def _reject(self, peer: Peer, attempt_id: int, why: str, *, permanent: bool) -> None:
        self._send(peer, PrefillStopped(attempt_id=attempt_id, why=why, permanent=permanent))

    def _on_probe(self, peer: Peer, link: Link, probe: messages.ProbeRequest) -> None:
        num_pages, nbytes = probe.num_pages, probe.page_bytes
        try:
            if num_pages > (most := messages.MAX_PROBE_PAGES):
                raise TransferError(f"expected at most {most} pages, got {num_pages}")
            numbers = np.arange(num_pages, dtype=np.int64)
            src = numbers % max(1, messages.PROBE_BYTES // nbytes) * nbytes
            pages = Pages(self._scratch, link.hello.tail_region, nbytes, src, numbers * nbytes)
            self.transfer.write_pages(peer, pages, probe.imm)
        except TransferError as error:
            self._reject(peer, 0, str(error), permanent=True)  # a probe is no attempt

    def _on_peer_lost(self, peer: Peer, why: str) -> None:
        """No write of ours to a lost peer reads its source any more: its attempts end here."""
        link = self._links.pop(peer, None)
        if link is None:
            logger.warning("refused a caller: %s", why)
            return
        logger.info("decoder %d lost: %s", peer, why)
        for attempt in [each for each in self._attempts.values() if each.link is link]:
            logger.warning("attempt %#x lost its decoder: %s", attempt.request.attempt_id, why)
            attempt.open_tickets.clear()
            self._stop(attempt, why)

    # --- Posting ---

    def _post_finished_layers(self) -> None:
        """Post every layer that the counter has passed; it may have passed several at once."""
        num_layers = len(self._layers)
        counter, now = self.read_counter(), self.clock()
        while self._steps:
            pace, chunks = self._steps[0]
            # What follows the last layer are the tails.
            num_finished = min(counter - pace.base, num_layers + 1)
            for layer in range(pace.counter - pace.base, num_finished):
                for chunk in chunks:
                    self._post_chunk(chunk, layer)
            if num_finished <= num_layers:
                self._pause = pace.pause(counter, now, layer_runs=num_finished < num_layers)
                return
            self._steps.popleft()
        self._pause = math.inf

    def _post_chunk(self, chunk: Span, layer: int) -> None:
        attempt = self._attempts.get(chunk.number)
        if attempt is None or attempt.is_stopped:
            return
        if layer < len(self._layers):
            what, writes = f"layer {layer}", self._layer_writes(attempt, chunk, layer)
        else:
            what, writes = "tail", self._tail_writes(attempt, chunk)
        peer, imm = attempt.link.peer, attempt.request.imm
        try:
            for write in writes:
                ticket = self.transfer.write_pages(peer, write, imm)
                now = self.clock()
                attempt.first_post = min(attempt.first_post, now)
                attempt.open_tickets[ticket] = what, len(write.source_offsets), now
        except TransferError as error:
            # Rule 6: a write that will not come becomes a message, or the decoder waits in vain.
            logger.warning("attempt %#x failed: %s", attempt.request.attempt_id, error)
            self._stop(attempt, str(error))

    def _layer_writes(self, attempt: Attempt, chunk: Span, layer: int) -> Iterator[Pages]:
        """Of the pages that a chunk finishes."""
        link, request = attempt.link, attempt.request
        kind, layer = self._layers[layer]
        layout, target = self.kinds[kind][0], link.layouts[kind]
        first = chunk.first_token // layout.page_size
        end = (chunk.first_token + len(chunk.token_ids)) // layout.page_size
        if chunk.tail_slot is not None:
            end = len(request.page_indices)
        if first >= end:
            return
        here = np.fromiter(chunk.page_indices[first:end], np.int64)
        there = np.fromiter(request.page_indices[first:end], np.int64)
        src, dst = layout.page_offsets(layer, here), target.page_offsets(layer, there)
        ours, theirs = self.kv_regions, link.hello.kv_regions
        group = theirs[request.dp_rank * link.hello.tp :]
        for s in attempt.slices[kind]:
            regions = ours[s.source_rank], group[s.destination_rank]
            yield Pages(*regions, s.nbytes, *s.offsets(src, dst))

    def _tail_writes(self, attempt: Attempt, chunk: Span) -> Iterator[Pages]:
        if chunk.tail_slot is None:
            return
        request, nbytes = attempt.request, self.tails.itemsize
        tail = self.tails[chunk.tail_slot]
        tail["attempt_id"] = request.attempt_id
        tail["first_post_ns"] = round(min(attempt.first_post, self.clock()) * 1e9)
        src, dst = (np.array([slot * nbytes]) for slot in (chunk.tail_slot, request.tail_slot))
        yield Pages(self.tail_region, attempt.link.hello.tail_region, nbytes, src, dst)

    # --- Ends ---

    def _settle(self, ticket: Ticket) -> None:
        """Account for an ended ticket; unknown ones are a probe's, or of a lost peer."""
        for attempt in list(self._attempts.values()):
            if ticket in attempt.open_tickets:
                what, count, start = attempt.open_tickets.pop(ticket)
                number, now = hex(attempt.request.attempt_id), self.clock()
                self.trace.span("layer writes", what, start, now, attempt=number, writes=count)
                attempt.num_ended += count
                self._release_if_idle(attempt)

    def _stop(self, attempt: Attempt, why: str) -> None:
        """Post nothing more and say how many writes were posted: the decoder counts them. If it was
        stopped before, say nothing."""
        if not attempt.is_stopped:
            attempt.is_stopped = True
            # None: the peer is lost, and nobody will hear how many there were.
            posted = attempt.num_ended + (self.transfer.withdraw(list(attempt.open_tickets)) or 0)
            stopped = PrefillStopped(attempt_id=attempt.request.attempt_id, why=why, posted=posted)
            self._send(attempt.link.peer, stopped)
        self._release_if_idle(attempt)

    def _release_if_idle(self, attempt: Attempt) -> None:
        """Rule 4: source pages go back only when no write of ours reads them."""
        all_ended = attempt.num_ended == attempt.request.expected_count
        if attempt.open_tickets or not (all_ended or attempt.is_stopped):
            return
        number, name = attempt.request.attempt_id, f"{len(attempt.request.token_ids) - 1} tokens"
        self.trace.span("prefills", name, attempt.opened, self.clock(), attempt=hex(number))
        del self._attempts[number]
        self.post(ReleasePrefill(job=number))


def check(attempt: Attempt, kinds: Sequence[tuple[KVLayout, Page]]) -> None:
    """ValueError for a request whose writes would go to a wrong place, or be more or fewer than the
    decoder counts. `kinds` are ours."""
    request, theirs = attempt.request, attempt.link.hello
    pages, num_groups = request.page_indices, len(theirs.kv_regions) // theirs.tp
    num_pages = pages_for(len(request.token_ids) - 1, kinds[0][0].page_size)
    numbers = (layout.num_layers for layout, _ in kinds)
    count = expected_count(num_pages, zip(numbers, attempt.slices, strict=True))
    rules = {
        f"{num_pages} different pages": len(pages) == len(set(pages)) == num_pages,
        f"page indices below {theirs.num_pages}": max(pages, default=0) < theirs.num_pages,
        f"a tail_slot below {theirs.num_tail_slots}": request.tail_slot < theirs.num_tail_slots,
        f"a dp_rank below {num_groups}": request.dp_rank < num_groups,
        f"an expected_count of {count}": request.expected_count == count,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"expected {', '.join(broken)}; got {request!s:.400}")
