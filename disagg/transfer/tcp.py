"""Pages travel on a second TCP connection between two engines, so that messages wait for no bulk.

    who connects                             who is called
      |----- opening: no key, sizes ------------>|  (openings travel on the control connection)
      |<---- opening: key, sizes ----------------|
      |== second connection, to the same port ==>|  opens with the key: see `control.py`
     ready                                     ready

    jobs of a peer --frame--> sendmsg from the pages ==TCP==> recvmsg into the pages --> count
    WritesDone <-- the kernel took all
    PeerLost --> the data connection is closed and nobody reads it any more --> PeerFenced

    frame | length u32 | msgpack [region, imm, bytes of a write, offset i64 of each] | payloads |

Nothing is copied on the way: the kernel gathers a frame from slices of the source region, and
scatters it into slices of the destination. What is sent is bounded by the kernel's buffers and one
frame: a reader that does not read stops the posting, and what is not posted can be withdrawn.
"""

import secrets
import socket
from contextlib import suppress
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from disagg.kv_layout import Offsets
from disagg.transfer.control import Connection
from disagg.transfer.interface import MAX_IMM, Memory, TransferError, check_offsets
from disagg.transfer.medium import Arrived, Bytes, Job, Link, Medium
from disagg.transfer.waiter import READABLE, WRITABLE
from disagg.transfer.wire import JOIN, Wire, decode, framed, opening

#: Buffers of one system call are limited, to 1024 on Linux; a frame fits.
MAX_FRAME_WRITES = 256
#: Payload of a frame of several writes. One larger write has a frame of its own. The best of those
#: tried with `tests/bench/bench_tcp.py`: after each copy of a frame, Python runs on cold caches.
FRAME_BYTES = 4 << 20
#: Read at most when a connection has ended, of what came before.
LAST_BYTES = 16 << 20
#: What a system call costs beside its bytes, in bytes; it bounds how many small ones a poll makes.
CALL_BYTES = 16 << 10

_MAX_HEAD_BYTES = 8 * MAX_FRAME_WRITES + 64


class Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a frame's payloads are; `offsets` are in the region, of 8 bytes each, little endian."""

    region: Annotated[int, msgspec.Meta(ge=0)]
    imm: Annotated[int, msgspec.Meta(ge=0, le=MAX_IMM)]
    write_bytes: Annotated[int, msgspec.Meta(ge=1)]
    offsets: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8 * MAX_FRAME_WRITES)]


class Frame:
    """A frame on its way: a head (if we send it), then slices of a region. `moved` bytes are over,
    counted from the end of the head, so less than 0 within it; at `end` all are."""

    def __init__(self, region: Bytes, offsets: Offsets, nbytes: int, imm: int, head: bytes) -> None:
        # One byte of each page, all at once: the cache and page-table misses that every page
        # starts with overlap here, instead of stopping the kernel's copy once for each page.
        _ = region[offsets]
        view = region.data
        self._head, self._nbytes, self.imm = memoryview(head), nbytes, imm
        self.pages = [view[offset : offset + nbytes] for offset in offsets.tolist()]
        self.moved, self.end = -len(head), len(offsets) * nbytes

    def rest(self) -> list[memoryview]:
        """What is left to move, as buffers for one system call."""
        if self.moved < 0:
            return [self._head[self.moved :], *self.pages]
        first, within = divmod(self.moved, self._nbytes)
        return [self.pages[first][within:], *self.pages[first + 1 :]]


class TcpMedium(Medium):
    """The memory that peers may write to, nothing of a region that is a source alone. Tests put
    another `send` here, to stop it half way."""

    name = "tcp"

    def __init__(self) -> None:
        self.send = socket.socket.sendmsg
        self.regions: list[Bytes] = []

    def register(self, memory: Memory, view: Bytes) -> None:
        self.regions.append(view if memory.writable else view[:0])

    def link(self, connection: Connection, arrived: Arrived) -> Link:
        return TcpLink(connection, arrived, self)


