"""Who has been silent for too long: when to send a heartbeat, when to give a peer up.

Silence only. How long a request may take is another clock (`decoder.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.config import MessengerConfig
from disagg.transfer.interface import Peer


class Liveness:
    """How long each peer of one node has been silent, by an injected `clock` in seconds."""

    def __init__(self, config: MessengerConfig, clock: Callable[[], float]) -> None:
        self._heartbeat_interval = config.heartbeat_interval
        self._peer_timeout = config.peer_timeout
        self._clock = clock
        self._silence: dict[Peer, float] = {}
        self._next_beat = clock()
        self._last_look = clock()

    def heard(self, peer: Peer) -> None:
        """The peer said something, or the wait for its first word starts."""
        self._silence[peer] = 0.0

    def drop(self, peer: Peer) -> None:
        """The peer is gone: no more clock for it."""
        self._silence.pop(peer, None)

    def beat_due(self) -> bool:
        """True once every heartbeat interval: beat to everyone now."""
        now = self._clock()
        if now < self._next_beat:
            return False
        self._next_beat = now + self._heartbeat_interval
        return True

    def silent(self) -> list[Peer]:
        """Peers that said nothing for `peer_timeout`; call it after reading what arrived.

        A look counts for one heartbeat interval at most: had this process been stopped or starved,
        what peers said meanwhile would lie unread, and that is not their silence.
        """
        now = self._clock()
        observed = min(now - self._last_look, self._heartbeat_interval)
        self._last_look = now
        for peer in self._silence:
            self._silence[peer] += observed
        return [peer for peer, silence in self._silence.items() if silence >= self._peer_timeout]
