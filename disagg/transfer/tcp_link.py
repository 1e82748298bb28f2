"""The data connection of two engines: a second TCP connection, so that messages wait for no bulk.

    connected by TCP                             accepted by TCP
      |<--- opening: token A, port, sizes ----------|  port: of its data listener
      |---- opening: token B, no port, sizes ------>|  (openings travel on the control connection)
      |== data connection to that port: token A ===>|  the token tells which peer this is
     ready                                        ready
      |<=============== frames, both ways =========>|  see `tcp_frames.py`

What is sent is bounded by the kernel's buffers and one frame: a reader that does not read stops the
posting, and what is not posted can be withdrawn.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

import msgspec

from disagg.transfer.control import Control
from disagg.transfer.interface import Peer, Ticket, TransferError, WritesDone
from disagg.transfer.medium import Arrived, Bytes, Link, LinkError, decode
from disagg.transfer.tcp_frames import FRAME_BYTES, FrameReader, OutgoingFrame
from disagg.transfer.waiter import READABLE, WRITABLE

TOKEN_BYTES = 16
#: Read at most when a connection has ended, of what came before.
LAST_BYTES = 16 << 20
#: What a system call costs beside its bytes, in bytes; it bounds how many small ones a poll makes.
CALL_BYTES = 16 << 10

#: `socket.sendmsg`, as far as it is used.
Send = Callable[[socket.socket, list[memoryview]], int]


class _Info(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """In the opening: what the data connection begins with, where to (who accepts), our regions."""

    token: bytes
    port: int | None
    region_bytes: list[int]


class TcpLink(Link):
    """One connection's data connection.

    `port` is where the peer will call (who accepts); until then `links` has us by our token.
    """

    path = "data connection"

    def __init__(
        self,
        control: Control,
        peer: Peer,
        regions: list[Bytes],
        arrived: Arrived,
        send: Send,
        port: int | None,
        links: dict[bytes, TcpLink],
    ) -> None:
        super().__init__(control, peer)
        sizes = [region.nbytes for region in regions]
        self._info = _Info(secrets.token_bytes(TOKEN_BYTES), port, sizes)
        self.info = msgspec.msgpack.encode(self._info)
        self._links = links
        if port is not None:
            links[self._info.token] = self
        self._reader = FrameReader(regions, arrived)
        self._send = send
        self._is_opened = False
        self._data: socket.socket | None = None
        self._greeting = b""
        self._blocked = True
        self._frame: OutgoingFrame | None = None

    def start(self, info: bytes) -> None:
        """Dial the peer's data port, or wait for its call on ours."""
        theirs = decode(info, _Info, "opening of tcp")
        self._is_opened, self.region_bytes = True, theirs.region_bytes
        if self._info.port is not None:
            self._become_ready()
        elif theirs.port is None or not 0 < theirs.port < 65536:
            raise LinkError(f"malformed opening of tcp: expected a port, got {theirs.port}")
        else:
            self.take(self.control.dial_again(self.peer, theirs.port), theirs.token)

    def take(self, data: socket.socket, greeting: bytes = b"") -> None:
        """Use this data connection, after sending `greeting`."""
        self._links.pop(self._info.token, None)
        data.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = data
        self._greeting = greeting
        self._watch()

    def can_post(self) -> bool:
        return not self._blocked and (self._frame is not None or bool(self.jobs))

    def post(self) -> None:
        """Send about a frame, or what the kernel takes."""
        self.guard(self._post)

    def end(self, ticket: Ticket) -> None:
        if self._frame is not None:
            self._frame.ends.append(ticket)
        else:
            self.ended.append(WritesDone(ticket=ticket))

    def take_arrivals(self) -> None:
        if not self._greeting:
            self.guard(lambda: self._receive(LAST_BYTES))

    def close(self) -> None:
        self._links.pop(self._info.token, None)
        self.control.waiter.close_socket(self._data)
        self._data = None
        self._blocked = True

    def _become_ready(self) -> None:
        """Once both the peer's opening and the data connection are there."""
        if self._data is not None and self._is_opened:
            self.control.ready(self.peer)

    def _watch(self) -> None:
        assert self._data is not None, "watched only while it is there"
        events = (0 if self._greeting else READABLE) | (WRITABLE if self._blocked else 0)
        self.control.waiter.watch(self._data.fileno(), events, self._on_data)

    def _on_data(self, events: int) -> None:
        if self._blocked and events & ~READABLE:
            self.guard(self._go_on)
        if events & ~WRITABLE and not self._greeting:
            self.guard(lambda: self._receive(FRAME_BYTES))

    def _go_on(self) -> None:
        """The kernel takes more, at first because the connection stands."""
        assert self._data is not None, "watched only while it is there"
        if self._greeting:
            if code := self._data.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise LinkError(
                    f"cannot reach the peer's port for data: {os.strerror(code)}; with tcp,"
                    " all ports of a host that listens must be open to its peers"
                )
            self._greeting = self._greeting[self._data.send(self._greeting, socket.MSG_NOSIGNAL) :]
            if self._greeting:
                return
        self._blocked = False
        self._watch()
        self._become_ready()

    def _post(self) -> None:
        budget = FRAME_BYTES
        while budget > 0 and self.can_post():
            assert self._data is not None, "a link that is not blocked has its connection"
            if self._frame is None:
                self._frame = OutgoingFrame(self.jobs[0])
                if self.jobs[0].is_posted:
                    self._frame.ends.append(self.jobs.popleft().ticket)
            try:
                sent = self._send(self._data, self._frame.rest())
            except BlockingIOError:
                sent = 0
            budget -= sent + CALL_BYTES
            if self._frame.advance(sent):
                self.ended += [WritesDone(ticket=ticket) for ticket in self._frame.ends]
                self._frame = None
            elif sent < FRAME_BYTES:
                self._blocked = True
                self._watch()

    def _receive(self, budget: int) -> None:
        while budget > 0 and self._data is not None:
            try:
                nbytes = self._reader.receive(self._data)
            except BlockingIOError:
                return
            except (LinkError, TransferError, OSError):
                self.close()
                raise
            budget -= nbytes + CALL_BYTES
            if not nbytes:
                self.close()
                where = "" if self._reader.is_between_frames else " in the middle of a frame"
                self.control.close_after_reading(
                    self.peer, f"the peer closed the data connection{where}"
                )
