"""Which transfer engine a node has: shared memory, TCP, or for each peer the quicker one that fits.

auto <--> auto, same host and user    shm: both openings carry the same host identity
auto <--> auto, otherwise             tcp
auto <--> shm or tcp                  that one
"""

from disagg.transfer.queued_engine import QueuedEngine
from disagg.transfer.shm import ShmMedium
from disagg.transfer.tcp import TcpMedium

#: What `make_engine` knows, each with its media, the best first.
TRANSPORTS = {"auto": (ShmMedium, TcpMedium), "shm": (ShmMedium,), "tcp": (TcpMedium,)}


def make_engine(transport: str) -> QueuedEngine:
    """The engine of one of `TRANSPORTS`. ValueError for another name."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    return QueuedEngine([medium() for medium in TRANSPORTS[transport]])
