"""Frames of a data connection: writes of one size with one immediate, from pages into pages.

| length u32 | msgpack [region, imm, bytes of a write, offset i64 of each] | payloads, in order |
'------- a frame of `wire.py`: the head, checked ------------------------'- straight to memory -'

All numbers are little endian. Nothing is copied on the way: the kernel gathers a frame from slices
of the source region, and scatters it into slices of the destination.
"""

from typing import Annotated

import msgspec
import numpy as np

from disagg.kv_layout import Offsets
from disagg.transfer.interface import MAX_IMM, TransferError, check_offsets
from disagg.transfer.medium import Arrived, Bytes, Job
from disagg.transfer.opening import decode
from disagg.transfer.wire import Wire, framed

#: Buffers of one system call are limited, to 1024 on Linux; a frame fits.
MAX_FRAME_WRITES = 256
#: Payload of a frame of several writes. One larger write has a frame of its own. The best of those
#: tried with `tests/bench/bench_tcp.py`: after each copy of a frame, Python runs on cold caches.
FRAME_BYTES = 4 << 20

_MAX_HEAD_BYTES = 8 * MAX_FRAME_WRITES + 64


class Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What the payloads are; `offsets` are in the region, of 8 bytes each."""

    region: Annotated[int, msgspec.Meta(ge=0)]
    imm: Annotated[int, msgspec.Meta(ge=0, le=MAX_IMM)]
    write_bytes: Annotated[int, msgspec.Meta(ge=1)]
    offsets: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8 * MAX_FRAME_WRITES)]


class Frame:
    """A frame on its way: a head (if we send it), then slices of a region. `moved` bytes are over,
    counted from the end of the head, so less than 0 within it; at `end` all are."""

    def __init__(
        self, region: Bytes, offsets: Offsets, write_bytes: int, head: bytes = b""
    ) -> None:
        # One byte of each page, all at once: the cache and page-table misses that every page
        # starts with overlap here, instead of stopping the kernel's copy once for each page.
        _ = region[offsets]
        view = region.data
        self._head, self._write_bytes = memoryview(head), write_bytes
        self._pages = [view[offset : offset + write_bytes] for offset in offsets.tolist()]
        self.moved, self.end = -len(head), len(offsets) * write_bytes

    def rest(self) -> list[memoryview]:
        """What is left to move, as buffers for one system call."""
        if self.moved < 0:
            return [self._head[self.moved :], *self._pages]
        first, within = divmod(self.moved, self._write_bytes)
        return [self._pages[first][within:], *self._pages[first + 1 :]]


def writes_of_frame(page_bytes: int) -> int:
    """How many writes of this size one frame takes."""
    return max(1, min(MAX_FRAME_WRITES, FRAME_BYTES // page_bytes))


def outgoing_frame(job: Job, sources: Offsets, destinations: Offsets) -> Frame:
    """Some writes of a job."""
    region, nbytes = job.pages.destination, job.pages.page_bytes
    head = Head(region, job.imm, nbytes, destinations.astype("<i8").tobytes())
    return Frame(job.source, sources, nbytes, framed(msgspec.msgpack.encode(head)))


class FrameReader:
    """One connection's incoming frames. `regions` are what its peer may write to."""

    def __init__(self, regions: list[Bytes], arrived: Arrived) -> None:
        self._regions = regions
        self._arrived = arrived
        self._frame: Frame | None = None

    def receive(self, data: Wire) -> int:
        """Take what one system call gives; returns the number of bytes.

        BlockingIOError if there is nothing. TransferError at the end of the connection, and for a
        frame with a wrong head: nothing is written of it, or of what follows.
        """
        if self._frame is None:
            nbytes = data.read(one_frame=True)
            if taken := data.take(_MAX_HEAD_BYTES):
                self._take_head(taken[0])
            return nbytes
        nbytes = data.socket.recvmsg_into(self._frame.rest())[0]
        self._frame.moved += nbytes
        if self._frame.moved == self._frame.end:
            self._frame = None
            self._arrived(*self._arrival)
        return nbytes or data.read()  # which says that this is the end

    def _take_head(self, data: bytes) -> None:
        # There are none any more if the head is wrong: what follows may be anything, and would be
        # read as the next head.
        regions, self._regions = self._regions, []
        head = decode(data, Head, "malformed head of a frame")
        if head.region >= len(regions):
            raise TransferError(f"a frame for region {head.region} of {len(regions)}")
        memory, offsets = regions[head.region], np.frombuffer(head.offsets, "<i8")
        check_offsets("destination", offsets, head.write_bytes, memory.nbytes)
        self._frame = Frame(memory, offsets, head.write_bytes)
        self._arrival = head.imm, len(offsets)
        self._regions = regions
