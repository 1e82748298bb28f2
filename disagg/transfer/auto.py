"""Which transfer engine a node has: one way to write, or for each peer the quickest one that fits.

auto <--> auto, same host and user            shm: both openings carry the same host identity
auto <--> auto, RDMA NICs on both sides       verbs
auto <--> auto, otherwise                     tcp
auto <--> one of them                         that one

On one host a CPU copies quicker than two NICs can. That verbs fits is not tried out here: if the
NICs do not reach each other, the connection ends and says so.
"""

from collections.abc import Sequence

from disagg.transfer.medium import Medium
from disagg.transfer.queued_engine import QueuedEngine
from disagg.transfer.shm import ShmMedium
from disagg.transfer.tcp import TcpMedium
from disagg.transfer.verbs import VerbsMedium
from disagg.transfer.verbs_device import Nic

#: What `make_engine` knows.
TRANSPORTS = ("auto", "shm", "verbs", "tcp")


def make_engine(transport: str, nics: Sequence[Nic] = ()) -> QueuedEngine:
    """The engine of one of `TRANSPORTS`, which closes the `nics`; "auto" does without. ValueError
    for another name, TransferError for "verbs" without NICs."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    media: list[Medium] = []
    if transport in ("auto", "shm"):
        media.append(ShmMedium())
    if transport == "verbs" or (transport == "auto" and nics):
        media.append(VerbsMedium(nics))
    if transport in ("auto", "tcp"):
        media.append(TcpMedium())
    return QueuedEngine(media)
