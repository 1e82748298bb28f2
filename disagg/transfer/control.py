"""The TCP connection beside the writes: it introduces two engines, carries messages, shows death.

    connecting --connected--> opening --their opening--> opened --ready()--> messages flow
        |  refused, timeout      |  garbage, version,       |  timeout           |  EOF, reset,
        v                        v  transport, timeout      v                    v  bad frame
    PeerLost <-------------------------------------------------------------------'

The first frame each way is the opening; who connected says its own first. What it offers belongs to
the links (addresses, tokens). Between `Opened` and `ready()` a link builds its own path; messages
of both directions wait for it, so a message received means that both sides can write. Notes are
what one link says to the other, and do not wait. A connection that opens with a key joins one that
is open already: it is handed to the link that gave the key away. Who dials for it is a link of the
other side (`dial_again`), and says the key itself.

Control knows no transport. What a stranger sends never raises and never takes more memory than one
frame. Whatever else a link waits for, it watches on the same `waiter`.
"""

import math
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from disagg.transfer import wire
from disagg.transfer.interface import MessageReceived, Peer, PeerLost, TransferError
from disagg.transfer.waiter import READABLE, WRITABLE, Waiter

MAX_MESSAGE_BYTES = 16 << 20
#: Strangers that may be in the middle of opening a connection.
MAX_OPENING_CONNECTIONS = 128
#: What to do about a path for writes that does not come up.
PATH_CHECK = (
    "check MTU and firewalls on the way (RDMA: UDP 4791), and what the other node says with"
    " --verbose; or give both another --transport"
)
#: Until the next try to accept a connection, after one failed.
ACCEPT_PAUSE_SECONDS = 0.1


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The peer's opening fits. Answered with `open()`, if it called us, and `ready()`."""

    peer: Peer
    opening: wire.Opening


class NoteReceived(msgspec.Struct, frozen=True, kw_only=True):
    """What the peer's link says to ours; in order with the messages."""

    peer: Peer
    data: bytes


ControlEvent = Opened | MessageReceived | NoteReceived | PeerLost

#: Is handed a connection that joins another, after its first frame, the opening.
Take = Callable[[wire.Wire], None]


class _Connection(wire.Wire, kw_only=True, eq=False):
    """`waiting`: messages to send when it is `ready`. `joins`: by key, what takes a connection that
    joins it. `announced`: the user knows it, for it is the user's or a message came. It ends if it
    is not ready and announced by the `deadline`; from then on the user watches its silence."""

    peer: Peer
    announced: bool
    deadline: float
    ready: bool = False
    waiting: bytearray = msgspec.field(default_factory=bytearray)
    joins: dict[bytes, Take] = msgspec.field(default_factory=dict)


