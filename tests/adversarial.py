"""An in-memory transport as unkind as the contract allows: it delays, shuffles, fails, cuts.

    write_pages -> unposted -> in flight -> landed (bytes copied, read from the source only now)
                                              |-> counted at the receiver   } in any order,
                                              '-> completed at the sender   } any time later
    send -> one queue per direction, in order -> MessageReceived

`Network.actions()` lists everything that could happen next; the caller picks. `Network.observe`
hands each landing write and each message to the caller's checks.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from disagg.transfer.imm_counter import ImmCounter
from disagg.transfer.interface import (
    Event,
    ImmReached,
    Memory,
    MemoryRegion,
    MessageReceived,
    Pages,
    Peer,
    PeerFenced,
    PeerLost,
    Ticket,
    TransferError,
    WritesDone,
)

#: Writes of one engine that may be in flight at once; the rest can be withdrawn.
MAX_IN_FLIGHT = 4


@dataclass(kw_only=True, eq=False)
class Write:
    """One write with its immediate."""

    conn: Connection
    ticket: OpenTicket
    source: np.ndarray
    region: int
    offset: int
    imm: int
    source_offset: int
    source_region: int


@dataclass(kw_only=True, eq=False)
class OpenTicket:
    """`outstanding` counts posted writes that did not complete."""

    number: Ticket
    conn: Connection | None
    unposted: int
    posted: int = 0
    outstanding: int = 0


@dataclass(kw_only=True, eq=False)
class Connection:
    """Two ends; `peers[i]` is how end `i`'s engine calls the other, `lost[i]` whether it knows."""

    ends: tuple[FakeTransfer, FakeTransfer]
    peers: tuple[Peer, Peer]
    messages: tuple[deque[bytes], deque[bytes]]
    lost: list[bool] = field(default_factory=lambda: [False, False])
    fenced: list[bool] = field(default_factory=lambda: [False, False])
    shown: list[bool] = field(default_factory=lambda: [True, False])
    uncounted: list[tuple[int, int]] = field(default_factory=list)  # (receiving end, imm)


