"""Frames of a data connection: writes of one size with one immediate, sent from and into the pages.

| region u32 | imm u32 | writes u32 | bytes a write u64 | offset u64 of each | payloads, in order |
'-------------------- header, checked ----------------'---- checked ------'- straight to memory -'

All numbers are little endian. Nothing is copied on the way: the kernel gathers a frame from slices
of the source region, and scatters it into slices of the destination.
"""

import socket
import struct

import numpy as np

from disagg.kv_layout import Offsets
from disagg.transfer.interface import Ticket, TransferError, check_offsets
from disagg.transfer.medium import Arrived, Bytes, Job

#: Buffers of one system call are limited, to 1024 on Linux; a frame fits.
MAX_FRAME_WRITES = 256
#: Payload of a frame of several writes. One larger write has a frame of its own. The best of those
#: tried with `tests/bench/bench_tcp.py`: after each copy of a frame, Python runs on cold caches.
FRAME_BYTES = 4 << 20

HEADER = struct.Struct("<IIIQ")


class _Pages:
    """What moves of a frame: a head, slices of a region; `left` bytes are still to move."""

    def __init__(self, region: Bytes, offsets: Offsets, nbytes: int, head: bytes = b"") -> None:
        # One byte of each page, all at once: the cache and page-table misses that every page
        # starts with overlap here, instead of stopping the kernel's copy once for each page.
        _ = region[offsets]
        view = region.data
        self._head = memoryview(head)
        self._pages = [view[offset : offset + nbytes] for offset in offsets.tolist()]
        self._write_bytes = nbytes
        self._moved = 0
        self.left = len(head) + len(offsets) * nbytes

    def rest(self) -> list[memoryview]:
        """Buffers to move next, of a huge write the next `FRAME_BYTES`."""
        first, within = divmod(self._moved, self._write_bytes)
        pages = self._pages[first:]
        if pages:
            pages[0] = pages[0][within : within + FRAME_BYTES]
        return [self._head, *pages] if self._head else pages

    def advance(self, nbytes: int) -> None:
        """So much has moved."""
        of_head = min(nbytes, len(self._head))
        self._head = self._head[of_head:]
        self._moved += nbytes - of_head
        self.left -= nbytes


class OutgoingFrame(_Pages):
    """The next writes of a job, posted by making it. `ends`: tickets that end with it."""

    def __init__(self, job: Job) -> None:
        count = max(1, min(MAX_FRAME_WRITES, FRAME_BYTES // job.write_bytes))
        some = slice(job.num_posted, job.num_posted + count)
        sources, destinations = job.source_offsets[some], job.destination_offsets[some]
        job.num_posted += len(sources)
        header = HEADER.pack(job.region, job.imm, len(sources), job.write_bytes)
        head = header + destinations.astype("<u8").tobytes()
        super().__init__(job.source, sources, job.write_bytes, head)
        self.ends: list[Ticket] = []


class FrameReader:
    """One connection's incoming frames. `regions` are what its peer may write to."""

    def __init__(self, regions: list[Bytes], arrived: Arrived) -> None:
        self._regions = regions
        self._arrived = arrived
        self._head = memoryview(bytearray(HEADER.size + 8 * MAX_FRAME_WRITES))
        self._head_bytes, self._wanted = 0, HEADER.size
        self._pages: _Pages | None = None

    def receive(self, data: socket.socket) -> int:
        """Take what one system call gives; number of bytes, 0 at the end of the stream.

        BlockingIOError if there is nothing. TransferError for a frame that is wrong, of which
        nothing was written; what follows it is not read either (0, as at the end).
        """
        if self._pages is None:
            nbytes = data.recv_into(self._head[self._head_bytes : self._wanted])
            self._head_bytes += nbytes
            if self._head_bytes == self._wanted:
                self._take_head()
            return nbytes
        nbytes = data.recvmsg_into(self._pages.rest())[0]
        self._pages.advance(nbytes)
        if not self._pages.left:
            _, imm, count, _ = HEADER.unpack_from(self._head)
            self._pages = None
            self._head_bytes, self._wanted = 0, HEADER.size
            self._arrived(imm, count)
        return nbytes

    def _take_head(self) -> None:
        """The header is here, or the offsets behind it too."""
        region, _, count, write_bytes = HEADER.unpack_from(self._head)
        regions = len(self._regions)
        if self._wanted == HEADER.size:
            fits = count == 1 or count * write_bytes <= FRAME_BYTES
            if not (1 <= count <= MAX_FRAME_WRITES and write_bytes and fits and region < regions):
                raise TransferError(
                    f"a frame of {count} writes of {write_bytes} bytes to region {region}; expected"
                    f" 1 to {MAX_FRAME_WRITES}, of {FRAME_BYTES} bytes in all, below {regions}"
                )
            self._wanted += 8 * count
            return
        # Beyond 2**63 they read as negative, and are refused as such.
        offsets = np.frombuffer(self._head[HEADER.size : self._wanted], dtype="<i8")
        memory = self._regions[region]
        check_offsets("destination", offsets, write_bytes, memory.nbytes)
        self._pages = _Pages(memory, offsets, write_bytes)