class TcpLink(Link):
    """One connection's data connection. In the opening stand the key for it (of who is called) and
    the sizes of our regions."""

    def __init__(self, connection: Connection, arrived: Arrived, medium: TcpMedium) -> None:
        super().__init__(connection, arrived)
        key = b"" if connection.outgoing else secrets.token_bytes()
        if key:
            connection.joins[key] = self._joined
        self.info = msgspec.msgpack.encode((key, [region.nbytes for region in medium.regions]))
        self._medium, self._regions = medium, medium.regions
        self._data: Wire | None = None
        self._blocked = True  # until there is a connection
        self._outgoing: tuple[Job, Frame] | None = None
        self._incoming: Frame | None = None

    def start(self, info: bytes) -> None:
        """Dial for the data connection, or wait for it."""
        key, self.region_bytes = decode(info, tuple[bytes, list[int]], "malformed opening of tcp")
        if self.connection.outgoing:
            self._data = data = self.connection.dial_again()
            data.unsent += opening({JOIN: key})
            self._watch(data, blocked=True)

    def can_post(self) -> bool:
        return not self._blocked and (self._outgoing is not None or bool(self.jobs))

    def post(self) -> None:
        """Send about a frame, or what the kernel takes."""
        budget = FRAME_BYTES
        while budget > 0 and self.can_post():
            assert self._data is not None, "a link that can post has its connection"
            job, frame = self._outgoing = self._outgoing or self._next_frame()
            try:
                sent = self._medium.send(self._data.socket, frame.rest())
            except BlockingIOError:
                sent = 0
            budget -= sent + CALL_BYTES
            frame.moved += sent
            if frame.moved < frame.end:
                self._watch(self._data, blocked=True)
            else:
                job.under_way = 0
                self._outgoing = None

    def revoke(self) -> None:
        self.connection.guard(self._receive, LAST_BYTES)
        self.close()

    def close(self) -> None:
        if self._data is not None:
            self.waiter.close_socket(self._data.socket)
            self._data = None

    def _next_frame(self) -> tuple[Job, Frame]:
        nbytes = self.jobs[0].pages.page_bytes
        most = max(1, min(MAX_FRAME_WRITES, FRAME_BYTES // nbytes))
        job, sources, destinations = self.take(most)
        job.under_way = 1
        offsets = destinations.astype("<i8").tobytes()
        head = msgspec.msgpack.encode(Head(job.pages.destination, job.imm, nbytes, offsets))
        return job, Frame(job.source, sources, nbytes, job.imm, framed(head))

    def _joined(self, data: Wire) -> None:
        self._data = data
        self._watch(data, blocked=False)
        self.connection.ready()

    def _watch(self, data: Wire, *, blocked: bool) -> None:
        self._blocked = blocked
        handler = partial(self.connection.guard, self._on_data, data)
        self.waiter.watch(data.socket.fileno(), READABLE | WRITABLE * blocked, handler)

    def _on_data(self, data: Wire, events: int) -> None:
        if not data.connected:  # the key is short: a new connection takes it at once
            data.finish_connect()
            data.flush()
            self.connection.ready()
        if self._blocked and events & ~READABLE:
            self._watch(data, blocked=False)
        if events & ~WRITABLE:
            self._receive(FRAME_BYTES)

    def _receive(self, budget: int) -> None:
        with suppress(BlockingIOError):
            while budget > 0 and self._data is not None:
                budget -= self._receive_some(self._data) + CALL_BYTES

    def _receive_some(self, data: Wire) -> int:
        """Take what one system call gives; returns the number of bytes. BlockingIOError if there is
        nothing, TransferError at the end of the connection."""
        if (frame := self._incoming) is None:
            nbytes = data.read(one_frame=True)
            if taken := data.take(_MAX_HEAD_BYTES):
                self._take_head(taken[0])
            return nbytes
        nbytes = data.socket.recvmsg_into(frame.rest())[0]
        frame.moved += nbytes
        if frame.moved == frame.end:
            self._incoming = None
            self.arrived(frame.imm, len(frame.pages))
        return nbytes or data.read()  # which says that this is the end

    def _take_head(self, data: bytes) -> None:
        """TransferError if it is wrong: nothing is written of this frame, or of what follows."""
        # There are no regions any more then: what follows may be anything, and would be read as the
        # next head.
        regions, self._regions = self._regions, []
        head = decode(data, Head, "malformed head of a frame")
        if head.region >= len(regions):
            raise TransferError(f"a frame for region {head.region} of {len(regions)}")
        memory, offsets = regions[head.region], np.frombuffer(head.offsets, "<i8")
        check_offsets("destination", offsets, head.write_bytes, memory.nbytes)
        self._incoming = Frame(memory, offsets, head.write_bytes, head.imm, b"")
        self._regions = regions
