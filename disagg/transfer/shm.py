"""Two processes of one host: the writer copies into the destination's memory, which it has mapped.

    who connects                                who is called
      |----- opening: host, pid, lease, token ---->|  (openings travel on the control connection)
      |<---- opening: host, pid, lease, token -----|
      each opens the other's /proc/PID/fd/LEASE: the token? then maps what is granted in it: ready

    jobs of a peer --one batch a poll--> copy to its mapped memory, under its lease
    WritesDone <--'--> note (imm, count), ... on the control connection
    PeerLost --> our lease revoked --> the peer's last batch is over, or it died --> PeerFenced

The kernel opens a process's files to the same user only. The token shows that the process was not
just named by a stranger, and which memory is granted stands in its own file, not in the opening.
"Bytes, then count" rests on x86: stores become visible in program order, and the note is sent after
the copy. One poll copies at most two batches' bytes, or one larger write.
"""

import fcntl
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.kv_layout import Offsets
from disagg.shared_memory import SharedMemory
from disagg.transfer.control import Connection
from disagg.transfer.interface import Memory, TransferError
from disagg.transfer.lease import HeldLease, Lease, OpenFile
from disagg.transfer.medium import Arrived, Bytes, Link, Medium
from disagg.transfer.wire import decode

#: Copied under one lock of the lease: two to four milliseconds. Smaller ones would cost more: the
#: lock, the note and a round of `poll` take a tenth of a millisecond.
BATCH_BYTES = 16 << 20
#: Tickets that a batch may have, however small they are.
MAX_RECORDS = 512
TOKEN_BYTES = 16
# The best of those tried with `tests/bench/bench_shm.py` (AMD EPYC, 2 cores):
#: Pages below this are copied many in one numpy call, which costs a copy more; others one by one.
SMALL_PAGE_BYTES = 4 << 10
#: Copied between two touches. A numpy call's temporary of this size stays in the cache.
STEP_BYTES = 256 << 10


