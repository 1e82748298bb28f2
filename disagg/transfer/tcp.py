"""Transfer engine for any two hosts: pages travel on a TCP connection beside the messages.

    jobs of a peer --frame--> sendmsg from the pages ==TCP==> recvmsg into the pages --> count
                                 |
    WritesDone <-- the kernel took all
    PeerLost --> the data connection is closed and nobody reads it any more --> PeerFenced

The data connection of two engines is `tcp_link.py`, its frames `tcp_frames.py`, all that is not
about bytes `queued_engine.py`. Here: the listener for data connections, and who it lets in.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from disagg.transfer.control import MAX_OPENING_CONNECTIONS, Control
from disagg.transfer.interface import Memory, Peer
from disagg.transfer.medium import Arrived, Bytes, Medium
from disagg.transfer.queued_engine import QueuedEngine
from disagg.transfer.sockets import open_listener
from disagg.transfer.tcp_link import TOKEN_BYTES, Send, TcpLink
from disagg.transfer.waiter import READABLE


def send_buffers(data: socket.socket, buffers: list[memoryview]) -> int:
    """How many bytes the kernel took. BlockingIOError if none."""
    return data.sendmsg(buffers, (), socket.MSG_NOSIGNAL)


class TcpTransferEngine(QueuedEngine):
    """See `interface.py`. Memory needs no descriptor."""

    #: Here so that tests can stop a process in the middle of a frame.
    _send = staticmethod(send_buffers)

    def _make_media(self) -> list[Medium]:
        return [TcpMedium(self._send)]


@dataclass(kw_only=True, eq=False)
class _Stranger:
    """A data connection whose token is not here yet."""

    socket: socket.socket
    deadline: float
    token: bytes = b""


class TcpMedium(Medium):
    """The memory that peers may write to, and one listener for their data connections."""

    name = "tcp"

    def __init__(self, send: Send = send_buffers) -> None:
        self._send = send
        self._regions: list[Bytes] = []
        self._listener: socket.socket | None = None
        self._links: dict[bytes, TcpLink] = {}  # by token, until their connection is here
        self._strangers: list[_Stranger] = []  # in the order of their deadlines

    def register(self, memory: Memory, view: Bytes) -> None:
        self._regions.append(view)

    def listen(self, control: Control, host: str) -> None:
        self._listener = open_listener(host, 0)
        control.waiter.watch_listener(self._listener, lambda data, _: self._meet(control, data))

    def link(self, control: Control, peer: Peer, arrived: Arrived, *, outgoing: bool) -> TcpLink:
        port = None
        if not outgoing:
            assert self._listener is not None, "whoever accepts listens"
            port = self._listener.getsockname()[1]
        return TcpLink(control, peer, self._regions, arrived, self._send, port, self._links)

    def look(self, control: Control) -> None:
        """End data connections that are silent for too long."""
        while self._strangers and self._strangers[0].deadline <= control.clock():
            self._dismiss(control, self._strangers[0]).close()

    def close(self, control: Control) -> None:
        while self._strangers:
            self._dismiss(control, self._strangers[0]).close()
        control.waiter.close_socket(self._listener)
        self._regions = []

    def _meet(self, control: Control, data: socket.socket) -> None:
        stranger = _Stranger(socket=data, deadline=control.opening_deadline())
        self._strangers.append(stranger)
        control.waiter.watch(data.fileno(), READABLE, lambda _: self._hear(control, stranger))
        if len(self._strangers) > MAX_OPENING_CONNECTIONS:
            self._dismiss(control, self._strangers[0]).close()

    def _hear(self, control: Control, stranger: _Stranger) -> None:
        """Take some of the token; once whole, it names the link, or nobody's."""
        try:
            more = stranger.socket.recv(TOKEN_BYTES - len(stranger.token))
        except BlockingIOError:
            return
        except OSError:
            more = b""  # it is gone, like at the end of the stream
        stranger.token += more
        if more and len(stranger.token) < TOKEN_BYTES:
            return
        data, link = self._dismiss(control, stranger), self._links.get(stranger.token)
        if link is None:
            data.close()
        else:
            link.take(data)

    def _dismiss(self, control: Control, stranger: _Stranger) -> socket.socket:
        """No stranger any more; its connection."""
        self._strangers.remove(stranger)
        control.waiter.unwatch(stranger.socket.fileno())
        return stranger.socket
