"""The decoder's half of the hand-over: ask for a prompt's KV, count its writes, say it is whole.

    engine                       DecoderMessenger                     prefiller
      | on_fetch(pages, slot) ---->| expect(imm, count)                  |
      |                            | PrefillRequest -------------------> |
      |        pages, tail slot <=== one-sided writes, imm ============= |
      | <------ KVEnded ---------- | count reached, tail id is ours      |

    WAITING --a prefiller is ready--> REQUESTED
    WAITING --cancelled, or none is ready in time--> GONE
    REQUESTED --count reached--> GONE (KVFailed first if the tail is not ours)
    REQUESTED --PrefillStopped tells `posted`--> DRAINING;  --cancelled, too old--> CANCELLING
    CANCELLING --PrefillStopped tells `posted`--> DRAINING;  --whole count reached--> GONE
    DRAINING --as much as was posted has arrived--> GONE
    REQUESTED, CANCELLING, DRAINING --peer lost--> FENCING --fenced--> GONE

Every attempt ends with `KVEnded`, said only when nothing can land in the pages any more. The engine
hears `KVFailed` at once, so that no client waits for a dead peer, and `KVStuck` of a fence that
takes long, so that no other waits for its pages. One thread makes every call but `on_fetch` and
`on_cancel`. Connections are in `prefillers.py`.
"""

import enum
import logging
import math
from collections import Counter, deque
from collections.abc import Collection

import msgspec

from disagg.config import OnFailure
from disagg.hooks import FetchKV, KVEnded, KVFailed, KVStuck
from disagg.kv_layout import TailLayout
from disagg.messenger import messages
from disagg.messenger.messages import Hello, Message, ProtocolError
from disagg.messenger.messenger import Messenger, Wiring
from disagg.messenger.prefillers import Prefiller, Prefillers
from disagg.messenger.sharding import expected_count
from disagg.request import TransferStats
from disagg.transfer.interface import Event, ImmReached, Peer, PeerFenced

logger = logging.getLogger(__name__)


class AttemptState(enum.IntEnum):
    """How far an attempt has come on the decoder: it only goes forward, and may leave out some."""

    WAITING = 0  # for a prefiller that is ready
    REQUESTED = 1  # counting towards the whole
    CANCELLING = 2  # Cancel is sent; what was posted is not known yet
    DRAINING = 3  # counting towards what was posted
    FENCING = 4  # the peer is gone; its writes may still land


class Attempt(msgspec.Struct, kw_only=True):
    """One `FetchKV` in work. `deadline` is on the messenger's clock, in seconds."""

    fetch: FetchKV
    deadline: float
    state: AttemptState = AttemptState.WAITING
    imm: int = 0
    count: int = 0
    prefiller: Prefiller | None = None
    peer: Peer = 0
    transport: str = ""

    def move(self, to: AttemptState) -> None:
        """Go forward."""
        assert to > self.state, f"attempt went {self.state!r} -> {to!r}"
        self.state = to

    @property
    def is_wanted(self) -> bool:
        """Whether the engine waits for it: it has not cancelled it, nor heard how it ends."""
        return self.state <= AttemptState.REQUESTED


