"""Which transfer engine a node has: shared memory, TCP, or for each peer the quicker one that fits.

auto <--> auto, same host and user    shm: both openings carry the same host identity
auto <--> auto, otherwise             tcp
auto <--> shm or tcp                  that one
"""

from __future__ import annotations

from disagg.transfer.interface import TransferEngine
from disagg.transfer.medium import Medium
from disagg.transfer.queued_engine import QueuedEngine
from disagg.transfer.shm import ShmMedium, ShmTransferEngine
from disagg.transfer.tcp import TcpMedium, TcpTransferEngine

#: What `make_engine` knows.
TRANSPORTS = ("auto", "shm", "tcp")


class AutoTransferEngine(QueuedEngine):
    """See `interface.py`. Memory needs a descriptor."""

    def _make_media(self) -> list[Medium]:
        return [ShmMedium(), TcpMedium()]


def make_engine(transport: str) -> TransferEngine:
    """The engine of one of `TRANSPORTS`. ValueError for another name."""
    engines: dict[str, type[TransferEngine]] = {
        "auto": AutoTransferEngine,
        "shm": ShmTransferEngine,
        "tcp": TcpTransferEngine,
    }
    if transport not in engines:
        raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    return engines[transport]()
