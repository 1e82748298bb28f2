"""Frames over one TCP socket that never blocks: a u32 length (little endian) and that many bytes.

    framed(data) --> unsent --flush()--> socket --read()--> received --take(limit)--> frame

The top bit of a length marks a note. What goes wrong is a `WireError` that names the other side.
"""

import os
import socket
import struct
from dataclasses import dataclass, field

from disagg.transfer.sockets import reason_of

#: Read from one socket at once.
READ_BYTES = 256 << 10

#: What to do about a connection that does not come up.
CHECK = "check host and port, and that the node there has said that it listens"

_LENGTH = struct.Struct("<I")
_NOTE = 1 << 31


class WireError(Exception):
    """The connection is over; why, in words."""


def framed(data: bytes, *, note: bool = False) -> bytes:
    """A frame."""
    return _LENGTH.pack(len(data) | _NOTE * note) + data


@dataclass(kw_only=True, eq=False)
class Wire:
    """One socket; `address` is the other side's, for people. `connected`: no longer connecting."""

    socket: socket.socket
    address: str
    connected: bool
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    def finish_connect(self) -> None:
        """epoll has something to say of a socket that is connecting."""
        reason = os.strerror(code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        try:
            # TCP lets a socket meet itself when the port it dials is also its own.
            if code == 0 and self.socket.getsockname() == self.socket.getpeername():
                code, reason = 1, "nobody listens there"
        except OSError as error:  # reset since we asked
            code, reason = 1, reason_of(error)
        if code:
            raise WireError(f"cannot connect to {self.address}: {reason}; {CHECK}")
        self.connected = True

    def flush(self) -> None:
        """Send what the kernel takes now."""
        try:
            while self.connected and self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass  # the rest goes when epoll says so
        except (BrokenPipeError, ConnectionResetError):
            self.unsent.clear()  # the reader ends it, after what the peer said at last
        except OSError as error:
            raise WireError(f"connection to {self.address} broke: {reason_of(error)}") from error

    def read(self, *, one_frame: bool = False) -> bool:
        """Read once; whether there was something. `one_frame`: nothing beyond the first one."""
        wanted = READ_BYTES
        if one_frame:
            wanted = _LENGTH.size - len(self.received)
            if wanted <= 0:
                wanted += _LENGTH.unpack_from(self.received)[0] & ~_NOTE
        try:
            data = self.socket.recv(wanted)
        except BlockingIOError:
            return False
        except OSError as error:
            raise WireError(f"connection to {self.address} broke: {reason_of(error)}") from error
        if not data:
            hint = f" before its opening; {CHECK}" if one_frame else ""
            raise WireError(f"{self.address} closed the connection{hint}")
        self.received += data
        return True

    @property
    def has_note(self) -> bool:
        """Whether the first frame, or what is here of it, is a note."""
        head = self.received[: _LENGTH.size]
        return len(head) == _LENGTH.size and bool(_LENGTH.unpack(head)[0] & _NOTE)

    def take(self, limit: int) -> tuple[bytes, bool] | None:
        """The first frame and whether it is a note, if it is here as a whole."""
        if len(self.received) < _LENGTH.size:
            return None
        (head,) = _LENGTH.unpack_from(self.received)
        length = head & ~_NOTE
        if not 1 <= length <= limit:
            raise WireError(
                f"{self.address} sent a frame of {length} bytes; expected 1 to {limit};"
                " does a disagg node listen there?"
            )
        end = _LENGTH.size + length
        if len(self.received) < end:
            return None
        frame = bytes(self.received[_LENGTH.size : end])
        del self.received[:end]
        return frame, head != length
