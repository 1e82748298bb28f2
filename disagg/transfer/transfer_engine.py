"""The transfer engine, all but the moving of bytes: regions, tickets, jobs of each peer.

    write_pages --> jobs of a peer --turns--> link.post --> link.settle --> WritesDone
    connect --> a link of each medium --> opened: the one that was chosen --> link.start
    called  --> opened --> a link of the first medium that fits -----------> link.start
    PeerLost --> link.revoke --> link.is_fenced --> PeerFenced, link.close

What moves bytes is a medium (`medium.py`), messages and waiting are `control.py`. Peers take turns:
one poll posts for one of them, a bounded amount, so that the caller can look at other things.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from disagg.transfer import interface
from disagg.transfer.control import Connection, Control
from disagg.transfer.imm_counter import ImmCounter
from disagg.transfer.interface import Memory, MemoryRegion, Pages, Peer, Ticket, TransferError
from disagg.transfer.medium import Bytes, Job, Link, Medium

#: Waits are cut to this while a fence holds; whoever polls all the time looks every time.
FENCE_INTERVAL_SECONDS = 0.01


class TransferEngine(Control):
    """What it promises and does not: `interface.py`. Messages and connections are `Control`'s.

    `media` are ways to move bytes in order of preference, the same in all engines. An `imm` is a
    u32 in host order.
    """

    def __init__(self, media: Sequence[Medium]) -> None:
        super().__init__([medium.name for medium in media])
        self._media = media
        self._counter = ImmCounter(lambda imm: self.events.append(interface.ImmReached(imm=imm)))
        self._views: dict[MemoryRegion, Bytes] = {}
        #: By name: of each medium that was offered, then of the chosen one alone.
        self._links: dict[Peer, dict[str, Link]] = {}
        self._last_ticket = 0
        self._fencing: dict[Peer, dict[str, Link]] = {}  # lost, not fenced yet

    def register(self, memory: Memory) -> MemoryRegion:
        """Make memory a source for writes and, if `writable`, one that every peer may write to.
        Before `listen` and `connect`."""
        if self._listener or self._last_peer:
            raise TransferError("register all memory before listen and connect; got one more")
        buffer = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
        view = np.ctypeslib.as_array(buffer)
        for medium in self._media:
            medium.register(memory, view)
        region = MemoryRegion(memory=memory, descriptor=len(self._views))
        self._views[region] = view
        return region

    def connect(self, host: str, port: int) -> Peer:
        """As `Control.connect`."""
        peer = super().connect(host, port)
        if connection := self.connections.get(peer):
            connection.guard(self._offer, connection, self._media)
        return peer

    def transport_to(self, peer: Peer) -> str:
        """What writes to an open peer that has spoken travel by, as `--transport` names it."""
        return next(iter(self._links[peer]))

    def write_pages(self, peer: Peer, pages: Pages, imm: int) -> Ticket:
        """One write with one immediate for EACH of the pages (at least one).

        The peer has spoken: a message of it came from `poll`.

        TransferError if a range lies outside its region or the peer has no such region, or none
        that is `writable`; then none of the writes was posted. To a lost peer: dropped (its
        `PeerLost` ends the ticket).
        """
        region, dst, page_bytes, *offsets = pages
        src_offsets, dst_offsets = (np.array(each, np.int64) for each in offsets)  # they may change
        pairs = len(src_offsets), len(dst_offsets)
        if not 0 <= imm <= interface.MAX_IMM or page_bytes < 1 or not pairs[0] == pairs[1] > 0:
            raise TransferError(
                "a write: expected an imm of 32 bits, at least 1 byte, and one destination for each"
                f" source, got imm {imm}, {page_bytes} bytes, {pairs[1]} for {pairs[0]} sources"
            )
        if (source := self._views.get(region)) is None:
            raise TransferError(f"source: expected a region of this engine, got another: {region}")
        interface.check_offsets("source", src_offsets, page_bytes, source.nbytes)
        self._last_ticket += 1
        if peer not in self.connections:
            return self._last_ticket
        link = self._link(peer)
        sizes = link.region_bytes
        if not 0 <= dst < len(sizes) or not sizes[dst]:
            raise TransferError(f"destination: region {dst} is none that the peer lets us write to")
        interface.check_offsets("destination", dst_offsets, page_bytes, sizes[dst])
        pages = Pages(region, dst, page_bytes, src_offsets, dst_offsets)
        link.jobs.append(Job(ticket=self._last_ticket, pages=pages, source=source, imm=imm))
        return self._last_ticket

    def expect(self, peer: Peer, imm: int, count: int) -> None:
        """Count arrivals of `imm` from `peer` alone and report the `count`-th with `ImmReached`.

        Called before the imm leaves in a request, so that no arrival is missed. Each call's imm is
        larger than every one before it (an imm is never used twice). ValueError for count 0.
        """
        self._counter.expect(peer, imm, count)

    def lower(self, imm: int, count: int) -> None:
        """Wait for fewer arrivals (0 allowed): fires in the next `poll` if they are there."""
        self._counter.lower(imm, count)

    def withdraw(self, tickets: Sequence[Ticket]) -> int | None:
        """Drop the writes of these tickets that were not yet handed to the medium; never waits.

        The tickets are open: no `poll` has returned their end yet. Returns how many of their writes
        were posted, each of which the peer will count (None if that is unknown). Every ticket still
        ends with its `WritesDone` from a later `poll`, when none of its writes is outstanding.
        """
        num_posted = []
        for link in map(self._link, self._links.keys() & self.connections):
            for job in [job for job in (*link.jobs, *link.out) if job.ticket in tickets]:
                num_posted.append(job.num_posted)
                if job in link.jobs:
                    link.jobs.remove(job)
                    link.out.append(job)  # it ends with those writes that were posted
        # Some are not there if a peer is lost: what it will still count is unknown.
        return sum(num_posted) if len(num_posted) == len(tickets) else None

    def poll(self, timeout: float) -> list[interface.Event]:
        """Move what can be moved, a bounded amount, and return what happened.

        Waits up to `timeout` seconds if there is nothing to do; `wake()` ends the wait.
        """
        self._post_next()
        for peer in self._links:
            for job in self._link(peer).settle():
                self.events.append(interface.WritesDone(ticket=job.ticket))
        if any(self._link(peer).can_post() for peer in self._links):
            timeout = 0.0
        elif self._fencing:
            timeout = min(timeout, FENCE_INTERVAL_SECONDS)
        self.wait(timeout)
        for lost in [event for event in self.events if isinstance(event, interface.PeerLost)]:
            self._on_lost(lost.peer)
        self.events += self._look_at_fences()
        taken, self.events = self.events, []
        # What is reached was reached before its peer was lost.
        return sorted(taken, key=lambda event: not isinstance(event, interface.ImmReached))

    def close(self) -> None:
        """Close every connection and registration. May be called twice. With shm, a batch under way
        (some milliseconds) may still land."""
        for links in (*self._fencing.values(), *self._links.values()):
            for link in links.values():
                link.close()
        super().close()
        for medium in self._media:
            medium.close()
        self._links, self._fencing, self._media = {}, {}, []

    def __del__(self) -> None:
        """Forgotten by its owner. Left to itself, Python would close what it holds in any order."""
        if hasattr(self, "_fencing"):
            self.close()

    def _offer(self, connection: Connection, media: Sequence[Medium]) -> None:
        """Make a link of each of the media, and say so in our opening. OSError."""
        arrived = partial(self._counter.count, connection.peer)
        links = {medium.name: medium.link(connection, arrived) for medium in media}
        self._links[connection.peer] = links
        connection.open({name: link.info for name, link in links.items()})

    def on_opened(self, connection: Connection, offers: dict[str, bytes]) -> None:
        """Whoever was called chooses among what is offered; the answer offers that alone."""
        *better, last = (medium for medium in self._media if medium.name in offers)
        chosen = next((medium for medium in better if medium.fits(offers[medium.name])), last)
        if not connection.outgoing:
            self._offer(connection, [chosen])
        links = self._links[connection.peer]
        for name in links.keys() - {chosen.name}:
            links.pop(name).close()
        links[chosen.name].start(offers[chosen.name])

    def on_note(self, peer: Peer, data: bytes) -> None:
        self._link(peer).take_note(data)

    def _link(self, peer: Peer) -> Link:
        return next(iter(self._links[peer].values()))

    def _post_next(self) -> None:
        """Post for the peer that has waited longest, if any has something to post."""
        for peer in self._links:
            link = self._link(peer)
            if peer in self.connections and link.can_post():
                self._links[peer] = self._links.pop(peer)  # to the end: peers take turns
                link.connection.guard(link.post)
                return

    def _on_lost(self, peer: Peer) -> None:
        self._fencing[peer] = self._links.pop(peer, {})
        for link in self._fencing[peer].values():
            link.revoke()
        self._counter.forget_peer(peer)

    def _look_at_fences(self) -> Iterator[interface.PeerFenced]:
        for peer, links in list(self._fencing.items()):
            if all(link.is_fenced() for link in links.values()):
                for link in self._fencing.pop(peer).values():
                    link.close()
                yield interface.PeerFenced(peer=peer)