class DecoderMessenger(Messenger):
    """See the module's docstring. `prefillers` knows the connections."""

    def __init__(self, wiring: Wiring, prefillers: Prefillers) -> None:
        super().__init__(wiring)
        self._prefillers = prefillers
        self._attempts: dict[int, Attempt] = {}
        self._inbox: deque[FetchKV | int] = deque()
        self._next_imm = 1

    # --- From the engine, any thread ---

    def on_fetch(self, fetch: FetchKV) -> None:
        """`DecodeHooks`: have this prompt prefilled elsewhere."""
        self._inbox.append(fetch)
        self._transfer.wake()

    def on_cancel(self, attempt: int) -> None:
        """`DecodeHooks`: nobody wants this attempt any more."""
        self._inbox.append(attempt)
        self._transfer.wake()

    # --- The loop ---

    def poll(self, timeout: float) -> None:
        """One look at everything: connections, transfer events, the engine's wishes, the clocks."""
        for peer in self._prefillers.connect_due():
            self._silence[peer] = 0.0
            self._send(peer, self._hello)
        for event in self._transfer.poll(min(timeout, self._config.heartbeat_interval / 2)):
            self._on_event(event)
        while self._inbox:
            self._on_inbox(self._inbox.popleft())
        for attempt in list(self._attempts.values()):
            if attempt.state is AttemptState.WAITING:
                self._request(attempt)
            elif self._clock() >= attempt.deadline:
                self._on_deadline(attempt)
        self._watch_silence()

    def _greeted(self) -> Collection[Peer]:
        return [prefiller.peer for prefiller in self._prefillers.ready()]

    # --- Asking ---

    def _on_inbox(self, wish: FetchKV | int) -> None:
        if isinstance(wish, FetchKV):
            deadline = self._clock() + self._config.peer_timeout
            self._attempts[wish.attempt] = Attempt(fetch=wish, deadline=deadline)
            return
        attempt = self._attempts.get(wish)
        if attempt is None:
            return  # it ended by itself while the cancel was on its way
        if attempt.state is AttemptState.WAITING:
            self._end(attempt)
        elif attempt.state is AttemptState.REQUESTED:
            self._cancel(attempt)

    def _request(self, attempt: Attempt) -> None:
        """Send an attempt to a prefiller. If there is none, let it wait, or end it and say why."""
        fetch = attempt.fetch
        load = Counter(other.peer for other in self._attempts.values())
        chosen = self._prefillers.choose(len(fetch.page_indices), load)
        if not isinstance(chosen, Prefiller):
            may_wait = self._config.on_failure == "retry" and not chosen.permanent
            if not may_wait or self._clock() >= attempt.deadline:
                self._fail(attempt, chosen.why, permanent=chosen.permanent)
                self._end(attempt)
            return
        num_layers, num_pages = self._memory.layout.num_layers, len(fetch.page_indices)
        count = expected_count(chosen.slices, num_layers, num_pages)
        attempt.move(AttemptState.REQUESTED)
        attempt.deadline = self._clock() + self._config.request_timeout
        attempt.prefiller, attempt.peer = chosen, chosen.peer
        attempt.transport = self._transfer.transport_to(chosen.peer)
        attempt.imm, attempt.count = self._next_imm, count
        self._next_imm += 1
        self._transfer.expect(attempt.peer, attempt.imm, count)
        request = messages.PrefillRequest(
            attempt_id=fetch.attempt,
            token_ids=fetch.token_ids,
            page_indices=fetch.page_indices,
            tail_slot=fetch.tail_slot,
            imm=attempt.imm,
            expected_count=count,
            dp_rank=fetch.dp_rank,
        )
        self._send(attempt.peer, request)

    def _cancel(self, attempt: Attempt) -> None:
        attempt.move(AttemptState.CANCELLING)
        # An answer is due by the attempt's age or, if that is near, after one peer_timeout.
        attempt.deadline = max(attempt.deadline, self._clock() + self._config.peer_timeout)
        self._send(attempt.peer, messages.Cancel(attempt_id=attempt.fetch.attempt))

    def _on_deadline(self, attempt: Attempt) -> None:
        if attempt.state is AttemptState.REQUESTED:
            self._fail(attempt, f"no KV after {self._config.request_timeout} s (request_timeout)")
            self._cancel(attempt)
        elif attempt.state in (AttemptState.CANCELLING, AttemptState.DRAINING):
            # It beats, yet neither answers nor finishes: only a fence makes the pages safe.
            self._close_peer(attempt.peer, "no answer to a Cancel in time")
        elif attempt.state is AttemptState.FENCING:
            attempt.deadline = math.inf  # said once
            self._post(KVStuck(attempt=attempt.fetch.attempt))

    # --- What happened ---

    def _on_event(self, event: Event) -> None:
        match event:
            case ImmReached():
                self._on_imm_reached(event)
            case PeerFenced():
                for attempt in list(self._attempts.values()):
                    if attempt.state is AttemptState.FENCING and attempt.peer == event.peer:
                        self._end(attempt)
            case _:
                super()._on_event(event)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        self._prefillers.greet(peer, hello)

    def _on_word(self, peer: Peer, message: Message) -> None:
        match message:
            case messages.PrefillStopped():
                self._on_stopped(peer, message)
            case messages.Heartbeat():
                self._prefillers.on_beat(peer, message.clock_ns)
            case _:
                super()._on_word(peer, message)

    def _on_stopped(self, peer: Peer, message: messages.PrefillStopped) -> None:
        """Rule 3: the pages are free when as much has arrived as was ever posted."""
        attempt = self._attempts.get(message.attempt_id)
        if attempt is None or attempt.peer != peer:
            return  # it ended before the answer came
        if message.posted > attempt.count or attempt.state >= AttemptState.DRAINING:
            raise ProtocolError(f"expected one stop of at most {attempt.count} writes: {message}")
        self._fail(attempt, message.why, permanent=message.permanent)
        attempt.move(AttemptState.DRAINING)
        self._transfer.lower(attempt.imm, message.posted)

    def _on_imm_reached(self, event: ImmReached) -> None:
        attempt = next((a for a in self._attempts.values() if a.imm == event.imm), None)
        if attempt is None or attempt.state is AttemptState.FENCING:
            return
        if attempt.is_wanted:
            words = self._memory.tail_words(attempt.fetch.tail_slot)
            found = int(words[TailLayout.ATTEMPT_ID])
            if found == attempt.fetch.attempt:
                self._end(attempt, self._arrived(attempt))
                return
            self._fail(attempt, f"tail slot holds attempt {found:#x}, expected our own")
        self._end(attempt)

    def _arrived(self, attempt: Attempt) -> TransferStats:
        """The KV is whole, its last write was just counted: what was moved."""
        assert attempt.prefiller is not None, "moved by nobody"
        attempt.prefiller.num_failures = 0
        fetch, lag = attempt.fetch, attempt.prefiller.clock_lag
        layout = self._memory.layout
        num_pages = self._memory.tp * layout.num_layers * len(fetch.page_indices)
        words, now = self._memory.tail_words(fetch.tail_slot).tolist(), self._clock()
        exposed = max(0.0, now - lag - words[TailLayout.FORWARD_END_NS] / 1e9)
        span = max(exposed, now - lag - words[TailLayout.FIRST_POST_NS] / 1e9)
        self._trace.span("KV transfer", f"attempt {fetch.attempt:#x}", now - span, now)
        return TransferStats(
            prefiller="{}:{}".format(*attempt.prefiller.address),
            transport=attempt.transport,
            writes=attempt.count,
            bytes=num_pages * layout.page_bytes + self._memory.tail.slot_bytes,
            retries=fetch.retries,
            exposed=exposed,
            span=span,
        )

    def _on_peer_lost(self, peer: Peer, why: str) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.peer == peer and attempt.state is not AttemptState.FENCING:
                self._fail(attempt, f"prefiller lost: {why}")
                attempt.move(AttemptState.FENCING)
                attempt.deadline = self._clock() + self._config.peer_timeout
        self._prefillers.lost(peer, why)

    # --- Ends ---

    def _fail(self, attempt: Attempt, why: str, *, permanent: bool = False) -> None:
        """Tell the engine, unless it knows, that no KV will come; the caller moves the state."""
        if not attempt.is_wanted:
            return
        then: OnFailure = "fail" if permanent else self._config.on_failure
        # Rule 9: one retry for each prefiller there is, then the decoder computes by itself.
        again = attempt.imm and attempt.fetch.retries < len(self._prefillers)
        if then == "retry" and not again:
            then = "local"
        # A request that ends with the failure tells it to its client.
        level = logging.INFO if then == "fail" else logging.WARNING
        logger.log(level, "attempt %#x failed (then %s): %s", attempt.fetch.attempt, then, why)
        if attempt.prefiller is not None:
            attempt.prefiller.num_failures += 1
        self._post(KVFailed(attempt=attempt.fetch.attempt, why=why, then=then))

    def _end(self, attempt: Attempt, moved: TransferStats | None = None) -> None:
        """Nothing can land any more; `moved` if the KV is whole."""
        del self._attempts[attempt.fetch.attempt]
        self._post(KVEnded(attempt=attempt.fetch.attempt, transfer=moved))
