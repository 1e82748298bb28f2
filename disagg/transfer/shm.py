"""Transfer engine for two processes of one host: the writer copies into the destination's memory.

    write_pages --> jobs of a peer --one batch a poll--> copy to its mapped memory, under its lease
                                                            |
    WritesDone <-- sent <-- notes (imm, count) <------------'
    PeerLost --> our lease revoked --> the peer's last batch is over, or it died --> PeerFenced

Setting up a link and its socket is `shm_link.py`, the lease is `lease.py`, messages and waiting are
`control.py`. "Bytes, then count" rests on x86: stores become visible in program order, and the
notification is sent after the copy. Peers take turns: one poll copies for one of them, at most
two batches' bytes, so that the caller's loop can look at other things.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from disagg.kv_layout import Offsets
from disagg.transfer.bounds import check_offsets, check_pages
from disagg.transfer.control import OPENING_TIMEOUT_SECONDS, Control, Lost, Opened
from disagg.transfer.imm_counter import ImmCounter
from disagg.transfer.interface import (
    Event,
    ImmReached,
    Memory,
    MemoryRegion,
    Peer,
    PeerFenced,
    PeerLost,
    Ticket,
    TransferEngine,
    TransferError,
    WritesDone,
)
from disagg.transfer.lease import FENCE_INTERVAL_SECONDS, Fences
from disagg.transfer.page_copy import Bytes, copy_pages
from disagg.transfer.shm_link import MAX_REGIONS, Extent, Note, ShmLink

#: Copied under one lock of the lease: about a millisecond.
BATCH_BYTES = 4 << 20


class _Descriptor(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A `MemoryRegion.descriptor`: the engine that registered the region, and which one it is."""

    epoch: int
    region: int


@dataclass(kw_only=True, eq=False)
class _Job:
    """The writes of a ticket: `num_copied` whole ones are done, and `within` bytes of the next."""

    ticket: Ticket
    peer: Peer
    source: Bytes
    destination: Bytes
    write_bytes: int
    source_offsets: Offsets
    destination_offsets: Offsets
    imm: int
    num_copied: int = 0
    within: int = 0


@dataclass(kw_only=True)
class _Peer:
    link: ShmLink
    jobs: deque[_Job] = field(default_factory=deque)


