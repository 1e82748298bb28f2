"""The TCP connection beside the writes: it introduces two engines, carries messages, shows death.

    connecting --connected--> opening --their opening--> opened --ready()--> messages flow
        |  refused, timeout      |  garbage, version,       |  timeout           |  EOF, reset,
        v                        v  transport, timeout      v                    v  bad frame
    PeerLost <-------------------------------------------------------------------'

The first frame each way is the opening; who connected says its own first. What it offers belongs to
the links (addresses, tokens). Between openings and `ready()` a link builds its own path; messages
of both directions wait for it, so a message received means that both sides can write. Notes are
what one link says to the other, and do not wait. A connection that opens with a key joins one that
is open already: it is handed to the link that gave the key away. Who dials for it is a link of the
other side (`dial_again`), and says the key itself.

Control knows no transport. What a stranger sends never raises and never takes more memory than one
frame. Whatever else a link waits for, it watches on the same `waiter`.
"""

import math
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from disagg.resource import Resource
from disagg.transfer import wire
from disagg.transfer.interface import Event, MessageReceived, Peer, PeerLost, TransferError
from disagg.transfer.waiter import EDGE_TRIGGERED, READABLE, WRITABLE, Waiter

MAX_MESSAGE_BYTES = 16 << 20
#: Strangers that may be in the middle of opening a connection.
MAX_OPENING_CONNECTIONS = 128
#: What to do about a path for writes that does not come up.
PATH_CHECK = "check MTU and firewalls (RDMA: UDP 4791); try --verbose or other --transport on both"
#: What an opening may take, until there is a path for writes.
OPENING_TIMEOUT_SECONDS = 3.0


