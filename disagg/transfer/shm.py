"""Two processes of one host: the writer copies into the destination's memory, which it has mapped.

    who connects                                who is called
      |-------- opening: token A, host ----------->|  (openings travel on the control connection)
      |<------- opening: token B, host, name ------|  name: abstract, random, for one connection
      |== Unix: token B, extents + lease, fds ====>|
      |<= Unix: token A, extents + lease, fds =====|  each maps the other's memory: ready

    jobs of a peer --one batch a poll--> copy to its mapped memory, under its lease
    WritesDone <--'--> note (imm, count), ... on the control connection
    PeerLost --> our lease revoked --> the peer's last batch is over, or it died --> PeerFenced

The Unix socket carries descriptors once and is closed. The tokens bind it to the control
connection; SO_PEERCRED must show our own user. A name that cannot be reached means another host or
network namespace. "Bytes, then count" rests on x86: stores become visible in program order, and the
note is sent after the copy. One poll copies at most two batches' bytes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from disagg.kv_layout import Offsets
from disagg.shared_memory import SharedMemory
from disagg.transfer.bounds import check_offsets
from disagg.transfer.interface import Memory, TransferError
from disagg.transfer.lease import HeldLease, Lease
from disagg.transfer.medium import (
    MAX_REGIONS,
    Bytes,
    Connection,
    Job,
    Link,
    LinkError,
    Medium,
    decode,
)
from disagg.transfer.page_copy import copy_pages
from disagg.transfer.waiter import READABLE

#: Copied under one lock of the lease: about a millisecond.
BATCH_BYTES = 4 << 20
#: Tickets that a batch may have, however small they are.
MAX_RECORDS = 512

#: Keeps the borders of packets, and does not block.
_PACKETS = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
_MAX_INTRODUCTION_BYTES = 64 << 10
_RECORD = struct.Struct("=II")

#: As `copy_pages`.
Copy = Callable[[Bytes, Bytes, int, Offsets, Offsets], None]


class Extent(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where a region lies in the file of its descriptor; `file_bytes` is the whole file."""

    file_bytes: int
    fd_offset: int
    nbytes: int


class ShmMedium(Medium):
    """The memory to pass to peers: (descriptor, extent). `copy` is there for tests that stop it."""

    name = "shm"

    def __init__(self, copy: Copy = copy_pages) -> None:
        self.copy = copy
        self.own: list[tuple[int, Extent]] = []
        self.host = host_identity()

    def register(self, memory: Memory, view: Bytes) -> None:
        if memory.fd is None:
            raise TransferError(
                "shm needs memory with a file descriptor, got none; allocate it as SharedMemory"
            )
        extent = Extent(os.fstat(memory.fd).st_size, memory.fd_offset, memory.nbytes)
        offset = np.array([memory.fd_offset])
        check_offsets("memory", offset, memory.nbytes, extent.file_bytes)
        self.own.append((memory.fd, extent))

    def link(self, connection: Connection) -> Link:
        return ShmLink(connection, self)

    def fits(self, info: bytes) -> bool:
        try:
            return decode(info, _Info, "opening of shm").host == self.host
        except LinkError:
            return False


