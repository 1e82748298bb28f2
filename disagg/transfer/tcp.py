"""Pages travel on a second TCP connection between two engines, so that messages wait for no bulk.

    who connects                             who is called
      |----- opening: no key, sizes ------------>|  (openings travel on the control connection)
      |<---- opening: key, sizes ----------------|
      |== second connection, to the same port ==>|  opens with the key: see `control.py`
     ready                                     ready
      |<============ frames, both ways =========>|  see `tcp_frames.py`

    jobs of a peer --frame--> sendmsg from the pages ==TCP==> recvmsg into the pages --> count
    WritesDone <-- the kernel took all
    PeerLost --> the data connection is closed and nobody reads it any more --> PeerFenced

What is sent is bounded by the kernel's buffers and one frame: a reader that does not read stops the
posting, and what is not posted can be withdrawn.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from disagg.transfer.interface import Memory
from disagg.transfer.medium import Bytes, Connection, Job, Link, Medium
from disagg.transfer.opening import Opening, decode, encode_opening
from disagg.transfer.tcp_frames import (
    FRAME_BYTES,
    Frame,
    FrameReader,
    outgoing_frame,
    writes_of_frame,
)
from disagg.transfer.waiter import READABLE, WRITABLE
from disagg.transfer.wire import Wire, framed

#: Read at most when a connection has ended, of what came before.
LAST_BYTES = 16 << 20
#: What a system call costs beside its bytes, in bytes; it bounds how many small ones a poll makes.
CALL_BYTES = 16 << 10

#: `socket.sendmsg`, as far as it is used.
Send = Callable[[socket.socket, list[memoryview]], int]


class TcpMedium(Medium):
    """The memory that peers may write to, nothing of a region that is a source alone. `send` is
    there for tests that stop it half way."""

    name = "tcp"

    def __init__(self, send: Send = socket.socket.sendmsg) -> None:
        self._send = send
        self._regions: list[Bytes] = []

    def register(self, memory: Memory, view: Bytes) -> None:
        self._regions.append(view if memory.writable else view[:0])

    def link(self, connection: Connection) -> Link:
        return TcpLink(connection, self._regions, self._send)


class TcpLink(Link):
    """One connection's data connection. In the opening stand the key for it (of who is called) and
    the sizes of our regions."""

    def __init__(self, connection: Connection, regions: list[Bytes], send: Send) -> None:
        super().__init__(connection)
        key = b"" if self.outgoing else self.control.expect_join(self.peer, self._take)
        self.info = msgspec.msgpack.encode((key, [region.nbytes for region in regions]))
        self._reader = FrameReader(regions, connection.arrived)
        self._send = send
        self._data: Wire | None = None
        self._blocked = True  # until there is a connection
        self._frame: tuple[Job, Frame] | None = None

    def start(self, info: bytes) -> None:
        """Dial for the data connection, or wait for it."""
        key, self.region_bytes = decode(info, tuple[bytes, list[int]], "malformed opening of tcp")
        if self.outgoing:
            self._data = data = self.control.dial_again(self.peer)
            data.unsent += framed(encode_opening(Opening({}, key)))
            self._watch(data, blocked=True)

    def can_post(self) -> bool:
        return not self._blocked and (self._frame is not None or bool(self.jobs))

    def post(self) -> None:
        """Send about a frame, or what the kernel takes."""
        budget = FRAME_BYTES
        while budget > 0 and self.can_post():
            assert self._data is not None, "a link that can post has its connection"
            if self._frame is None:
                job, *offsets = self.take(writes_of_frame(self.jobs[0].pages.page_bytes))
                job.under_way = 1
                self._frame = job, outgoing_frame(job, *offsets)
            job, frame = self._frame
            try:
                sent = self._send(self._data.socket, frame.rest())
            except BlockingIOError:
                sent = 0
            budget -= sent + CALL_BYTES
            frame.moved += sent
            if frame.moved < frame.end:
                self._watch(self._data, blocked=True)
            else:
                job.under_way = 0
                self._frame = None

    def revoke(self) -> None:
        self.guard(partial(self._receive, LAST_BYTES))
        self.close()

    def close(self) -> None:
        if self._data is not None:
            self.control.waiter.close_socket(self._data.socket)
            self._data = None

    def _take(self, data: Wire) -> None:
        self._data = data
        self._watch(data, blocked=False)
        self.control.ready(self.peer)

    def _watch(self, data: Wire, *, blocked: bool) -> None:
        self._blocked = blocked
        self.control.waiter.watch(
            data.socket.fileno(),
            READABLE | WRITABLE * blocked,
            lambda events: self.guard(partial(self._on_data, data, events)),
        )

    def _on_data(self, data: Wire, events: int) -> None:
        if not data.connected:  # the key is short: a new connection takes it at once
            data.finish_connect()
            data.flush()
            self.control.ready(self.peer)
        if self._blocked and events & ~READABLE:
            self._watch(data, blocked=False)
        if events & ~WRITABLE:
            self._receive(FRAME_BYTES)

    def _receive(self, budget: int) -> None:
        with suppress(BlockingIOError):
            while budget > 0 and self._data is not None:
                budget -= self._reader.receive(self._data) + CALL_BYTES
