"""Addresses and listening sockets of TCP, with errors that say what to do."""

import errno
import os
import socket
from typing import Any

from disagg.transfer.interface import TransferError

#: Connections that wait for our `accept`.
BACKLOG = 128


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket that does not block. TransferError if the port is taken."""
    try:
        family, address = resolve(host, port)
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise TransferError(
            f"cannot listen on {host}:{port}: {reason_of(error)};"
            " choose another with --listen, or port 0"
        ) from error
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
    """First address of a host, IPv4 before IPv6 (many services listen on IPv4 alone). OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one of more than 63 characters
        raise OSError(errno.EINVAL, "not a host name") from error
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, address


def reason_of(error: OSError) -> str:
    """For the middle of a sentence."""
    return error.strerror or str(error)
