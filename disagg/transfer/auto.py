"""Which transfer engine a node has: one way to write, or for each peer the quickest one that fits.

auto <--> auto, same host and user            shm: both openings carry the same host identity
auto <--> auto, RDMA NICs on both sides       verbs
auto <--> auto, otherwise                     tcp
auto <--> one of them                         that one

On one host a CPU copies quicker than two NICs can. That verbs fits is not tried out here: if the
NICs do not reach each other, the connection ends and says so.
"""

import logging
import os
from collections.abc import Sequence, Set

from disagg.config import RdmaFlags
from disagg.transfer import topology, verbs_device
from disagg.transfer.interface import TransferError
from disagg.transfer.shm import ShmMedium
from disagg.transfer.tcp import TcpMedium
from disagg.transfer.transfer_engine import TransferEngine
from disagg.transfer.verbs import VerbsMedium
from disagg.transfer.verbs_device import Nic

logger = logging.getLogger(__name__)

#: What `make_engine` knows.
TRANSPORTS = ("auto", "shm", "verbs", "tcp")


def make_engine(transport: str, nics: Sequence[Nic] = ()) -> TransferEngine:
    """The engine of one of `TRANSPORTS`, which closes the `nics`; "auto" does without."""
    verbs = [VerbsMedium(nics)] if nics else []
    media = [ShmMedium(), *verbs, TcpMedium()]
    return TransferEngine([medium for medium in media if transport in ("auto", medium.name)])


def open_nics(transport: str, flags: RdmaFlags) -> tuple[list[Nic], Set[int]]:
    """The NICs for `make_engine`, and the CPUs where the thread that polls them should run.

    "auto" does without NICs if none are to be had, or none that are reached from afar, and no flag
    asks for one; other transports have no use for them, nor for such flags. Else TransferError.
    """
    available, asked = os.sched_getaffinity(0), transport == "verbs" or flags != RdmaFlags()
    try:
        if transport not in ("auto", "verbs"):
            raise ValueError("shm and tcp use no NICs; leave out the flags for RDMA")
        if verbs_device.MISSING:
            raise TransferError(verbs_device.MISSING)
        machine = topology.Topology()
        chosen, lines = topology.choose_nics(machine, ["cpu"], flags)
        ports = chosen["cpu"]
        if not asked and not any(address.is_routable for address in ports.values()):
            raise ValueError(f"{lines[-1]}; give its interface an address")
        cpus, why = topology.poll_cpus(machine, ports, available, flags.poll_cpu)
        nics = [Nic(port.name, port.port, address.index) for port, address in ports.items()]
    except ValueError as error:
        if asked:
            raise TransferError(f"--transport {transport}: {error}") from error
        logger.info("no RDMA: %s", error)
        return [], available
    for line in [*lines, f"polled on CPUs {sorted(cpus)}: {why}"]:
        logger.info("RDMA: %s", line)
    return nics, cpus