class ShmTransferEngine(TransferEngine):
    """See `interface.py`. Memory needs a descriptor; both processes must belong to one user.

    `clock` counts seconds; it times openings and the looks at a fence.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        opening_timeout: float = OPENING_TIMEOUT_SECONDS,
    ) -> None:
        self._epoch = secrets.randbits(64)
        self._control = Control(
            transport="shm",
            epoch=self._epoch,
            make_info=self._make_link,
            clock=clock,
            opening_timeout=opening_timeout,
        )
        self._counter = ImmCounter()
        self._own: list[tuple[int, Extent]] = []
        self._views: list[Bytes] = []
        self._started = False
        self._peers: dict[Peer, _Peer] = {}
        self._open: dict[Ticket, _Job] = {}
        self._last_ticket = 0
        self._fences = Fences(clock)
        self._announced: set[Peer] = set()  # lost and said so, not fenced yet
        self._events: list[Event] = []

    def register(self, memory: Memory) -> MemoryRegion:
        if memory.fd is None:
            raise TransferError(
                "shm needs memory with a file descriptor, got none; allocate it as SharedMemory"
            )
        if self._started or len(self._own) == MAX_REGIONS:
            raise TransferError(
                f"register at most {MAX_REGIONS} regions, before listen and connect; got one more"
            )
        extent = Extent(os.fstat(memory.fd).st_size, memory.fd_offset, memory.nbytes)
        offset = np.array([memory.fd_offset])
        check_offsets("memory", offset, memory.nbytes, extent.file_bytes)
        descriptor = _Descriptor(self._epoch, len(self._own))
        self._own.append((memory.fd, extent))
        buffer = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
        self._views.append(np.ctypeslib.as_array(buffer))
        return MemoryRegion(memory=memory, descriptor=msgspec.msgpack.encode(descriptor))

    def listen(self, host: str, port: int) -> tuple[str, int]:
        self._started = True
        return self._control.listen(host, port)

    def connect(self, host: str, port: int) -> Peer:
        self._started = True
        return self._control.connect(host, port)

    def close_peer(self, peer: Peer, why: str) -> None:
        self._control.close_peer(peer, why)

    def send(self, peer: Peer, data: bytes) -> None:
        self._control.send(peer, data)

    def write(
        self,
        peer: Peer,
        src: MemoryRegion,
        src_offset: int,
        dst: bytes,
        dst_offset: int,
        nbytes: int,
        imm: int,
    ) -> Ticket:
        sources, destinations = np.array([src_offset]), np.array([dst_offset])
        return self.write_pages(peer, src, dst, nbytes, sources, destinations, imm)

    def write_pages(
        self,
        peer: Peer,
        src: MemoryRegion,
        dst: bytes,
        page_bytes: int,
        src_offsets: Offsets,
        dst_offsets: Offsets,
        imm: int,
    ) -> Ticket:
        check_pages(page_bytes, src_offsets, dst_offsets, imm)
        source = _find("source", src.descriptor, self._epoch, self._views)
        check_offsets("source", src_offsets, page_bytes, source.nbytes)
        if not self._control.is_open(peer):
            self._last_ticket += 1
            return self._last_ticket
        known = self._peers[peer]
        destination = _find("destination", dst, known.link.their_epoch, known.link.regions)
        check_offsets("destination", dst_offsets, page_bytes, destination.nbytes)
        self._last_ticket += 1
        job = _Job(
            ticket=self._last_ticket,
            peer=peer,
            source=source,
            destination=destination,
            write_bytes=page_bytes,
            source_offsets=np.array(src_offsets, dtype=np.int64),
            destination_offsets=np.array(dst_offsets, dtype=np.int64),
            imm=imm,
        )
        self._open[job.ticket] = job
        known.jobs.append(job)
        return job.ticket

    def expect(self, peer: Peer, imm: int, count: int) -> None:
        self._counter.expect(peer, imm, count)

    def lower(self, imm: int, count: int) -> None:
        self._counter.lower(imm, count)

    def forget(self, imm: int) -> None:
        self._counter.forget(imm)

    def withdraw(self, tickets: Sequence[Ticket]) -> int | None:
        jobs = [self._open.get(ticket) for ticket in tickets]
        posted = 0
        for job in jobs:
            if job is None or not self._control.is_open(job.peer):
                return None  # the peer is lost: what it will still count is unknown
            posted += job.num_copied
        for job in jobs:
            assert job is not None, "checked above"
            known = self._peers[job.peer]
            if job in known.jobs:
                known.jobs.remove(job)
                end = WritesDone(ticket=job.ticket)  # of those writes that were posted
                known.link.notes.append(Note(imm=job.imm, count=0, end=end))
        return posted

    def poll(self, timeout: float) -> list[Event]:
        self._copy_next()
        for known in self._peers.values():
            self._send_notes(known)
        self._fence(self._fences.look())
        self._take_reached()
        if self._events or any(known.jobs for known in self._peers.values()):
            timeout = 0.0
        elif self._fences:
            timeout = min(timeout, FENCE_INTERVAL_SECONDS)
        for event in self._control.poll(timeout):
            if isinstance(event, Opened):
                self._peers[event.peer].link.start(event.epoch, event.info)
            elif isinstance(event, Lost):
                self._on_lost(event)
            else:
                self._events.append(event)
        self._take_reached()
        taken, self._events = self._events, []
        return taken

    def wake(self) -> None:
        self._control.waiter.wake()

    def close(self) -> None:
        """See `interface.py`. A peer's batch under way (about a millisecond) may still land."""
        for known in self._peers.values():
            known.link.close()
            if known.link.lease is not None:
                known.link.lease.revoke()
                known.link.lease.close()
        self._fences.close()
        self._control.close()
        self._peers, self._open = {}, {}
        self._own, self._views, self._events = [], [], []

    def _make_link(self, peer: Peer, outgoing: bool) -> bytes:
        arrived = partial(self._counter.count, peer)
        link = ShmLink(self._control, peer, self._own, arrived, outgoing=outgoing)
        self._peers[peer] = _Peer(link=link)
        return link.info

    def _copy_next(self) -> None:
        """Copy a batch for the peer that has waited longest, if any has something to copy."""
        for peer, known in self._peers.items():
            if known.jobs and self._control.is_open(peer):
                self._peers[peer] = self._peers.pop(peer)  # to the end: peers take turns
                lease = known.link.held_lease
                assert lease is not None, "jobs need the peer's regions, which came with its lease"
                if lease.begin():
                    try:
                        self._copy_batch(known)
                    finally:
                        lease.end()
                else:
                    self._control.close_peer(peer, "the peer took its memory back")
                return

    def _copy_batch(self, known: _Peer) -> None:
        budget = BATCH_BYTES
        while known.jobs and budget > 0:
            job = known.jobs[0]
            before = job.num_copied
            budget -= self._copy_some(job, budget)
            end = None
            if job.num_copied == len(job.source_offsets):
                known.jobs.popleft()
                end = WritesDone(ticket=job.ticket)
            if count := job.num_copied - before:
                known.link.notes.append(Note(imm=job.imm, count=count, end=end))

    def _copy_some(self, job: _Job, budget: int) -> int:
        """Copy whole writes for about `budget` bytes (or a part of a huge one); bytes copied."""
        if job.write_bytes > BATCH_BYTES:
            count, nbytes = 1, min(job.write_bytes - job.within, budget)
        else:
            count, nbytes = max(1, budget // job.write_bytes), job.write_bytes
        some = slice(job.num_copied, job.num_copied + count)
        sources = job.source_offsets[some] + job.within
        destinations = job.destination_offsets[some] + job.within
        self._copy(job.destination, job.source, nbytes, destinations, sources)
        job.within += nbytes
        if job.within == job.write_bytes:
            job.within = 0
            job.num_copied += len(sources)
        return nbytes * len(sources)

    def _copy(
        self,
        destination: Bytes,
        source: Bytes,
        page_bytes: int,
        destination_offsets: Offsets,
        source_offsets: Offsets,
    ) -> None:
        """`copy_pages`; a method so that tests can stop a process while it holds the lease."""
        copy_pages(destination, source, page_bytes, destination_offsets, source_offsets)

    def _send_notes(self, known: _Peer) -> None:
        for end in known.link.send_notes():
            del self._open[end.ticket]
            self._events.append(end)

    def _take_reached(self) -> None:
        self._events += [ImmReached(imm=imm) for imm in self._counter.take_reached()]

    def _on_lost(self, lost: Lost) -> None:
        known = self._peers.pop(lost.peer, None)
        if known is None:  # not even a socket could be had for it
            self._events += [PeerLost(peer=lost.peer, why=lost.why), PeerFenced(peer=lost.peer)]
            return
        known.link.take_arrivals()
        self._take_reached()
        self._counter.forget_peer(lost.peer)
        known.link.close()
        for ticket in [ticket for ticket, job in self._open.items() if job.peer == lost.peer]:
            del self._open[ticket]
        if lost.announced:
            self._events.append(PeerLost(peer=lost.peer, why=lost.why))
            self._announced.add(lost.peer)
        if known.link.lease is None:  # it never had our memory
            self._fence([lost.peer])
        else:
            self._fences.add(lost.peer, known.link.lease)

    def _fence(self, peers: list[Peer]) -> None:
        for peer in self._announced.intersection(peers):
            self._announced.remove(peer)
            self._events.append(PeerFenced(peer=peer))


def _find(what: str, descriptor: bytes, epoch: int, regions: list[Bytes]) -> Bytes:
    """The region that a descriptor names, or TransferError."""
    try:
        named = msgspec.msgpack.decode(descriptor, type=_Descriptor)
    except (msgspec.DecodeError, ValueError) as error:
        raise TransferError(f"{what}: not a region descriptor of shm: {error}") from error
    if named.epoch != epoch or not 0 <= named.region < len(regions):
        raise TransferError(
            f"{what}: expected a descriptor of a region that this peer registered, got another;"
            " take the one it sent on this connection"
        )
    return regions[named.region]
