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
takes long, so that no other waits for its pages. A prefiller that is lost, refuses or is silent is
tried again after a delay. One thread makes every call but `on_fetch` and `on_cancel`.
"""

import enum
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from disagg.config import OnFailure
from disagg.hooks import FetchKV, KVEnded, KVFailed, KVStuck
from disagg.messenger import messages
from disagg.messenger.messages import Hello, Message, ProtocolError
from disagg.messenger.messenger import Messenger
from disagg.messenger.sharding import Slice, expected_count, make_plan
from disagg.request import TransferStats
from disagg.transfer.interface import Event, ImmReached, Peer, PeerFenced

logger = logging.getLogger(__name__)

Address = tuple[str, int]

#: Longest pause between two tries to connect, in seconds.
MAX_DELAY = 2.0


class Prefiller(msgspec.Struct, kw_only=True):
    """One address: down without `peer`, ready once that is greeted.

    `num_failures` counts attempts that failed since the last one that worked. `delay` is the pause
    before the next connection, in seconds; `epoch` of the last process that answered here.
    `clock_lag` is the smallest (received - sent) of its heartbeats, in seconds: how far our clock
    is ahead of its, and the travel of the fastest beat. An address that turned out to be another's
    second name is not tried again.
    """

    address: Address
    peer: Peer = 0
    kinds: Sequence[tuple[int, Sequence[Slice]]] = ()
    retry_at: float = 0.0
    num_failures: int = 0
    delay: float = 0.0
    epoch: int | None = None
    clock_lag: float = math.inf


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


@dataclass(kw_only=True, eq=False)
class DecoderMessenger(Messenger):
    """See the module's docstring. `on_link(address, ready, why)` reports each change of the link to
    a prefiller."""

    addresses: Sequence[Address]
    on_link: Callable[[Address, bool, str], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prefillers = [Prefiller(address=address) for address in dict.fromkeys(self.addresses)]
        self._attempts: dict[int, Attempt] = {}
        self._inbox: deque[FetchKV | int] = deque()
        self._next_imm = 1

    # --- From the engine, any thread ---

    def on_fetch(self, fetch: FetchKV) -> None:
        """`DecodeHooks`: have this prompt prefilled elsewhere."""
        self._inbox.append(fetch)
        self.transfer.wake()

    def on_cancel(self, attempt: int) -> None:
        """`DecodeHooks`: nobody wants this attempt any more."""
        self._inbox.append(attempt)
        self.transfer.wake()

    # --- The loop ---

    def poll(self, timeout: float) -> None:
        """One look at everything: connections, transfer events, the engine's wishes, the clocks."""
        self._connect()
        for event in self.transfer.poll(min(timeout, self.config.heartbeat_interval / 2)):
            self._on_event(event)
        while self._inbox:
            self._on_inbox(self._inbox.popleft())
        for attempt in list(self._attempts.values()):
            if attempt.state is AttemptState.WAITING:
                self._request(attempt)
            elif self.clock() >= attempt.deadline:
                self._on_deadline(attempt)
        self._watch_silence()

    # --- Prefillers ---

    def _by_peer(self, peer: Peer) -> Prefiller:
        return next(p for p in self._prefillers if p.peer == peer)

    def _connect(self) -> None:
        """Start the connections whose time has come."""
        for prefiller in self._prefillers:
            if not prefiller.peer and self.clock() >= prefiller.retry_at:
                prefiller.peer = self.transfer.connect(*prefiller.address)
                self._silence[prefiller.peer] = 0.0
                self._send(prefiller.peer, self.hello)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        prefiller = self._by_peer(peer)
        twin = next((p for p in self._prefillers if p.epoch == hello.epoch), prefiller)
        if twin is not prefiller:  # rule 8 would end one connection for the other for ever
            prefiller.retry_at = math.inf
            raise ProtocolError("the prefiller {}:{} again".format(*twin.address))
        prefiller.epoch, prefiller.delay = hello.epoch, 0.0
        # Any of the replica sets: all have the same count, and that is all they are for here.
        prefiller.kinds = [
            (layout.num_layers, make_plan(page, hello.tp, self.hello.tp)[0])
            for layout, page in self.kinds
        ]
        self.on_link(prefiller.address, True, "ready")

    def _on_beat(self, prefiller: Prefiller, clock_ns: int) -> None:
        lag = self.clock() - clock_ns / 1e9
        prefiller.clock_lag = min(prefiller.clock_lag, lag)
        self.trace.facts[f"clock lag of {prefiller.epoch}"] = prefiller.clock_lag

    def _on_peer_lost(self, peer: Peer, why: str) -> None:
        """Its attempts wait for the fence, and its address is down until it is tried again."""
        for attempt in list(self._attempts.values()):
            if attempt.peer == peer and attempt.state is not AttemptState.FENCING:
                self._fail(attempt, f"prefiller lost: {why}")
                attempt.move(AttemptState.FENCING)
                attempt.deadline = self.clock() + self.config.peer_timeout
        prefiller = self._by_peer(peer)
        prefiller.peer, prefiller.clock_lag = 0, math.inf
        # Whoever refuses or is away will do so for a while: ask less and less often.
        shortest = self.config.reconnect_interval
        prefiller.delay = min(max(shortest, 2 * prefiller.delay), MAX_DELAY)
        prefiller.retry_at = max(prefiller.retry_at, self.clock() + prefiller.delay)
        self.on_link(prefiller.address, False, why)

    # --- Asking ---

    def _on_inbox(self, wish: FetchKV | int) -> None:
        if isinstance(wish, FetchKV):
            deadline = self.clock() + self.config.peer_timeout
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
        """Send an attempt to a prefiller: the one with the fewest recent failures, then the least
        load. If none can take it, let it wait, or end it and say why."""
        fetch, num_pages = attempt.fetch, len(attempt.fetch.page_indices)
        pools = {peer: hello.num_pages for peer, hello in self._greeted.items()}
        able = [p for p in self._prefillers if num_pages <= pools.get(p.peer, 0)]
        if not able:
            # Once all there are have said how much they can take, none ever could.
            permanent = len(pools) == len(self._prefillers)
            may_wait = self.config.on_failure == "retry" and not permanent
            if not may_wait or self.clock() >= attempt.deadline:
                most = max(pools.values(), default=0)
                small = f"prompt needs {num_pages} pages: a prefiller's pool has {most}"
                why = f"{small}; raise --num-pages" if pools else "no prefiller is connected"
                self._fail(attempt, why, permanent=permanent)
                self._end(attempt)
            return
        load = Counter(other.peer for other in self._attempts.values())
        chosen = min(able, key=lambda p: (p.num_failures, load[p.peer]))
        count = expected_count(num_pages, chosen.kinds)
        attempt.move(AttemptState.REQUESTED)
        attempt.deadline = self.clock() + self.config.request_timeout
        attempt.prefiller, attempt.peer = chosen, chosen.peer
        attempt.transport = self.transfer.transport_to(chosen.peer)
        attempt.imm, attempt.count = self._next_imm, count
        self._next_imm += 1
        self.transfer.expect(attempt.peer, attempt.imm, count)
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
        attempt.deadline = max(attempt.deadline, self.clock() + self.config.peer_timeout)
        self._send(attempt.peer, messages.Cancel(attempt_id=attempt.fetch.attempt))

    def _on_deadline(self, attempt: Attempt) -> None:
        if attempt.state is AttemptState.REQUESTED:
            self._fail(attempt, f"no KV after {self.config.request_timeout} s (request_timeout)")
            self._cancel(attempt)
        elif attempt.state in (AttemptState.CANCELLING, AttemptState.DRAINING):
            # It beats, yet neither answers nor finishes: only a fence makes the pages safe.
            self._close_peer(attempt.peer, "no answer to a Cancel in time")
        elif attempt.state is AttemptState.FENCING:
            attempt.deadline = math.inf  # said once
            self.post(KVStuck(attempt=attempt.fetch.attempt))

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

    def _on_word(self, peer: Peer, message: Message) -> None:
        match message:
            case messages.PrefillStopped():
                self._on_stopped(peer, message)
            case messages.Heartbeat():
                self._on_beat(self._by_peer(peer), message.clock_ns)
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
        self.transfer.lower(attempt.imm, message.posted)

    def _on_imm_reached(self, event: ImmReached) -> None:
        attempt = next((a for a in self._attempts.values() if a.imm == event.imm), None)
        if attempt is None or attempt.state is AttemptState.FENCING:
            return
        if attempt.is_wanted:
            found = int(self.tails["attempt_id"][attempt.fetch.tail_slot])
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
        page_bytes = sum(layout.num_layers * layout.page_bytes for layout, _ in self.kinds)
        num_pages = self.hello.tp * len(fetch.page_indices)
        _, first_post_ns, forward_end_ns, *_ = self.tails[fetch.tail_slot].item()
        now = self.clock()
        exposed = max(0.0, now - lag - forward_end_ns / 1e9)
        span = max(exposed, now - lag - first_post_ns / 1e9)
        self.trace.span("KV transfer", f"attempt {fetch.attempt:#x}", now - span, now)
        return TransferStats(
            prefiller="{}:{}".format(*attempt.prefiller.address),
            transport=attempt.transport,
            writes=attempt.count,
            bytes=num_pages * page_bytes + self.tails.itemsize,
            retries=fetch.retries,
            exposed=exposed,
            span=span,
        )

    # --- Ends ---

    def _fail(self, attempt: Attempt, why: str, *, permanent: bool = False) -> None:
        """Tell the engine, unless it knows, that no KV will come; the caller moves the state."""
        if not attempt.is_wanted:
            return
        then: OnFailure = "fail" if permanent else self.config.on_failure
        # Rule 9: one retry for each prefiller there is, then the decoder computes by itself.
        again = attempt.imm and attempt.fetch.retries < len(self._prefillers)
        if then == "retry" and not again:
            then = "local"
        # A request that ends with the failure tells it to its client.
        level = logging.INFO if then == "fail" else logging.WARNING
        logger.log(level, "attempt %#x failed (then %s): %s", attempt.fetch.attempt, then, why)
        if attempt.prefiller is not None:
            attempt.prefiller.num_failures += 1
        self.post(KVFailed(attempt=attempt.fetch.attempt, why=why, then=then))

    def _end(self, attempt: Attempt, moved: TransferStats | None = None) -> None:
        """Nothing can land any more; `moved` if the KV is whole."""
        del self._attempts[attempt.fetch.attempt]
        self.post(KVEnded(attempt=attempt.fetch.attempt, transfer=moved))
