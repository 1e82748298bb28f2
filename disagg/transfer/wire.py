"""TCP sockets that never block, frames over them, and the first frame each way: the opening.

    framed(data) --> unsent --flush()--> socket --read()--> received --take(limit)--> frame

    frame    | length, u32; the top bit marks a note | bytes |            all little endian
    opening  | magic, 8 bytes | version, u32 | msgpack {transport: info, ...}, or {JOIN: key} |
             '---- the same in every version ----'       info: the link's own bytes

What goes wrong is an OSError, or a TransferError that names the other side.
"""

import errno
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from disagg.transfer.interface import TransferError

#: Read from one socket at once.
READ_BYTES = 256 << 10
#: What a peer that does not read may leave with us before it counts as dead.
MAX_UNSENT_BYTES = 64 << 20
MAX_OPENING_BYTES = 64 << 10

#: Stands for a transport in the opening of a connection that joins another one, with its key.
JOIN = "join"
#: What to do about a connection that does not come up.
CHECK = "check host and port, and that the node there has said that it listens"

_LENGTH = struct.Struct("<I")
_NOTE = 1 << 31
_MAGIC = b"disagg\x00\x01"
_VERSION = 2
_PREFIX = _MAGIC + _VERSION.to_bytes(4, "little")

_Kind = TypeVar("_Kind")


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket that does not block. TransferError if the port is taken."""
    try:
        family, address = resolve(host, port)
        both = family == socket.AF_INET6  # "::" is every address, also of IPv4
        listener = socket.create_server(address, family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        raise TransferError(
            f"cannot listen on {host}:{port}: {reason_of(error)};"
            " choose another with --listen, or port 0"
        ) from error
    listener.setblocking(False)
    return listener


def dial(family: int, address: tuple[str | int, ...]) -> socket.socket:
    """A socket that is connecting, or connected already. OSError."""
    dialling = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    code = dialling.connect_ex(address)
    if code not in (0, errno.EINPROGRESS):
        dialling.close()
        raise OSError(code, os.strerror(code))
    return dialling


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """First address of a host, IPv4 before IPv6 (many services listen on IPv4 alone). OSError, or
    UnicodeError for what can be no name: an empty label, or one of more than 63 characters."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, address


def reason_of(error: Exception) -> str:
    """For the middle of a sentence."""
    return getattr(error, "strerror", None) or str(error)


def framed(data: bytes, *, note: bool = False) -> bytes:
    """A frame."""
    return _LENGTH.pack(len(data) | _NOTE * note) + data


class Wire(msgspec.Struct, kw_only=True, eq=False):
    """One socket; `address` is the other side's, for people. `connected`: no longer connecting.
    `opened`: the other side's opening is here, or none is to come."""

    socket: socket.socket
    address: str
    connected: bool
    opened: bool = False
    received: bytearray = msgspec.field(default_factory=bytearray)
    unsent: bytearray = msgspec.field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def finish_connect(self) -> None:
        """epoll has something to say of a socket that is connecting."""
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and self.socket.getsockname() == self.socket.getpeername():
            # TCP lets a socket meet itself when the port it dials is also its own.
            code = errno.ECONNREFUSED
        if code:
            raise TransferError(f"cannot connect to {self.address}: {os.strerror(code)}; {CHECK}")
        self.connected = True

    def flush(self) -> None:
        """Send what the kernel takes now. TransferError if too much is left."""
        with suppress(BlockingIOError):  # the rest goes when epoll says so
            while self.connected and self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise TransferError(f"{self.address} does not read: {len(self.unsent)} bytes wait")

    def read(self, *, one_frame: bool = False) -> int:
        """Read once; number of bytes. `one_frame`: nothing beyond the first one. BlockingIOError if
        there is nothing, TransferError at the end."""
        wanted = READ_BYTES
        if one_frame:
            wanted = _LENGTH.size - len(self.received)
            if wanted <= 0:
                wanted += _LENGTH.unpack_from(self.received)[0] & ~_NOTE
        data = self.socket.recv(min(wanted, READ_BYTES))
        if not data:
            hint = "" if self.opened else f" before its opening; {CHECK}"
            raise TransferError(f"{self.address} closed the connection{hint}")
        self.received += data
        return len(data)

    def take(self, limit: int, *, notes_only: bool = False) -> tuple[bytes, bool] | None:
        """The first frame and whether it is a note, if it is here as a whole. Messages stay if
        `notes_only`, and what is behind them."""
        if len(self.received) < _LENGTH.size:
            return None
        (head,) = _LENGTH.unpack_from(self.received)
        length = head & ~_NOTE
        if notes_only and head == length:
            return None
        if not 1 <= length <= limit:
            raise TransferError(
                f"{self.address} sent a frame of {length} bytes; expected 1 to {limit};"
                " does a disagg node listen there?"
            )
        end = _LENGTH.size + length
        if len(self.received) < end:
            return None
        frame = bytes(self.received[_LENGTH.size : end])
        del self.received[:end]
        return frame, head != length


def opening(offers: dict[str, bytes]) -> bytes:
    """The frame that says what we offer: by transport, opaque (addresses, tokens); or to `JOIN`,
    with a key.

    Who is called takes the first transport of its own list that fits, and offers that one alone.
    """
    return framed(_PREFIX + msgspec.msgpack.encode(offers))


def decode_opening(frame: bytes, transports: Sequence[str]) -> dict[str, bytes]:
    """What a peer offers, one of `transports` or `JOIN` among it. TransferError says what is
    wrong."""
    if not frame.startswith(_MAGIC):
        raise TransferError("no opening of a disagg node; check host and port")
    version = int.from_bytes(frame[len(_MAGIC) : len(_PREFIX)], "little")
    if version != _VERSION:
        raise TransferError(f"control version {version}, ours is {_VERSION}; run the same on both")
    offers = decode(frame[len(_PREFIX) :], dict[str, bytes], "a malformed opening")
    if not offers.keys() & {JOIN, *transports}:
        theirs, ours = (", ".join(names)[:99] or "none" for names in (offers, transports))
        raise TransferError(
            f"an opening for transport {theirs}, ours is {ours}; give both the same --transport"
        )
    return offers


def decode(data: bytes, kind: type[_Kind], what: str) -> _Kind:
    """A peer's msgpack. TransferError says `what` is wrong with it."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise TransferError(f"{what}: {error}") from error
