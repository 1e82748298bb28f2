"""The TCP connection beside the writes: it introduces two engines, carries messages, shows death.

    connecting --connected--> opening --their opening--> opened --ready()--> messages flow
        |  refused, timeout      |  garbage, version,       |  timeout           |  EOF, reset,
        v                        v  transport, timeout      v                    v  bad frame
    Lost <-----------------------------------------------------------------------'

Every frame is a u32 length (little endian) and that many bytes. The first one each way is the
opening; its last field belongs to the transports (addresses, tokens). Between `Opened` and
`ready()` one of them builds its own path; messages of both directions wait for it, so a message
received means that both sides can write.

Control knows no transport. What a stranger sends never raises and never takes more memory than one
frame. Whatever else a transport waits for, it watches on the same `waiter`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.transfer.interface import MessageReceived, Peer
from disagg.transfer.opening import MAX_OPENING_BYTES, Opening, decode_opening, encode_opening
from disagg.transfer.sockets import dial, open_listener, reason_of, resolve
from disagg.transfer.waiter import READABLE, WRITABLE, Waiter

MAX_MESSAGE_BYTES = 16 << 20
#: What a peer that does not read may leave with us before it counts as dead.
MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES
#: Read from one connection in one poll.
READ_BYTES = 256 << 10
#: Strangers that may be in the middle of opening a connection.
MAX_OPENING_CONNECTIONS = 128
OPENING_TIMEOUT_SECONDS = 3.0

#: What to do about a connection that does not come up.
_CHECK = "check host and port, and that the node there has said that it listens"

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The peer's opening fits. The transport answers with `ready()` or `close_peer()`."""

    peer: Peer
    epoch: int
    offers: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A connection is over. `announced`: the user knows the peer (connected to it, or heard it)."""

    peer: Peer
    why: str
    announced: bool


ControlEvent = Opened | MessageReceived | Lost


@dataclass(kw_only=True, eq=False)
class _Connection:
    peer: Peer
    socket: socket.socket
    address: str
    deadline: float
    connected: bool
    opened: bool = False
    ready: bool = False
    announced: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)

    @property
    def introduced(self) -> bool:
        """Whether the user knows of it and watches its silence."""
        return self.ready and self.announced


class Control:
    """All control connections of one engine, and its one place to wait.

    `make_offers(peer, outgoing)` gives the bytes of each of the `transports` for the opening of a
    new connection. `clock` counts seconds and only times openings.
    """

    def __init__(
        self,
        *,
        transports: Sequence[str],
        epoch: int,
        make_offers: Callable[[Peer, bool], dict[str, bytes]],
        clock: Callable[[], float] = time.monotonic,
        opening_timeout: float = OPENING_TIMEOUT_SECONDS,
    ) -> None:
        self._transports = transports
        self._epoch = epoch
        self._make_offers = make_offers
        self.clock = clock
        self._opening_timeout = opening_timeout
        self._connections: dict[Peer, _Connection] = {}
        self._last_peer = 0
        self._listener: socket.socket | None = None
        self._events: list[ControlEvent] = []
        #: A transport watches its own descriptors here too.
        self.waiter = Waiter()

    # What a transport calls.

    def ready(self, peer: Peer) -> None:
        """The transport's path to the peer works: let messages flow. Unknown or lost: no-op."""
        connection = self._connections.get(peer)
        if connection is None:
            return
        connection.ready = True
        connection.unsent += connection.waiting
        connection.waiting.clear()
        self._write(connection)
        self._parse(connection)

    def opening_deadline(self) -> float:
        """By `clock`: when a connection that begins now must be introduced."""
        return self.clock() + self._opening_timeout

    def is_open(self, peer: Peer) -> bool:
        """Whether the peer is known and not lost."""
        return peer in self._connections

    def dial_again(self, peer: Peer, port: int) -> socket.socket:
        """A second connection to the host of an open peer; it is still connecting. OSError."""
        first = self._connections[peer].socket
        host, _, *rest = first.getpeername()
        return dial(first.family, (host, port, *rest))

    # What the engine passes on.

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """See `TransferEngine.listen`."""
        self._listener = listener = open_listener(host, port)
        self.waiter.watch_listener(listener, self._on_accept)
        bound = listener.getsockname()
        return str(bound[0]), int(bound[1])

    def connect(self, host: str, port: int) -> Peer:
        """See `TransferEngine.connect`. A host NAME is looked up here, which may wait for DNS."""
        where = f"{host}:{port}"
        try:
            tcp = dial(*resolve(host, port))
        except OSError as error:
            self._last_peer += 1
            why = f"cannot connect to {where}: {reason_of(error)}; {_CHECK}"
            self._events.append(Lost(peer=self._last_peer, why=why, announced=True))
            return self._last_peer
        return self._add(tcp, where, outgoing=True).peer

    def close_peer(self, peer: Peer, why: str) -> None:
        """End a connection; `Lost` follows from the next `poll`. Unknown or lost: no-op."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._lose(connection, why)

    def close_after_reading(self, peer: Peer, why: str) -> None:
        """End a connection whose peer is gone, after the messages that are here already."""
        connection = self._connections.get(peer)
        if connection is not None and connection.ready:
            for _ in range(MAX_UNSENT_BYTES // READ_BYTES):
                if not self._read(connection):
                    break
        self.close_peer(peer, why)

    def send(self, peer: Peer, data: bytes) -> None:
        """Send a message, or queue it until `ready`. ValueError for 0 or too many bytes."""
        if not 1 <= len(data) <= MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message has 1 to {MAX_MESSAGE_BYTES} bytes, got {len(data)}; split it"
            )
        connection = self._connections.get(peer)
        if connection is None:
            return
        queue = connection.unsent if connection.ready else connection.waiting
        queue += _LENGTH.pack(len(data))
        queue += data
        if len(queue) > MAX_UNSENT_BYTES:
            self._lose(connection, f"{connection.address} does not read: {len(queue)} bytes wait")
        elif connection.ready:
            self._write(connection)

    def poll(self, timeout: float) -> list[ControlEvent]:
        """Wait up to `timeout` seconds, move a bounded amount, and return what happened."""
        self._end_late_openings()
        if self._events:
            timeout = 0.0
        deadlines = [c.deadline for c in self._connections.values() if not c.introduced]
        if deadlines:
            timeout = max(0.0, min(timeout, min(deadlines) - self.clock()))
        self.waiter.wait(timeout)
        taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        """Close every connection and the listener. May be called twice."""
        for connection in list(self._connections.values()):
            self._lose(connection, "engine closed")
        self.waiter.close_socket(self._listener)
        self.waiter.close()

    # Inside.

    def _add(self, tcp: socket.socket, address: str, *, outgoing: bool) -> _Connection:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._last_peer += 1
        connection = _Connection(
            peer=self._last_peer,
            socket=tcp,
            address=address,
            deadline=self.opening_deadline(),
            connected=not outgoing,
            announced=outgoing,
        )
        offers = self._make_offers(connection.peer, outgoing)
        frame = encode_opening(Opening(self._epoch, offers))
        connection.unsent += _LENGTH.pack(len(frame)) + frame
        self._connections[connection.peer] = connection
        self._watch_connection(connection)
        return connection

    def _watch_connection(self, connection: _Connection) -> None:
        held = connection.opened and not connection.ready
        events = 0
        if not held or len(connection.received) < MAX_OPENING_BYTES:
            events |= READABLE
        if connection.unsent or not connection.connected:
            events |= WRITABLE
        self.waiter.watch(
            connection.socket.fileno(), events, lambda got: self._on_ready(connection, got)
        )

    def _on_ready(self, connection: _Connection, events: int) -> None:
        if not connection.connected and not self._finish_connect(connection):
            return
        # Writing first: whoever refuses the other's opening has sent its own, which says why.
        if events & WRITABLE:
            self._write(connection)
        if events & ~WRITABLE and self.is_open(connection.peer):
            self._read(connection)

    def _finish_connect(self, connection: _Connection) -> bool:
        code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        reason = os.strerror(code)
        if code == 0:
            try:
                # TCP lets a socket meet itself when the port it dials is also its own.
                if connection.socket.getsockname() != connection.socket.getpeername():
                    connection.connected = True
                    return True
                reason = "nobody listens there"
            except OSError as error:  # reset since we asked
                reason = reason_of(error)
        self._lose(connection, f"cannot connect to {connection.address}: {reason}; {_CHECK}")
        return False

    def _on_accept(self, tcp: socket.socket, address: str) -> None:
        if sum(not c.ready for c in self._connections.values()) >= MAX_OPENING_CONNECTIONS:
            tcp.close()
            return
        try:
            self._add(tcp, address, outgoing=False)
        except OSError:  # no descriptors left
            tcp.close()

    def _read(self, connection: _Connection) -> bool:
        """Read and take at most `READ_BYTES`; whether there was something."""
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(connection, f"connection to {connection.address} broke: {reason_of(error)}")
            return False
        if not data:
            hint = "" if connection.opened else f" before its opening; {_CHECK}"
            self._lose(connection, f"{connection.address} closed the connection{hint}")
            return False
        connection.received += data
        self._parse(connection)
        return True

    def _parse(self, connection: _Connection) -> None:
        """Take every whole frame that may be taken now."""
        received = connection.received
        while self.is_open(connection.peer) and len(received) >= _LENGTH.size:
            if connection.opened and not connection.ready:
                break
            (length,) = _LENGTH.unpack_from(received)
            limit = MAX_MESSAGE_BYTES if connection.ready else MAX_OPENING_BYTES
            if not 1 <= length <= limit:
                self._lose(
                    connection,
                    f"{connection.address} sent a frame of {length} bytes; expected 1 to {limit};"
                    " does a disagg node listen there?",
                )
                return
            end = _LENGTH.size + length
            if len(received) < end:
                break
            frame = bytes(received[_LENGTH.size : end])
            del received[:end]
            if connection.opened:
                connection.announced = True
                self._events.append(MessageReceived(peer=connection.peer, data=frame))
            else:
                self._open(connection, frame)
        if self.is_open(connection.peer):
            self._watch_connection(connection)

    def _open(self, connection: _Connection, frame: bytes) -> None:
        try:
            opening = decode_opening(frame, self._transports)
        except ValueError as error:
            self._lose(connection, f"{connection.address} sent {error}")
            return
        connection.opened = True
        opened = Opened(peer=connection.peer, epoch=opening.epoch, offers=opening.offers)
        self._events.append(opened)

    def _write(self, connection: _Connection) -> None:
        if not self.is_open(connection.peer):
            return
        try:
            while connection.connected and connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass  # the rest goes when epoll says so
        except (BrokenPipeError, ConnectionResetError):
            connection.unsent.clear()  # the reader ends it, after what the peer said at last
        except OSError as error:
            self._lose(connection, f"connection to {connection.address} broke: {reason_of(error)}")
            return
        self._watch_connection(connection)

    def _end_late_openings(self) -> None:
        now = self.clock()
        for connection in list(self._connections.values()):
            if not connection.introduced and now >= connection.deadline:
                step = "sent no opening" if connection.connected else "did not answer"
                if connection.opened:
                    step = "opened, but the path for writes did not come up"
                if connection.ready:
                    step = "opened, but said nothing"
                why = f"{connection.address} {step} within {self._opening_timeout:g} s; {_CHECK}"
                self._lose(connection, why)

    def _lose(self, connection: _Connection, why: str) -> None:
        self.waiter.close_socket(connection.socket)
        del self._connections[connection.peer]
        self._events.append(Lost(peer=connection.peer, why=why, announced=connection.announced))