class Control:
    """All control connections of one engine, and its one place to wait.

    `transports` are those that an opening must have one of. `clock` counts seconds and only times
    openings, which may take `timeout` seconds.
    """

    def __init__(
        self, transports: Sequence[str], clock: Callable[[], float], timeout: float
    ) -> None:
        self._transports = transports
        self._clock = clock
        self._timeout = timeout
        self._connections: dict[Peer, _Connection] = {}
        self._last_peer = 0
        self._listener: socket.socket | None = None
        self._accept_at = math.inf  # when to watch the listener, if it is not watched
        self._events: list[ControlEvent] = []
        #: A link watches its own descriptors here too.
        self.waiter = Waiter()

    # What a link calls.

    def ready(self, peer: Peer) -> None:
        """The link to the peer works: let messages flow. Unknown or lost: no-op."""
        if connection := self._connections.get(peer):
            connection.ready = True
            connection.unsent += connection.waiting
            connection.waiting.clear()
            self.guard(peer, partial(self._move, connection))

    def is_open(self, peer: Peer) -> bool:
        """Whether the peer is known and not lost."""
        return peer in self._connections

    def expect_join(self, peer: Peer, take: Take) -> bytes:
        """The key by which another connection may join an open peer, once; `take` gets it."""
        key = secrets.token_bytes()
        self._connections[peer].joins[key] = take
        return key

    def dial_again(self, peer: Peer) -> wire.Wire:
        """A second connection to the host and port of an open peer, the caller's own. OSError."""
        first = self._connections[peer]
        tcp = wire.dial(first.socket.family, first.socket.getpeername())
        return wire.Wire(socket=tcp, address=first.address, connected=False, opened=True)

    def guard(self, peer: Peer, step: Callable[[], None]) -> None:
        """Run a step of a connection or its link. If it fails, the connection ends, after the
        messages that are here already."""
        try:
            step()
        except (OSError, ValueError) as error:
            if (connection := self._connections.get(peer)) is None:
                return  # it has ended
            why = str(error)
            if isinstance(error, OSError):
                why = f"connection to {connection.address} broke: {wire.reason_of(error)}"
            with suppress(OSError, ValueError):
                for _ in range(wire.MAX_UNSENT_BYTES // wire.READ_BYTES if connection.ready else 0):
                    connection.read()
                    self._parse(connection)
            self.close_peer(peer, why)

    def send_note(self, peer: Peer, data: bytes) -> None:
        """To the peer's link, also before `ready`. Lost: dropped."""
        self._queue(peer, wire.framed(data, note=True), at_once=True)

    # What the engine passes on.

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """See `TransferEngine.listen`."""
        self._listener, self._accept_at = wire.open_listener(host, port), 0.0
        bound = self._listener.getsockname()
        return str(bound[0]), int(bound[1])

    def connect(self, host: str, port: int) -> Peer:
        """See `TransferEngine.connect`. A host NAME is looked up here, which may wait for DNS."""
        where = f"{host}:{port}"
        try:
            return self._add(wire.dial(*wire.resolve(host, port)), where, connected=False)
        except OSError as error:
            self._last_peer += 1
            why = f"cannot connect to {where}: {wire.reason_of(error)}; {wire.CHECK}"
            self._events.append(PeerLost(peer=self._last_peer, why=why))
            return self._last_peer

    def open(self, peer: Peer, offers: dict[str, bytes]) -> None:
        """Say our opening: after `connect`, or in answer to `Opened`. Lost: no-op."""
        frame = wire.framed(wire.encode_opening(wire.Opening(offers)))
        self._queue(peer, frame, at_once=True)

    def close_peer(self, peer: Peer, why: str) -> None:
        """End a connection; `PeerLost` follows from the next `poll`. Unknown or lost: no-op."""
        if connection := self._connections.pop(peer, None):
            self.waiter.close_socket(connection.socket)
            self._events.append(PeerLost(peer=peer, why=why))

    def send(self, peer: Peer, data: bytes) -> None:
        """Send a message, or queue it until `ready`. ValueError for 0 or too many bytes."""
        if not 1 <= len(data) <= MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has 1 to {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
        self._queue(peer, wire.framed(data))

    def poll(self, timeout: float) -> list[ControlEvent]:
        """Wait up to `timeout` seconds, move a bounded amount, and return what happened."""
        now = self._clock()
        opening = [c for c in self._connections.values() if not (c.ready and c.announced)]
        for connection in opening:
            if now >= connection.deadline:
                self._end_late(connection)
        if self._events:
            timeout = 0.0
        if self._listener is not None and now >= self._accept_at:
            self._accept_at = math.inf
            self.waiter.watch(
                self._listener.fileno(), READABLE, partial(self._accept, self._listener)
            )
        ends = min([self._accept_at, *(connection.deadline for connection in opening)])
        self.waiter.wait(max(0.0, min(timeout, ends - now)))
        taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        """Close every connection and the listener. May be called twice."""
        for peer in list(self._connections):
            self.close_peer(peer, "engine closed")
        self.waiter.close_socket(self._listener)
        self.waiter.close()

    # Inside.

    def _accept(self, listener: socket.socket, _events: int) -> None:
        try:
            tcp, (host, port, *_) = listener.accept()
        except OSError:
            # It left before we looked, or no descriptors are left: accept(2) says retry. Not at
            # once: whoever still waits would end each `poll` until there are some.
            self.waiter.unwatch(listener.fileno())
            self._accept_at = self._clock() + ACCEPT_PAUSE_SECONDS
            return
        if sum(not c.ready for c in self._connections.values()) >= MAX_OPENING_CONNECTIONS:
            tcp.close()
            return
        tcp.setblocking(False)
        self._add(tcp, f"{host}:{port}", connected=True)

    def _add(self, tcp: socket.socket, address: str, *, connected: bool) -> Peer:
        self._last_peer += 1
        connection = _Connection(
            peer=self._last_peer,
            socket=tcp,
            address=address,
            announced=not connected,
            deadline=self._clock() + self._timeout,
            connected=connected,
        )
        self._connections[connection.peer] = connection
        self._watch(connection)
        return connection.peer

    def _queue(self, peer: Peer, frame: bytes, *, at_once: bool = False) -> None:
        if connection := self._connections.get(peer):
            queue = connection.unsent if connection.ready or at_once else connection.waiting
            queue += frame
            self.guard(peer, partial(self._move, connection))

    def _move(self, connection: _Connection, events: int = 0) -> None:
        """Do what can be done now; `events` are those that epoll reports."""
        if events and not connection.connected:
            connection.finish_connect()
        if events & ~WRITABLE:
            with suppress(BlockingIOError):
                connection.read(one_frame=not connection.opened)
        self._parse(connection)
        connection.flush()
        if self.is_open(connection.peer):  # neither lost nor handed over
            self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        held = connection.opened and not connection.ready
        reads = not held or len(connection.received) < wire.MAX_OPENING_BYTES
        writes = bool(connection.unsent) or not connection.connected
        self.waiter.watch(
            connection.socket.fileno(),
            READABLE * reads | WRITABLE * writes,
            lambda events: self.guard(connection.peer, partial(self._move, connection, events)),
        )

    def _parse(self, connection: _Connection) -> None:
        """Take every whole frame that may be taken now: before `ready`, the opening and notes."""
        peer = connection.peer
        while self.is_open(peer):
            limit = MAX_MESSAGE_BYTES if connection.ready else wire.MAX_OPENING_BYTES
            taken = connection.take(limit, notes_only=connection.opened and not connection.ready)
            if taken is None:
                return
            frame, is_note = taken
            if not connection.opened:
                self._on_opening(connection, frame)
            elif is_note:
                self._events.append(NoteReceived(peer=peer, data=frame))
            else:
                connection.announced = True
                self._events.append(MessageReceived(peer=peer, data=frame))

    def _on_opening(self, connection: _Connection, frame: bytes) -> None:
        peer = connection.peer
        try:
            opening = wire.decode_opening(frame, self._transports)
        except TransferError as error:
            if not connection.announced:  # it called: our answer shows it why this is the end
                self.open(peer, dict.fromkeys(self._transports, b""))
            raise TransferError(f"{connection.address} sent {error}") from error
        connection.opened = True
        if not opening.key:
            self._events.append(Opened(peer=peer, opening=opening))
            return
        for first in self._connections.values():
            if opening.key in first.joins:
                self.waiter.unwatch(connection.socket.fileno())
                del self._connections[peer]
                first.joins.pop(opening.key)(connection)
                return
        raise TransferError(f"{connection.address} joins nothing that is open")

    def _end_late(self, connection: _Connection) -> None:
        step, check = "sent no opening" if connection.connected else "did not answer", wire.CHECK
        if connection.opened:
            step, check = "opened, but the path for writes did not come up", PATH_CHECK
        why = f"{connection.address} {step} within {self._timeout:g} s; {check}"
        self.close_peer(connection.peer, why)
