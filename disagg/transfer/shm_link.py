"""The Unix socket between two shm engines: it carries descriptors once, then notifications.

    connected by TCP                            accepted by TCP
      |<------- opening: token A, name ------------|  name: abstract, random, for one connection
      |-------- opening: token B ----------------->|  (openings travel on the control connection)
      |== Unix: token A, extents + lease, fds ====>|
      |<= Unix: token B, extents + lease, fds =====|  each maps the other's memory: ready
      |<======= (imm, count), ... either way =====>|  sent after the copy

The tokens bind the two connections; SO_PEERCRED must show our own user. A name that cannot be
reached means another host or network namespace. How to copy is the medium's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from disagg.shared_memory import SharedMemory
from disagg.transfer.control import Control
from disagg.transfer.interface import Peer, Ticket, WritesDone
from disagg.transfer.lease import HeldLease, Lease
from disagg.transfer.medium import MAX_REGIONS, Arrived, Bytes, Job, Link, LinkError, decode
from disagg.transfer.waiter import READABLE, WRITABLE

#: Keeps the borders of packets, and does not block.
_PACKETS = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
_MAX_INTRODUCTION_BYTES = 64 << 10
_RECORD = struct.Struct("=II")
_MAX_RECORDS = 512
#: Packets read from one peer in one poll.
_MAX_PACKETS = 512


class Extent(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where a region lies in the file of its descriptor; `file_bytes` is the whole file."""

    file_bytes: int
    fd_offset: int
    nbytes: int


