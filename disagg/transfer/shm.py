"""Transfer engine for two processes of one host: the writer copies into the destination's memory.

    jobs of a peer --one batch a poll--> copy to its mapped memory, under its lease
                                            |
    WritesDone <-- sent <-- notes (imm, count) <--'
    PeerLost --> our lease revoked --> the peer's last batch is over, or it died --> PeerFenced

Setting up a link and its socket is `shm_link.py`, the lease is `lease.py`, all that is not about
copying is `queued_engine.py`. "Bytes, then count" rests on x86: stores become visible in program
order, and the notification is sent after the copy. One poll copies at most two batches' bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import numpy as np

from disagg.kv_layout import Offsets
from disagg.transfer.bounds import check_offsets
from disagg.transfer.control import Control
from disagg.transfer.interface import Memory, Peer, TransferError, WritesDone
from disagg.transfer.medium import Arrived, Bytes, Job, Medium
from disagg.transfer.page_copy import copy_pages
from disagg.transfer.queued_engine import QueuedEngine
from disagg.transfer.shm_link import Extent, Note, ShmLink

#: Copied under one lock of the lease: about a millisecond.
BATCH_BYTES = 4 << 20

#: As `copy_pages`.
Copy = Callable[[Bytes, Bytes, int, Offsets, Offsets], None]


class ShmTransferEngine(QueuedEngine):
    """See `interface.py`. Memory needs a descriptor; both processes must belong to one user."""

    #: Here so that tests can stop a process while it holds the lease.
    _copy = staticmethod(copy_pages)

    def _make_media(self) -> list[Medium]:
        return [ShmMedium(self._copy)]


class ShmMedium(Medium):
    """The memory of one engine to pass to peers, and copying into theirs."""

    name = "shm"

    def __init__(self, copy: Copy = copy_pages) -> None:
        self._copy = copy
        self._own: list[tuple[int, Extent]] = []

    def register(self, memory: Memory, view: Bytes) -> None:
        if memory.fd is None:
            raise TransferError(
                "shm needs memory with a file descriptor, got none; allocate it as SharedMemory"
            )
        extent = Extent(os.fstat(memory.fd).st_size, memory.fd_offset, memory.nbytes)
        offset = np.array([memory.fd_offset])
        check_offsets("memory", offset, memory.nbytes, extent.file_bytes)
        self._own.append((memory.fd, extent))

    def listen(self, control: Control, host: str) -> None:
        """Nothing to do: each link listens on a name of its own."""

    def look(self, control: Control) -> None:
        """Nothing to do: leases are looked at by the engine."""

    def link(self, control: Control, peer: Peer, arrived: Arrived, *, outgoing: bool) -> ShmLink:
        return ShmLink(
            control, peer, self._own, arrived, copy_batch=self._copy_batch, outgoing=outgoing
        )

    def close(self, control: Control) -> None:
        self._own = []

    def _copy_batch(self, jobs: deque[Job], regions: list[Bytes]) -> list[Note]:
        notes: list[Note] = []
        budget = BATCH_BYTES
        while jobs and budget > 0:
            job = jobs[0]
            before = job.num_posted
            budget -= self._copy_some(job, regions[job.region], budget)
            end = None
            if job.is_posted:
                jobs.popleft()
                end = WritesDone(ticket=job.ticket)
            if count := job.num_posted - before:
                notes.append(Note(imm=job.imm, count=count, end=end))
        return notes

    def _copy_some(self, job: Job, destination: Bytes, budget: int) -> int:
        """Copy whole writes for about `budget` bytes (or a part of a huge one); bytes copied."""
        if job.write_bytes > BATCH_BYTES:
            count, nbytes = 1, min(job.write_bytes - job.within, budget)
        else:
            count, nbytes = max(1, budget // job.write_bytes), job.write_bytes
        some = slice(job.num_posted, job.num_posted + count)
        sources = job.source_offsets[some] + job.within
        destinations = job.destination_offsets[some] + job.within
        self._copy(destination, job.source, nbytes, destinations, sources)
        job.within += nbytes
        if job.within == job.write_bytes:
            job.within = 0
            job.num_posted += len(sources)
        return nbytes * len(sources)
