"""Transfer engines by name, also such as call a test in the middle of a copy.

verbs runs on the RDMA devices that RDMA_DEVICES names ("rxe0/1/1 rxe1/1/1": name, port, GID index),
the engines taking turns; without, on fakes.
"""

import gc
import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disagg.transfer.control import OPENING_TIMEOUT_SECONDS, Connection, Control
from disagg.transfer.interface import Event, MemoryRegion, Pages, Peer, Ticket
from disagg.transfer.medium import Job, Link, Medium
from disagg.transfer.shm import ShmMedium, copy_pages
from disagg.transfer.tcp import TcpMedium
from disagg.transfer.transfer_engine import TransferEngine
from disagg.transfer.verbs import Depths, VerbsMedium
from disagg.transfer.verbs_device import Nic
from tests.fake_verbs import Fabric

#: As `copy_pages`, and as `socket.sendmsg`.
Copy = Callable[[np.ndarray, np.ndarray, int, Sequence[np.ndarray]], None]
Send = Callable[[socket.socket, list[memoryview]], int]

RDMA_DEVICES = os.environ.get("RDMA_DEVICES", "").split()
#: How much longer things may take where they are emulated.
PATIENCE = 12.0 if RDMA_DEVICES else 1.0


def shm_medium(copy: Copy) -> ShmMedium:
    """Copies by `copy`."""
    medium = ShmMedium()
    medium.copy = copy
    return medium


def engine_of(
    media: Sequence[Medium], opening_timeout: float = OPENING_TIMEOUT_SECONDS
) -> TransferEngine:
    """With another patience, in seconds."""
    engine = TransferEngine(media)
    engine.opening_timeout = opening_timeout
    return engine


def shm_engine(copy: Copy = copy_pages, **options) -> TransferEngine:
    """Copies by `copy`; for `options` see `engine_of`."""
    return engine_of([shm_medium(copy)], **options)


def tcp_engine(send: Send = socket.socket.sendmsg, **options) -> TransferEngine:
    """Sends by `send`."""
    medium = TcpMedium()
    medium.send = send
    return engine_of([medium], **options)


def auto_engine(copy: Copy = copy_pages, **options) -> TransferEngine:
    """Either of them, as it fits."""
    return engine_of([shm_medium(copy), TcpMedium()], **options)


def nic_maker() -> Callable[[], Nic]:
    """Opens NICs that reach each other: real ones if there are, else fakes."""
    if not RDMA_DEVICES:
        return Fabric().nic
    turns = itertools.cycle(name.split("/") for name in RDMA_DEVICES)

    def open_next() -> Nic:
        name, port, gid_index = next(turns)
        return Nic(name, int(port), int(gid_index))

    return open_next


def verbs_maker(depths: Depths | None = None) -> Callable[..., TransferEngine]:
    """Makes engines with a NIC each."""
    nic, opening = nic_maker(), {"opening_timeout": PATIENCE * OPENING_TIMEOUT_SECONDS}
    return lambda **options: engine_of([VerbsMedium([nic()], depths)], **opening | options)


def open_descriptors() -> int:
    """How many file descriptors this process has, without those of what earlier tests dropped."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def write(
    engine: TransferEngine,
    peer: Peer,
    src: MemoryRegion,
    src_offset: int,
    dst: int,
    dst_offset: int,
    nbytes: int,
    imm: int,
) -> Ticket:
    """One write."""
    offsets = np.array([src_offset]), np.array([dst_offset])
    return write_pages(engine, peer, src, dst, nbytes, *offsets, imm)


def write_pages(engine: TransferEngine, peer: Peer, *pages_and_imm) -> Ticket:
    """The fields of `Pages` and the imm, in a row."""
    *pages, imm = pages_and_imm
    return engine.write_pages(peer, Pages(*pages), imm)


def link_of(node, peer: Peer) -> Link:
    """What moves a node's writes to an open peer."""
    return node.engine._link(peer)


def open_jobs(engine: TransferEngine) -> dict[Ticket, Job]:
    """Of its tickets that have not ended."""
    links = map(engine._link, engine._links)
    return {job.ticket: job for link in links for job in (*link.jobs, *link.out)}


def in_halves(inside: Callable[[], None]) -> Copy:
    """Copies in two halves and calls `inside` between them, under the peer's lease."""

    def copy(source, target, page_bytes, offsets):
        half = len(offsets[0]) // 2
        for part in (slice(half), slice(half, None)):
            copy_pages(source, target, page_bytes, [each[part] for each in offsets])
            if part.stop is not None:
                inside()

    return copy


def once(act: Callable[[], None]) -> Callable[[], None]:
    """Acts when it is called first, and never again."""
    acts = [act]

    def act_once() -> None:
        if acts:
            acts.pop()()

    return act_once


@dataclass
class Opened:
    """A peer's opening fits."""

    peer: Peer
    offers: dict[str, bytes]


class OpeningControl(Control):
    """A control that says its openings by itself; `offer()` gives what they offer. Its events tell
    of the others' too."""

    def __init__(
        self,
        offer: Callable[[], dict[str, bytes]],
        transports,
        clock=time.monotonic,
        timeout=5.0,
    ) -> None:
        super().__init__(transports)
        self.clock, self.opening_timeout = clock, timeout
        self.offer = offer

    def connect(self, host, port):
        peer = super().connect(host, port)
        if connection := self.connections.get(peer):
            connection.open(self.offer())
        return peer

    def poll(self, timeout: float) -> list[Event | Opened]:
        """As an engine's."""
        self.wait(timeout)
        taken, self.events = self.events, []
        return taken

    def ready(self, peer: Peer) -> None:
        """As its link would say; unknown or lost: no-op."""
        if connection := self.connections.get(peer):
            connection.ready()

    def on_opened(self, connection: Connection, offers: dict[str, bytes]) -> None:
        if not connection.outgoing:
            connection.open(self.offer())
        self.events.append(Opened(connection.peer, offers))

    def on_note(self, peer: Peer, data: bytes) -> None:
        raise AssertionError(f"nobody says {data!r} to us")