class Connection(wire.Wire, kw_only=True, eq=False):
    """One peer, which called us if not `outgoing`. `waiting`: messages to send when it is ready.
    `joins`: by key, what takes another connection that joins it, once, after its opening.

    It ends at the `deadline`, which is lifted when it is ready and the user knows it, for it is the
    user's or a message came; from then on the user watches its silence.
    """

    control: "Control"
    peer: Peer
    outgoing: bool
    deadline: float
    is_ready: bool = False
    waiting: bytearray = msgspec.field(default_factory=bytearray)
    joins: dict[bytes, Callable[[wire.Wire], None]] = msgspec.field(default_factory=dict)

    # What its link calls. Once it is lost, nothing of this does anything.

    def open(self, offers: dict[str, bytes]) -> None:
        """Say our opening: after `connect`, or in `on_opened`."""
        self.send(wire.opening(offers), at_once=True)

    def ready(self) -> None:
        """The link to the peer works: let messages flow."""
        self.is_ready = True
        if self.outgoing:
            self.deadline = math.inf
        self.send(bytes(self.waiting))

    def send_note(self, data: bytes) -> None:
        """To the peer's link, also before `ready`."""
        self.send(wire.framed(data, note=True), at_once=True)

    def dial_again(self) -> wire.Wire:
        """A second connection to the same host and port, the caller's own. OSError."""
        tcp = wire.dial(self.socket.family, self.socket.getpeername())
        return wire.Wire(socket=tcp, address=self.address, connected=False, opened=True)

    def guard(self, step: Callable[..., object], *arguments: object) -> None:
        """Run a step of the connection or its link. If it fails, the connection ends, after the
        messages that are here already."""
        try:
            step(*arguments)
        except (OSError, ValueError) as error:
            if self.peer not in self.control.connections:
                return  # it has ended
            why = str(error)
            if isinstance(error, OSError):
                why = f"connection to {self.address} broke: {wire.reason_of(error)}"
            with suppress(OSError, ValueError):
                for _ in range(wire.MAX_UNSENT_BYTES // wire.READ_BYTES if self.is_ready else 0):
                    self.read()
                    self._parse()
            self.control.close_peer(self.peer, why)

    # What its control calls.

    def send(self, frame: bytes, *, at_once: bool = False) -> None:
        """Send what the kernel takes now; before `ready` nothing, if not `at_once`."""
        queue = self.unsent if self.is_ready or at_once else self.waiting
        queue += frame
        self.guard(self._move)

    def watch(self) -> None:
        """Wait for what can be done next."""
        held = self.opened and not self.is_ready
        reads = not held or len(self.received) < wire.MAX_OPENING_BYTES
        writes = bool(self.unsent) or not self.connected
        events = READABLE * reads | WRITABLE * writes
        self.control.waiter.watch(self.socket.fileno(), events, partial(self.guard, self._move))

    # Inside.

    def _move(self, events: int = 0) -> None:
        """Do what can be done now; `events` are those that epoll reports."""
        if events and not self.connected:
            self.finish_connect()
        if events & ~WRITABLE:
            with suppress(BlockingIOError):
                self.read(one_frame=not self.opened)
        self._parse()
        self.flush()
        if self.peer in self.control.connections:  # neither lost nor handed over
            self.watch()

    def _parse(self) -> None:
        """Take every whole frame that may be taken now: before `ready`, the opening and notes."""
        while self.peer in self.control.connections:
            limit = MAX_MESSAGE_BYTES if self.is_ready else wire.MAX_OPENING_BYTES
            taken = self.take(limit, notes_only=self.opened and not self.is_ready)
            if taken is None:
                return
            frame, is_note = taken
            if not self.opened:
                self._on_opening(frame)
            elif is_note:
                self.control.on_note(self.peer, frame)
            else:
                self.deadline = math.inf
                self.control.events.append(MessageReceived(peer=self.peer, data=frame))

    def _on_opening(self, frame: bytes) -> None:
        try:
            offers = wire.decode_opening(frame, self.control.transports)
        except TransferError as error:
            if not self.outgoing:  # it called: our answer shows it why this is the end
                self.open(dict.fromkeys(self.control.transports, b""))
            raise TransferError(f"{self.address} sent {error}") from error
        self.opened = True
        if (key := offers.get(wire.JOIN)) is None:
            self.control.on_opened(self, offers)
            return
        first = next((c for c in self.control.connections.values() if key in c.joins), None)
        if first is None:
            raise TransferError(f"{self.address} joins nothing that is open")
        self.control.waiter.unwatch(self.socket.fileno())
        del self.control.connections[self.peer]
        first.joins.pop(key)(self)


class Control(Resource):
    """The part of an engine that has all its control connections, and its one place to wait.

    `transports` are those that an opening must have one of. Tests put another `clock` here, or
    more or less patience.
    """

    def __init__(self, transports: Sequence[str]) -> None:
        self.transports = transports
        self.clock: Callable[[], float] = time.monotonic
        self.opening_timeout = OPENING_TIMEOUT_SECONDS
        #: Those that are open.
        self.connections: dict[Peer, Connection] = {}
        self._last_peer = 0
        self._listener: socket.socket | None = None
        #: What the engine's next `poll` returns.
        self.events: list[Event] = []
        #: A link watches its own descriptors here too.
        self.waiter = Waiter()

    @abstractmethod
    def on_opened(self, connection: Connection, offers: dict[str, bytes]) -> None:
        """The peer's opening fits. Answered with `connection.open`, if it called us, and `ready`.
        If this fails, the connection ends."""

    @abstractmethod
    def on_note(self, peer: Peer, data: bytes) -> None:
        """What the peer's link says to ours; in order with the messages. As `on_opened`."""

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept peers; returns the bound address (port 0 picks one). TransferError if taken."""
        self._listener = listener = wire.open_listener(host, port)
        # Said once of each caller. Who cannot be accepted, for no descriptors are left, would end
        # each `poll` else; it is accepted with the next one, or calls again.
        handler = partial(self._accept, listener)
        self.waiter.watch(listener.fileno(), READABLE | EDGE_TRIGGERED, handler)
        bound = listener.getsockname()
        return str(bound[0]), int(bound[1])

    def connect(self, host: str, port: int) -> Peer:
        """Start a connection and return at once; messages wait. It fails with a `PeerLost`.

        A host name is looked up first, which may take as long as the resolver does.
        """
        self._last_peer += 1
        where = f"{host}:{port}"
        try:
            self._add(wire.dial(*wire.resolve(host, port)), where, outgoing=True)
        except (OSError, UnicodeError) as error:
            why = f"cannot connect to {where}: {wire.reason_of(error)}; {wire.CHECK}"
            self.events.append(PeerLost(peer=self._last_peer, why=why))
        return self._last_peer

    def close_peer(self, peer: Peer, why: str) -> None:
        """End a connection and fence: `PeerLost`, then `PeerFenced`. Unknown or lost: no-op."""
        if connection := self.connections.pop(peer, None):
            self.waiter.close_socket(connection.socket)
            self.events.append(PeerLost(peer=peer, why=why))

    def send(self, peer: Peer, data: bytes) -> None:
        """Send a message. To a lost peer: dropped (its `PeerLost` says so). ValueError if it is
        empty or too long (16 MiB)."""
        if not 1 <= len(data) <= MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has 1 to {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
        if connection := self.connections.get(peer):
            connection.send(wire.framed(data))

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds, unless there are `events`, and move a bounded amount."""
        now = self.clock()
        for connection in list(self.connections.values()):
            if now >= connection.deadline:
                self._end_late(connection)
        if self.events:
            timeout = 0.0
        ends = min((c.deadline for c in self.connections.values()), default=math.inf)
        self.waiter.wait(max(0.0, min(timeout, ends - now)))

    def wake(self) -> None:
        """End the `poll` that waits now, or the next one. From any thread."""
        self.waiter.wake()

    def close(self) -> None:
        """Close every connection and the listener. May be called twice."""
        for peer in list(self.connections):
            self.close_peer(peer, "engine closed")
        self.waiter.close_socket(self._listener)
        self.waiter.close()

    # Inside.

    def _accept(self, listener: socket.socket, _events: int) -> None:
        with suppress(OSError):  # nobody else waits, or no descriptors are left
            for _ in range(MAX_OPENING_CONNECTIONS):
                tcp, (host, port, *_) = listener.accept()
                if sum(not c.is_ready for c in self.connections.values()) < MAX_OPENING_CONNECTIONS:
                    tcp.setblocking(False)
                    self._last_peer += 1
                    self._add(tcp, f"{host}:{port}", outgoing=False)
                else:
                    tcp.close()

    def _add(self, tcp: socket.socket, address: str, *, outgoing: bool) -> None:
        """The last peer's connection."""
        self.connections[self._last_peer] = connection = Connection(
            control=self,
            peer=self._last_peer,
            socket=tcp,
            address=address,
            outgoing=outgoing,
            deadline=self.clock() + self.opening_timeout,
            connected=not outgoing,
        )
        connection.watch()

    def _end_late(self, connection: Connection) -> None:
        step, check = "sent no opening" if connection.connected else "did not answer", wire.CHECK
        if connection.opened:
            step, check = "opened, but the path for writes did not come up", PATH_CHECK
        why = f"{connection.address} {step} within {self.opening_timeout:g} s; {check}"
        self.close_peer(connection.peer, why)