class Extent(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where a region lies in the file that its process has open as `fd`. Of what is not granted, a
    source alone, there are no bytes."""

    fd: int
    fd_offset: int
    nbytes: int


class ShmMedium(Medium):
    """The memory to grant to peers. Tests put another `copy` here, to stop it half way."""

    name = "shm"

    def __init__(self) -> None:
        self.copy = copy_pages
        self.own: list[Extent] = []
        self.host = host_identity()

    def register(self, memory: Memory, view: Bytes) -> None:
        if memory.writable and memory.fd is None:
            raise TransferError("shm needs a file descriptor, got none; use a SharedMemory")
        granted = memory.nbytes if memory.writable else 0
        self.own.append(Extent(memory.fd or 0, memory.fd_offset, granted))

    def link(self, connection: Connection, arrived: Arrived) -> Link:
        return ShmLink(connection, arrived, self)

    def fits(self, info: bytes) -> bool:
        theirs = decode(info, _Info, "malformed opening of shm")
        lease = f"/proc/{theirs.pid}/fd/{theirs.lease}"
        return theirs.host == self.host and os.access(lease, os.R_OK)


class _Info(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """In the opening: who we are, and which of our files is the lease for this connection."""

    host: str
    pid: int
    lease: int
    token: bytes


class ShmLink(Link):
    """One connection's leases and mapped regions.

    A lease grants: the opening's token, then an `Extent` of each region.
    """

    def __init__(self, connection: Connection, arrived: Arrived, medium: ShmMedium) -> None:
        super().__init__(connection, arrived)
        self._medium = medium
        self.regions: list[Bytes] = []
        self.held_lease: HeldLease | None = None
        token = secrets.token_bytes(TOKEN_BYTES)
        self.lease = Lease(token + msgspec.msgpack.encode(medium.own))
        self.info = msgspec.msgpack.encode(_Info(medium.host, os.getpid(), self.lease.fd, token))

    def start(self, info: bytes) -> None:
        """Map what the peer grants."""
        if not self._medium.fits(info):
            raise TransferError(
                "shm cannot reach the peer: it is not on the same host or not in the same network"
                " namespace, or of another user or with other rights; start both nodes on one, as"
                " one user, or with --transport tcp"
            )
        theirs = decode(info, _Info, "malformed opening of shm")
        # Held open, it stays this process's: another one that gets the number is not seen.
        folder = os.open(f"/proc/{theirs.pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._map(theirs, f"/proc/self/fd/{folder}")
        finally:
            os.close(folder)
        self.connection.ready()

    def post(self) -> None:
        """Copy one batch, if the peer still lets us, and tell it."""
        lease = self.held_lease
        assert lease is not None, "jobs need the peer's regions, which came with its lease"
        if not lease.begin():
            raise TransferError("the peer took its memory back")
        records = self._copy_batch()
        lease.end()
        self.connection.send_note(msgspec.msgpack.encode(records))

    def take_note(self, data: bytes) -> None:
        for imm, count in decode(data, list[tuple[int, int]], "malformed note of shm"):
            self.arrived(imm, count)

    def revoke(self) -> None:
        if self.held_lease is not None:
            self.held_lease.close()
        self.lease.revoke()

    def is_fenced(self) -> bool:
        return self.lease.is_free()

    def close(self) -> None:
        self.revoke()
        self.lease.close()

    def _copy_batch(self) -> list[tuple[int, int]]:
        """Copy writes from the front of the jobs, at least one; (imm, count) of each job."""
        records: list[tuple[int, int]] = []
        budget = BATCH_BYTES
        while self.jobs and budget > 0 and len(records) < MAX_RECORDS:
            nbytes = self.jobs[0].pages.page_bytes
            job, *offsets = self.take(max(1, budget // nbytes))
            self._medium.copy(job.source, self.regions[job.pages.destination], nbytes, offsets)
            budget -= nbytes * len(offsets[0])
            records.append((job.imm, len(offsets[0])))
        return records

    def _map(self, theirs: _Info, files: str) -> None:
        self.held_lease = lease = HeldLease(f"{files}/{theirs.lease}")
        if (uid := os.fstat(lease.fd).st_uid) != (ours := os.getuid()):
            raise TransferError(f"expected one user on both sides; ours is {ours}, got {uid}")
        grant = lease.read_grant()
        if not secrets.compare_digest(grant[:TOKEN_BYTES], theirs.token):
            raise TransferError("the peer's lease holds another token than its opening")
        granted = decode(grant[TOKEN_BYTES:], list[Extent], "malformed grant of shm")
        self.regions = [_map_region(files, extent) for extent in granted]
        self.region_bytes = [region.nbytes for region in self.regions]


def copy_pages(source: Bytes, target: Bytes, page_bytes: int, offsets: Sequence[Offsets]) -> None:
    """Copy `page_bytes` from each of the first `offsets` to the one beside it in the second; all of
    them lie inside the regions.

    source  | . | 2 | . | 0 | 1 |     offsets[0]  [3, 4, 1] * page_bytes
                  |       |   |
    target  | 1 | . | 0 | . | 2 |     offsets[1]  [2, 0, 4] * page_bytes

    Small pages take the fast path if their offsets are whole pages: there a page is one element, so
    that numpy gathers and scatters many in one call. The other path keeps Python's lock: callers
    bound how much they copy at once.
    """
    as_elements = page_bytes < SMALL_PAGE_BYTES and not any((o % page_bytes).any() for o in offsets)
    step = max(1, STEP_BYTES // page_bytes)
    from_view, to_view = source.data, target.data  # quicker to slice than numpy
    for first in range(0, len(offsets[0]), step):
        starts, ends = (o[first : first + step] for o in offsets)
        # One byte of each page, all at once: the cache and page-table misses that every page starts
        # with overlap here, instead of stopping the copy once for each page.
        _ = source[starts], target[ends]
        if as_elements:
            sources, destinations = (_as_pages(r, page_bytes) for r in (source, target))
            destinations[ends // page_bytes] = sources[starts // page_bytes]
            continue
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            to_view[end : end + page_bytes] = from_view[start : start + page_bytes]


def host_identity() -> str:
    """Equal for two processes that can open each other's files: same boot, network, user.

    A container is a host of its own here, unless it shares the network, process and user spaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid", "user"))
    return "/".join(map(str, (boot, *spaces, os.getuid())))


def _map_region(files: str, extent: Extent) -> Bytes:
    """Map a peer's file after checking what was said of it: a short file is a SIGBUS."""
    if not extent.nbytes:
        return np.empty(0, np.uint8)
    with OpenFile(f"{files}/{extent.fd}", os.O_RDWR) as file:
        if not fcntl.fcntl(file.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferError("the peer's memory could shrink; expected a sealed memfd")
        file_bytes, end = os.fstat(file.fd).st_size, extent.fd_offset + extent.nbytes
        if not 0 <= extent.fd_offset < end <= file_bytes:
            raise TransferError(
                f"the peer granted a region outside its memory of {file_bytes} bytes: {extent}"
            )
        with SharedMemory(file_bytes, fd=os.dup(file.fd)) as memory:
            return memory.bytes[extent.fd_offset : end]


def _as_pages(region: Bytes, page_bytes: int) -> npt.NDArray[np.void]:
    whole = region.nbytes // page_bytes * page_bytes
    return region[:whole].view(np.dtype((np.void, page_bytes)))
