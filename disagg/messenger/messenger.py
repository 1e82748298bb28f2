"""What both halves of the hand-over share: what they are built on, messages, silence, beats.

    transfer.poll() -> MessageReceived   decoded, counts as a sign of life -> _on_message
                       PeerLost          its silence is of no interest     -> _on_peer_lost
    clock           -> a peer is silent: closed;  a beat is due: Heartbeat to every greeted peer

The halves are `decoder.py` and `prefiller.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from disagg.config import MessengerConfig
from disagg.hooks import EngineEvent
from disagg.messenger.liveness import Liveness
from disagg.messenger.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    ProtocolError,
    decode,
    encode,
)
from disagg.messenger.node_memory import NodeMemory
from disagg.trace import Trace
from disagg.transfer.interface import Event, MessageReceived, Peer, PeerLost, TransferEngine


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What a messenger and its parts are built on. `post` tells the engine, `clock` is seconds."""

    transfer: TransferEngine
    memory: NodeMemory
    hello: Hello
    config: MessengerConfig
    clock: Callable[[], float]
    post: Callable[[EngineEvent], None]
    trace: Trace = field(default_factory=Trace)


class Messenger(ABC):
    """One half of the hand-over; see the module's docstring."""

    def __init__(self, wiring: Wiring) -> None:
        self._transfer = wiring.transfer
        self._memory = wiring.memory
        self._hello = wiring.hello
        self._config = wiring.config
        self._clock = wiring.clock
        self._post = wiring.post
        self._trace = wiring.trace
        self._liveness = Liveness(wiring.config, wiring.clock)

    def close(self, why: str) -> None:
        """Say goodbye to every greeted peer."""
        for peer in self._greeted():
            self._send(peer, Goodbye(why=why))

    @abstractmethod
    def _greeted(self) -> Iterable[Peer]:
        """Peers that said a Hello that fits."""

    def _send(self, peer: Peer, message: Message) -> None:
        self._transfer.send(peer, encode(message))

    def _beat(self, peer: Peer) -> None:
        self._send(peer, Heartbeat(clock_ns=round(self._clock() * 1e9)))

    def _watch_silence(self) -> None:
        """Give up who is silent, and be silent to nobody; after reading what arrived."""
        for peer in self._liveness.silent():
            self._transfer.close_peer(peer, f"silent for {self._config.peer_timeout} s")
        if self._liveness.beat_due():
            for peer in self._greeted():
                self._beat(peer)

    def _on_event(self, event: Event) -> None:
        match event:
            case MessageReceived():
                try:
                    message = decode(event.data)
                    self._liveness.heard(event.peer)
                    self._on_message(event.peer, message)
                except ProtocolError as error:
                    self._on_protocol_error(event.peer, str(error))
            case PeerLost():
                self._liveness.drop(event.peer)
                self._on_peer_lost(event)

    def _on_message(self, peer: Peer, message: Message) -> None:
        """What anybody may say; each half first looks for what only its peers say."""
        match message:
            case Goodbye():
                self._transfer.close_peer(peer, f"said goodbye: {message.why}")
            case Heartbeat():
                pass
            case _:
                name = type(message).__name__
                raise ProtocolError(f"{name} is nothing that a {self._hello.role} is told")

    def _on_protocol_error(self, peer: Peer, why: str) -> None:
        self._transfer.close_peer(peer, why)

    @abstractmethod
    def _on_peer_lost(self, event: PeerLost) -> None:
        """A connection is over, greeted or not."""
