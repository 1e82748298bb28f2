"""Counts arriving immediates, so that a request learns that all its bytes are here.

    expect(peer, imm, 3) --> waiting --count, count, count--> reached: said once, then forgotten
                                |---lower(imm, 2)------------> reached as soon as 2 are counted
                                |---forget_peer--------------> nothing; arrivals are dropped

Pure: no sockets, no clock. A transport feeds it what its medium reports.
"""

from collections.abc import Callable

import msgspec

from disagg.transfer.interface import MAX_IMM, Peer


class _Expectation(msgspec.Struct, kw_only=True):
    peer: Peer
    count: int
    arrived: int = 0


class ImmCounter:
    """Each imm is expected at most once in a counter's life, from one peer. `reached` is told each
    that is reached, once."""

    def __init__(self, reached: Callable[[int], None]) -> None:
        self._waiting: dict[int, _Expectation] = {}
        self._reached = reached
        self._last_imm = -1

    def expect(self, peer: Peer, imm: int, count: int) -> None:
        """Wait for `count` arrivals of `imm` from `peer`. ValueError if `imm` does not increase."""
        if count < 1 or not self._last_imm < imm <= MAX_IMM:
            raise ValueError(
                f"imm {imm}: expected more than the last one ({self._last_imm}), at most {MAX_IMM},"
                f" and a count of at least 1, got {count}; an imm is never used twice"
            )
        self._last_imm = imm
        self._waiting[imm] = _Expectation(peer=peer, count=count)

    def lower(self, imm: int, count: int) -> None:
        """Wait for `count` arrivals only, not more than before. Reached or forgotten: no-op."""
        if expectation := self._waiting.get(imm):
            assert 0 <= count <= expectation.count, f"imm {imm} is lowered to {count}"
            expectation.count = count
            self.count(expectation.peer, imm, 0)

    def forget_peer(self, peer: Peer) -> None:
        """Stop waiting for anything from a lost peer; what it had completed is still reported."""
        self._waiting = {imm: e for imm, e in self._waiting.items() if e.peer != peer}

    def count(self, peer: Peer, imm: int, arrivals: int = 1) -> None:
        """Count arrivals. Those nobody waits for, or from another peer, are dropped."""
        expectation = self._waiting.get(imm)
        if expectation is not None and expectation.peer == peer:
            expectation.arrived += arrivals
            if expectation.arrived >= expectation.count:
                del self._waiting[imm]
                self._reached(imm)