class _Info(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """In the opening: what the other side must say on the Unix socket, and where (who accepts).

    `host` is the same for two processes that can meet there, see `host_identity`.
    """

    token: bytes
    name: str | None
    host: str


class _Introduction(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """First packet on the Unix socket. With it travel the lease and a descriptor per region."""

    token: bytes
    regions: list[Extent]


@dataclass(kw_only=True, eq=False)
class Note:
    """A notification to send (none for `count` 0), and the event that its sending completes."""

    imm: int
    count: int
    end: WritesDone | None = None


class ShmLink(Link):
    """One connection's Unix socket, leases and mapped regions.

    `own` lists the memory to pass: (descriptor, extent). `copy_batch(jobs, regions)` copies about a
    millisecond's worth from the front of the jobs and says what to tell the peer.
    """

    path = "Unix socket"

    def __init__(
        self,
        control: Control,
        peer: Peer,
        own: list[tuple[int, Extent]],
        arrived: Arrived,
        *,
        copy_batch: Callable[[deque[Job], list[Bytes]], list[Note]],
        outgoing: bool,
    ) -> None:
        super().__init__(control, peer)
        self.regions: list[Bytes] = []
        self.notes: deque[Note] = deque()
        self.held_lease: HeldLease | None = None
        self._own = own
        self._arrived = arrived
        self._copy_batch = copy_batch
        self._token = secrets.token_bytes(16)
        self._their_token = b""
        self._unix: socket.socket | None = None
        self._blocked = False
        self._listener: socket.socket | None = None
        name = None
        if not outgoing:
            name = f"disagg-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, _PACKETS)
            self._listener.bind(f"\0{name}")
            self._listener.listen(8)
        self._host = host_identity()
        self.info = msgspec.msgpack.encode(_Info(self._token, name, self._host))

    def fits(self, info: bytes) -> bool:
        try:
            return decode(info, _Info, "opening of shm").host == self._host
        except LinkError:
            return False

    def start(self, info: bytes) -> None:
        """Dial the peer's Unix socket, or wait for its call on ours."""
        theirs = decode(info, _Info, "opening of shm")
        self._their_token = theirs.token
        if self._listener is not None:
            fd = self._listener.fileno()
            self.control.waiter.watch(fd, READABLE, lambda _: self.guard(self._accept))
            return
        if theirs.name is None:
            raise LinkError("malformed opening of shm: expected the name of a Unix socket")
        self._unix = unix = socket.socket(socket.AF_UNIX, _PACKETS)
        try:
            unix.connect(f"\0{theirs.name}")
        except OSError as error:
            raise LinkError(
                f"cannot reach the peer's Unix socket ({error.strerror}): it is not on the same"
                " host or not in the same network namespace; start both nodes on one"
            ) from error
        if (uid := _uid_of(unix)) != os.getuid():
            raise LinkError(f"shm needs one user on both sides; ours is {os.getuid()}, got {uid}")
        self._watch()
        self._introduce()

    def post(self) -> None:
        """Copy one batch, if the peer still lets us."""
        lease = self.held_lease
        assert lease is not None, "jobs need the peer's regions, which came with its lease"
        if not lease.begin():
            self.control.close_peer(self.peer, "the peer took its memory back")
            return
        try:
            self.notes += self._copy_batch(self.jobs, self.regions)
        finally:
            lease.end()

    def end(self, ticket: Ticket) -> None:
        self.notes.append(Note(imm=0, count=0, end=WritesDone(ticket=ticket)))

    def take_ended(self) -> list[WritesDone]:
        """Send notes: a ticket ends when its last one is sent."""
        self.guard(self._send_notes)
        return super().take_ended()

    def take_arrivals(self) -> None:
        if self._unix is not None and self.held_lease is not None:
            self.guard(self._receive_notes)

    def close(self) -> None:
        self.control.waiter.close_socket(self._listener)
        self.control.waiter.close_socket(self._unix)
        self._unix = self._listener = None
        if self.held_lease is not None:
            self.held_lease.close()

    def _accept(self) -> None:
        assert self._listener is not None, "watched only while it is there"
        unix, _ = self._listener.accept()
        unix.setblocking(False)
        if _uid_of(unix) != os.getuid():
            unix.close()  # a stranger found the name; go on waiting for our peer
            return
        self.control.waiter.close_socket(self._listener)
        self._listener = None
        self._unix = unix
        self._watch()

    def _watch(self) -> None:
        assert self._unix is not None, "watched only while it is there"
        events = READABLE | (WRITABLE if self._blocked else 0)
        self.control.waiter.watch(self._unix.fileno(), events, self._on_unix)

    def _on_unix(self, events: int) -> None:
        if events & WRITABLE:
            self._blocked = False
            self._watch()
        if events & ~WRITABLE:
            introduced = self.held_lease is not None
            self.guard(self._receive_notes if introduced else self._receive_introduction)

    def _introduce(self) -> None:
        assert self._unix is not None, "introduced on an open socket"
        self.lease = Lease()
        introduction = _Introduction(self._their_token, [extent for _, extent in self._own])
        fds = [self.lease.fd, *(fd for fd, _ in self._own)]
        socket.send_fds(self._unix, [msgspec.msgpack.encode(introduction)], fds)

    def _receive_introduction(self) -> None:
        assert self._unix is not None, "watched only while it is there"
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
        if self.lease is None:
            self._introduce()
        self.control.ready(self.peer)

    def _receive_notes(self) -> None:
        assert self._unix is not None, "watched only while it is there"
        for _ in range(_MAX_PACKETS):
            try:
                packet = self._unix.recv(_MAX_RECORDS * _RECORD.size + 1)
            except BlockingIOError:
                return
            if not packet:
                self.control.waiter.unwatch(self._unix.fileno())
                self.control.close_after_reading(self.peer, "the peer closed the Unix socket")
                return
            if len(packet) % _RECORD.size:
                raise LinkError(
                    f"malformed notification of {len(packet)} bytes; expected {_RECORD.size} each"
                )
            for imm, count in _RECORD.iter_unpack(packet):
                self._arrived(imm, count)

    def _send_notes(self) -> None:
        while self.notes:
            batch = list(islice(self.notes, _MAX_RECORDS))
            packet = b"".join(_RECORD.pack(note.imm, note.count) for note in batch if note.count)
            if packet:
                assert self._unix is not None, "only a ready link has copies to tell of"
                try:
                    self._unix.send(packet, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    self._blocked = True
                    self._watch()
                    return
            for note in batch:
                self.notes.popleft()
                if note.end is not None:
                    self.ended.append(note.end)


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
