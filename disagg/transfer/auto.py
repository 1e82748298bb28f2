"""Which transfer engine a node has: shared memory, TCP, or for each peer the quicker one that fits.

auto <--> auto, same host and user    shm: both openings carry the same host identity
auto <--> auto, otherwise             tcp
auto <--> shm or tcp                  that one
"""

from __future__ import annotations

import time
from collections.abc import Callable

from disagg.transfer.control import OPENING_TIMEOUT_SECONDS
from disagg.transfer.interface import TransferEngine
from disagg.transfer.queued_engine import QueuedEngine
from disagg.transfer.shm import ShmMedium, ShmTransferEngine
from disagg.transfer.tcp import TcpMedium, TcpTransferEngine

#: What `make_engine` knows.
TRANSPORTS = ("auto", "shm", "tcp")


class AutoTransferEngine(QueuedEngine):
    """See `interface.py`. Memory needs a descriptor."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        opening_timeout: float = OPENING_TIMEOUT_SECONDS,
    ) -> None:
        media = [ShmMedium(), TcpMedium(clock=clock, opening_timeout=opening_timeout)]
        super().__init__(media, clock=clock, opening_timeout=opening_timeout)


def make_engine(transport: str) -> TransferEngine:
    """The engine of one of `TRANSPORTS`. ValueError for another name."""
    match transport:
        case "auto":
            return AutoTransferEngine()
        case "shm":
            return ShmTransferEngine()
        case "tcp":
            return TcpTransferEngine()
    raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