class _Info(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """In the opening: what the other side must say on the Unix socket, and where (who is called).

    `host` is the same for two processes that can meet there, see `host_identity`.
    """

    token: bytes
    name: str | None
    host: str


class _Introduction(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The one packet on the Unix socket. With it travel the lease and a descriptor per region."""

    token: bytes
    regions: list[Extent]


class ShmLink(Link):
    """One connection's leases and mapped regions."""

    path = "Unix socket"

    def __init__(self, connection: Connection, medium: ShmMedium) -> None:
        super().__init__(connection)
        self._medium = medium
        self._arrived = connection.arrived
        self.regions: list[Bytes] = []
        self.lease: Lease | None = None
        self.held_lease: HeldLease | None = None
        self._token = secrets.token_bytes(16)
        self._their_token = b""
        #: Who is called listens on it, until it is the connection.
        self._unix = socket.socket(socket.AF_UNIX, _PACKETS)
        name = None if self.outgoing else f"disagg-{secrets.token_hex(16)}"
        if name is not None:
            self._unix.bind(f"\0{name}")
            self._unix.listen(8)
        self.info = msgspec.msgpack.encode(_Info(self._token, name, medium.host))

    def start(self, info: bytes) -> None:
        """Dial the peer's Unix socket, or wait for its call on ours."""
        theirs = decode(info, _Info, "opening of shm")
        self._their_token = theirs.token
        if not self.outgoing:
            self._watch(self._accept)
            return
        if theirs.name is None:
            raise LinkError("malformed opening of shm: expected the name of a Unix socket")
        try:
            self._unix.connect(f"\0{theirs.name}")
        except OSError as error:
            raise LinkError(
                f"cannot reach the peer's Unix socket ({error.strerror}): it is not on the same"
                " host or not in the same network namespace; start both nodes on one"
            ) from error
        if (uid := _uid_of(self._unix)) != os.getuid():
            raise LinkError(f"shm needs one user on both sides; ours is {os.getuid()}, got {uid}")
        self._introduce()
        self._watch(self._meet)

    def post(self) -> None:
        """Copy one batch, if the peer still lets us, and tell it."""
        lease = self.held_lease
        assert lease is not None, "jobs need the peer's regions, which came with its lease"
        if not lease.begin():
            self.control.close_peer(self.peer, "the peer took its memory back")
            return
        try:
            records = self._copy_batch()
        finally:
            lease.end()
        if records:
            self.control.send_note(self.peer, b"".join(records))

    def take_note(self, data: bytes) -> None:
        if len(data) % _RECORD.size:
            raise LinkError(f"malformed note of {len(data)} bytes; expected {_RECORD.size} each")
        for imm, count in _RECORD.iter_unpack(data):
            self._arrived(imm, count)

    def revoke(self) -> None:
        self.control.waiter.close_socket(self._unix)
        if self.held_lease is not None:
            self.held_lease.close()
        if self.lease is not None:
            self.lease.revoke()

    def is_fenced(self) -> bool:
        return self.lease is None or self.lease.is_free()

    def close(self) -> None:
        self.revoke()
        if self.lease is not None:
            self.lease.close()

    def _copy_batch(self) -> list[bytes]:
        """Copy from the front of the jobs; (imm, count) of each that had a write completed."""
        records: list[bytes] = []
        budget = BATCH_BYTES
        while self.jobs and budget > 0 and len(records) < MAX_RECORDS:
            job = self.jobs[0]
            before = job.num_posted
            budget -= self._copy_some(job, budget)
            if count := job.num_posted - before:
                records.append(_RECORD.pack(job.imm, count))
            if job.is_posted:
                self.end(self.jobs.popleft().ticket)
        return records

    def _copy_some(self, job: Job, budget: int) -> int:
        """Copy whole writes for about `budget` bytes (or a part of a huge one); bytes copied."""
        if job.write_bytes > BATCH_BYTES:
            count, nbytes = 1, min(job.write_bytes - job.within, budget)
        else:
            count, nbytes = max(1, budget // job.write_bytes), job.write_bytes
        some = slice(job.num_posted, job.num_posted + count)
        sources = job.source_offsets[some] + job.within
        destinations = job.destination_offsets[some] + job.within
        self._medium.copy(self.regions[job.region], job.source, nbytes, destinations, sources)
        job.within += nbytes
        if job.within == job.write_bytes:
            job.within = 0
            job.num_posted += len(sources)
        return nbytes * len(sources)

    def _watch(self, step: Callable[[], None]) -> None:
        self.control.waiter.watch(self._unix.fileno(), READABLE, lambda _: self.guard(step))

    def _accept(self) -> None:
        unix, _ = self._unix.accept()
        unix.setblocking(False)
        if _uid_of(unix) != os.getuid():
            unix.close()  # a stranger found the name; go on waiting for our peer
            return
        self.control.waiter.close_socket(self._unix)
        self._unix = unix
        self._watch(self._meet)

    def _introduce(self) -> None:
        self.lease = Lease()
        own = self._medium.own
        introduction = _Introduction(self._their_token, [extent for _, extent in own])
        fds = [self.lease.fd, *(fd for fd, _ in own)]
        socket.send_fds(self._unix, [msgspec.msgpack.encode(introduction)], fds)

    def _meet(self) -> None:
        """Take the peer's introduction; ready, once it has ours."""
        packet, fds, flags, _ = socket.recv_fds(
            self._unix, _MAX_INTRODUCTION_BYTES, MAX_REGIONS + 1, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if not packet:
                raise LinkError("the peer closed the Unix socket")
            theirs = decode(packet, _Introduction, "introduction on the Unix socket")
            if not secrets.compare_digest(theirs.token, self._token):
                raise LinkError("the Unix socket was called with a wrong token")
            is_cut = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            if len(fds) != len(theirs.regions) + 1 or is_cut:
                raise LinkError(
                    f"the peer announced {len(theirs.regions)} regions and a lease, but passed"
                    f" {len(fds)} descriptors; is the limit of open files too low (ulimit -n)?"
                )
            self.regions = [
                _map_region(fd, extent) for fd, extent in zip(fds[1:], theirs.regions, strict=True)
            ]
            self.region_bytes = [region.nbytes for region in self.regions]
            self.held_lease = HeldLease(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        if not self.outgoing:
            self._introduce()
        self.control.waiter.close_socket(self._unix)
        self.control.ready(self.peer)


def host_identity() -> str:
    """Equal for two processes that can pass each other descriptors: same boot, network, user.

    A container is a host of its own here, unless it shares the network and user namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "user"))
    return "/".join(map(str, (boot, *spaces, os.getuid())))


def _uid_of(unix: socket.socket) -> int:
    credentials = unix.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _pid, uid, _gid = struct.unpack("=iII", credentials)
    return int(uid)


def _map_region(fd: int, extent: Extent) -> Bytes:
    """Map a passed descriptor after checking what was said of it: a short file is a SIGBUS."""
    status = os.fstat(fd)
    end = extent.fd_offset + extent.nbytes
    if not stat.S_ISREG(status.st_mode) or status.st_size != extent.file_bytes:
        raise LinkError(
            f"the peer announced memory of {extent.file_bytes} bytes and passed a descriptor of"
            f" {status.st_size} bytes"
        )
    try:
        sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        sealed = False
    if not sealed:
        raise LinkError("the peer passed memory that it could shrink; expected a sealed memfd")
    if not 0 <= extent.fd_offset < end <= extent.file_bytes:
        raise LinkError(f"the peer announced a region outside its memory: {extent}")
    with SharedMemory(extent.file_bytes, fd=os.dup(fd)) as memory:
        return memory.bytes[extent.fd_offset : end]