class Network:
    """All engines and connections of a test."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.listeners: dict[tuple[str, int], FakeTransfer] = {}
        self.connections: list[Connection] = []
        self.on_write_lands: Callable[[Write], None] = lambda write: None
        self.on_message_sent: Callable[[Connection, int, bytes], None] = lambda c, e, d: None

    def actions(self) -> list[Callable[[], None]]:
        """Everything the medium could do next."""
        found: list[Callable[[], None]] = []
        engines = {engine for conn in self.connections for engine in conn.ends}
        for engine in sorted(engines, key=lambda engine: engine.name):
            found += engine.medium_actions()
        for conn in self.connections:
            for end in (0, 1):
                if conn.messages[end] and not conn.lost[end] and not conn.ends[end].dead:
                    found.append(lambda c=conn, e=end: self.deliver(c, e))
                if conn.lost[end] and not conn.fenced[end] and self.may_fence(conn, end):
                    found.append(lambda c=conn, e=end: self.fence(c, e))
                over = conn.lost[1 - end] or conn.ends[1 - end].dead
                runs = not (conn.ends[end].stopped or conn.ends[end].dead)
                if over and not conn.lost[end] and runs:
                    found.append(lambda c=conn, e=end: self.lose(c, e, "connection reset"))
            if conn.uncounted:
                index = self.rng.randrange(len(conn.uncounted))
                found.append(lambda c=conn, i=index: self.count(c, i))
        return found

    def deliver(self, conn: Connection, end: int) -> None:
        """The next message arrives at an end."""
        conn.shown[end] = True
        data = conn.messages[end].popleft()
        conn.ends[end].events.append(MessageReceived(peer=conn.peers[end], data=data))

    def count(self, conn: Connection, index: int) -> None:
        """An immediate is counted at its receiver."""
        end, imm = conn.uncounted.pop(index)
        if not conn.lost[end]:
            conn.ends[end].counter.count(conn.peers[end], imm)

    def lose(self, conn: Connection, end: int, why: str) -> None:
        """An end learns that the connection is over; its own writes are ended first."""
        engine = conn.ends[end]
        if conn.lost[end] or engine.dead or engine.stopped:
            return
        conn.lost[end] = True
        engine.end_writes(conn)
        if conn.shown[end]:
            engine.events.append(PeerLost(peer=conn.peers[end], why=why))
        if all(conn.lost[e] or conn.ends[e].dead for e in (0, 1)):
            conn.messages[0].clear()
            conn.messages[1].clear()

    def may_fence(self, conn: Connection, end: int) -> bool:
        """A stopped writer in the middle of a copy holds the fence up."""
        writer = conn.ends[1 - end]
        return not (writer.stopped and any(write.conn is conn for write in writer.in_flight))

    def fence(self, conn: Connection, end: int) -> None:
        """Nothing of the other end can land here any more: its writes land now or never."""
        writer, owner = conn.ends[1 - end], conn.ends[end]
        for write in [write for write in writer.in_flight if write.conn is conn]:
            if self.rng.random() < 0.5:
                writer.land(write, complete=False)
        conn.fenced[end] = True
        if conn.shown[end] and not owner.dead:
            owner.events.append(PeerFenced(peer=conn.peers[end]))


class FakeTransfer:
    """One node's end, with the calls of a `TransferEngine`. `stopped`: its process does not run;
    `dead`: it never will again."""

    def __init__(
        self, network: Network, name: str, imm_counter: type[ImmCounter] = ImmCounter
    ) -> None:
        self.network = network
        self.name = name
        self.reached: list[int] = []
        self.counter = imm_counter(self.reached.append)
        self.events: list[Event] = []
        self.regions: list[np.ndarray] = []
        self.writable: list[bool] = []
        self.in_flight: list[Write] = []
        self.unposted: list[Write] = []
        self.tickets: dict[Ticket, OpenTicket] = {}
        self.completions: list[OpenTicket] = []
        self.next_peer = 1
        self.next_ticket = 1
        self.stopped = False
        self.dead = False
        self.reject_after = -1  # this many more writes are accepted, the next raises

    # --- The contract ---

    def register(self, memory: Memory) -> MemoryRegion:
        array_type = ctypes.c_uint8 * memory.nbytes
        self.regions.append(np.ctypeslib.as_array(array_type.from_address(memory.address)))
        self.writable.append(memory.writable)
        return MemoryRegion(memory=memory, descriptor=len(self.regions) - 1)

    def listen(self, host: str, port: int) -> tuple[str, int]:
        if (host, port) in self.network.listeners:
            raise TransferError(f"{host}:{port} is taken; choose another port")
        self.network.listeners[host, port] = self
        return host, port

    def connect(self, host: str, port: int) -> Peer:
        peer = self._new_peer()
        other = self.network.listeners.get((host, port))
        if other is None or other.dead:
            self.events += [PeerLost(peer=peer, why="refused"), PeerFenced(peer=peer)]
            return peer
        peers = (peer, other._new_peer())
        self.network.connections.append(
            Connection(ends=(self, other), peers=peers, messages=(deque(), deque()))
        )
        return peer

    def close_peer(self, peer: Peer, why: str) -> None:
        found = self._find(peer)
        if found is not None:
            self.network.lose(*found, why)

    def transport_to(self, peer: Peer) -> str:
        return "fake"

    def send(self, peer: Peer, data: bytes) -> None:
        found = self._find(peer)
        if found is None:
            return
        conn, end = found
        conn.messages[1 - end].append(data)
        self.network.on_message_sent(conn, end, data)

    def write_pages(self, peer: Peer, pages: Pages, imm: int) -> Ticket:
        src, dst, page_bytes, src_offsets, dst_offsets = pages
        if self.reject_after == 0:
            self.reject_after = -1
            raise TransferError("this write cannot be posted")
        self.reject_after -= self.reject_after > 0
        found = self._find(peer)
        conn, end = found if found is not None else (None, 0)
        ticket = OpenTicket(number=self.next_ticket, conn=conn, unposted=len(src_offsets))
        self.next_ticket += 1
        if conn is None:
            return ticket.number
        if not 0 <= dst < len(conn.ends[1 - end].regions):
            raise TransferError(f"{dst!r} is no descriptor of this peer")
        if not conn.ends[1 - end].writable[dst]:
            raise TransferError("this region of the peer is a source alone")
        target = conn.ends[1 - end].regions[dst]
        source = self.regions[src.descriptor]
        for s, d in zip(src_offsets, dst_offsets, strict=True):
            if not (0 <= s <= len(source) - page_bytes and 0 <= d <= len(target) - page_bytes):
                raise TransferError(f"offset {s} or {d} lies outside its region")
        self.tickets[ticket.number] = ticket
        for s, d in zip(src_offsets, dst_offsets, strict=True):
            view = source[s : s + page_bytes]
            self.unposted.append(
                Write(
                    conn=conn,
                    ticket=ticket,
                    source=view,
                    region=dst,
                    offset=int(d),
                    imm=imm,
                    source_offset=int(s),
                    source_region=src.descriptor,
                )
            )
        return ticket.number

    def expect(self, peer: Peer, imm: int, count: int) -> None:
        self.counter.expect(peer, imm, count)

    def lower(self, imm: int, count: int) -> None:
        self.counter.lower(imm, count)

    def withdraw(self, tickets: Sequence[Ticket]) -> int | None:
        if any(number not in self.tickets for number in tickets):
            return None  # of a lost peer
        posted = 0
        for number in tickets:
            ticket = self.tickets[number]
            self.unposted = [write for write in self.unposted if write.ticket is not ticket]
            ticket.unposted = 0
            posted += ticket.posted
            self._settle(ticket)
        return posted

    def poll(self, timeout: float) -> list[Event]:
        events, self.events = self.events, []
        for event in events:
            if isinstance(event, PeerLost):
                self.counter.forget_peer(event.peer)
        reached = [ImmReached(imm=imm) for imm in self.reached]
        self.reached.clear()
        return [*reached, *events]

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.dead = True

    # --- The medium ---

    def medium_actions(self) -> list[Callable[[], None]]:
        """What the medium could do with this engine's writes."""
        found: list[Callable[[], None]] = []
        if self.unposted and len(self.in_flight) < MAX_IN_FLIGHT and not self.stopped:
            found.append(self._post_one)
        if self.in_flight and not self.stopped:
            # Landing in any order; a stopped process (it copies by itself) lands nothing.
            found.append(lambda: self.land(self.network.rng.choice(self.in_flight)))
        if self.completions and not self.stopped:
            index = self.network.rng.randrange(len(self.completions))
            found.append(lambda: self._complete(self.completions.pop(index)))
        return found

    def _post_one(self) -> None:
        write = self.unposted.pop(self.network.rng.randrange(len(self.unposted)))
        write.ticket.unposted -= 1
        write.ticket.posted += 1
        write.ticket.outstanding += 1
        self.in_flight.append(write)

    def land(self, write: Write, *, complete: bool = True) -> None:
        """The bytes are copied, and only now read from the source."""
        self.in_flight.remove(write)
        end = write.conn.ends.index(self)
        if not write.conn.fenced[1 - end] and not write.conn.ends[1 - end].dead:
            self.network.on_write_lands(write)
            target = write.conn.ends[1 - end].regions[write.region]
            target[write.offset : write.offset + len(write.source)] = write.source
            write.conn.uncounted.append((1 - end, write.imm))
        if complete:
            self.completions.append(write.ticket)

    def _complete(self, ticket: OpenTicket) -> None:
        ticket.outstanding -= 1
        self._settle(ticket)

    def _settle(self, ticket: OpenTicket) -> None:
        if ticket.unposted or ticket.outstanding or ticket.number not in self.tickets:
            return
        del self.tickets[ticket.number]
        self.events.append(WritesDone(ticket=ticket.number))

    def fail_write(self) -> None:
        """A posted write never lands, and with it the connection ends, as on every medium."""
        if not self.in_flight or self.stopped:
            return
        write = self.network.rng.choice(self.in_flight)
        self.in_flight.remove(write)
        self.network.lose(write.conn, write.conn.ends.index(self), "remote access error")

    def end_writes(self, conn: Connection) -> None:
        """Each write of a lost connection lands now or never, and its tickets end unheard."""
        for write in [write for write in self.in_flight if write.conn is conn]:
            if self.network.rng.random() < 0.5:
                self.land(write, complete=False)
            else:
                self.in_flight.remove(write)
        self.unposted = [write for write in self.unposted if write.conn is not conn]
        self.tickets = {n: ticket for n, ticket in self.tickets.items() if ticket.conn is not conn}

    def kill(self) -> None:
        """The process is gone, and with it whatever it had not finished copying."""
        self.dead, self.stopped = True, False
        self.in_flight.clear()
        self.unposted.clear()

    def _new_peer(self) -> Peer:
        self.next_peer += 1
        return self.next_peer - 1

    def _find(self, peer: Peer) -> tuple[Connection, int] | None:
        for conn in self.network.connections:
            for end in (0, 1):
                if conn.ends[end] is self and conn.peers[end] == peer and not conn.lost[end]:
                    return conn, end
        return None
