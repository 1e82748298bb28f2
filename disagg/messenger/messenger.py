"""What both halves of the hand-over share: whom they greet, messages, silence, beats.

    transfer.poll() -> MessageReceived   decoded, counts as a sign of life -> _on_message
                       PeerLost          its silence is of no interest     -> _on_peer_lost
    clock           -> a peer is silent: closed;  a beat is due: Heartbeat to every greeted peer

Whatever would make bytes wrong is refused in Hello, by name and with both values. The halves are
`decoder.py` and `prefiller.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from disagg.config import MessengerConfig
from disagg.hooks import EngineEvent
from disagg.kv_layout import KVLayout
from disagg.messenger import messages
from disagg.messenger.messages import Hello, Identity, Message, ProtocolError, Role
from disagg.messenger.sharding import Page
from disagg.trace import Trace
from disagg.transfer.interface import Event, MessageReceived, Peer, PeerLost
from disagg.transfer.transfer_engine import TransferEngine

#: Whom a node of a role greets.
ACCEPTS = {Role.PREFILLER: (Role.DECODER, Role.PROBE), Role.DECODER: (Role.PREFILLER,)}


@dataclass(kw_only=True, eq=False)
class Messenger(ABC):
    """One half of the hand-over; see the module's docstring.

    `hello` is what this node says of itself. `kinds` are, for the model and perhaps a draft model,
    the layout of each rank's region and a page of the whole model, whose heads the ranks share.
    `tails` is a view of the tail region: `kv_layout.tail_slot` `[num_tail_slots]`. `post` tells the
    engine, `clock` is seconds.
    """

    transfer: TransferEngine
    hello: Hello
    kinds: Sequence[tuple[KVLayout, Page]]
    tails: npt.NDArray[np.void]
    config: MessengerConfig
    clock: Callable[[], float]
    post: Callable[[EngineEvent], None]
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        #: Seconds for which each peer has said nothing.
        self._silence: dict[Peer, float] = {}
        #: Peers given up whose PeerLost is still to come, and why at first.
        self._closed: dict[Peer, str] = {}
        #: Of every peer that has said one that fits.
        self._greeted: dict[Peer, Hello] = {}
        self._next_beat = self._last_look = self.clock()

    def close(self, why: str) -> None:
        """Say goodbye to every greeted peer."""
        for peer in self._greeted:
            self._send(peer, messages.Goodbye(why=f"said goodbye: {why}"))

    def _send(self, peer: Peer, message: Message) -> None:
        self.transfer.send(peer, messages.encode(message))

    def _beat(self, peer: Peer) -> None:
        self._send(peer, messages.Heartbeat(clock_ns=round(self.clock() * 1e9)))

    def _close_peer(self, peer: Peer, why: str) -> None:
        """Give a peer up: what it said after that and lies here already must change nothing."""
        self._closed.setdefault(peer, why)
        self.transfer.close_peer(peer, why)

    def _watch_silence(self) -> None:
        """Give up who is silent, and be silent to nobody; after reading what arrived.

        A look counts for one heartbeat interval at most: had this process been stopped or starved,
        what peers said meanwhile would lie unread, and that is not their silence.
        """
        now, interval = self.clock(), self.config.heartbeat_interval
        observed = min(now - self._last_look, interval)
        self._last_look = now
        for peer in list(self._silence):
            self._silence[peer] += observed
            if self._silence[peer] >= self.config.peer_timeout:
                self._close_peer(peer, f"silent for {self.config.peer_timeout} s")
        if now >= self._next_beat:
            self._next_beat = now + interval
            for peer in self._greeted:
                self._beat(peer)

    def _on_event(self, event: Event) -> None:
        match event:
            case MessageReceived() if event.peer in self._closed:
                self._close_peer(event.peer, "it goes on")  # it was at most refused, and knows it
            case MessageReceived():
                self._silence[event.peer] = 0.0
                try:
                    self._on_message(event.peer, messages.decode(event.data))
                except ProtocolError as error:
                    # Refused, one of another version is shown ours.
                    end = self._close_peer if event.peer in self._greeted else self._refuse
                    end(event.peer, str(error))
            case PeerLost():
                self._silence.pop(event.peer, None)
                self._greeted.pop(event.peer, None)
                self._on_peer_lost(event.peer, self._closed.pop(event.peer, event.why))

    def _refuse(self, peer: Peer, why: str) -> None:
        """Hear nothing more of a peer, and tell it. It hangs up then, or its silence ends it: with
        a connection that ends at once, what was said last might be lost."""
        self._closed[peer] = why
        self._send(peer, messages.Goodbye(why=why))

    def _on_message(self, peer: Peer, message: Message) -> None:
        """One Hello comes first, but for a Goodbye."""
        is_greeted = peer in self._greeted
        match message:
            case messages.Goodbye():
                self._close_peer(peer, message.why)
            case Hello() if not is_greeted:
                check_hello(self.hello, message, self.kinds)
                self._on_hello(peer, message)
                self._greeted[peer] = message
            case _ if isinstance(message, Hello) or not is_greeted:
                raise ProtocolError(f"expected one Hello, and first, got {message!s:.80}")
            case _:
                self._on_word(peer, message)

    @abstractmethod
    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        """The first of a peer, and it fits. ProtocolError if there is something against it."""

    def _on_word(self, peer: Peer, message: Message) -> None:
        """What a greeted peer may say; each half first looks for what only its peers say."""
        if not isinstance(message, messages.Heartbeat):
            name = type(message).__name__
            raise ProtocolError(f"{name} is nothing that a {self.hello.role} is told")

    @abstractmethod
    def _on_peer_lost(self, peer: Peer, why: str) -> None:
        """A connection is over, greeted or not."""


def check_hello(ours: Hello, theirs: Hello, kinds: Sequence[tuple[KVLayout, Page]]) -> None:
    """ProtocolError if this pair cannot work. The text is for people on both sides."""
    if theirs.role not in (accepts := ACCEPTS[ours.role]):
        raise ProtocolError(
            f"a {ours.role} works with a {' or a '.join(accepts)}, not with a {theirs.role}"
        )
    if theirs.role == Role.PROBE:
        return
    if theirs.identity is None:
        raise ProtocolError(f"a {theirs.role} says which model it holds; got a Hello without")
    for name in Identity.__struct_fields__:
        mine, other = getattr(ours.identity, name), getattr(theirs.identity, name)
        if mine != other:
            raise ProtocolError(
                f"{name} differs: {ours.role} {mine}, {theirs.role} {other};"
                " start both nodes with the same model and flags"
            )
    tp, num_ranks = theirs.tp, len(theirs.kv_regions)
    for _, (_, heads, _) in kinds:
        if (heads % tp and tp % heads) or not num_ranks or num_ranks % tp:
            raise ProtocolError(
                f"tp does not fit: {ours.role} {ours.tp}, {theirs.role} {tp} for {heads} KV heads"
                f" and {num_ranks} KV regions; expected a divisor or a multiple, a region a rank"
            )
