"""One place to wait: file descriptors with a handler each, a timeout, and a wake from any thread.

watch(fd, events, handler) --> epoll --wait(timeout)--> handler(events)
wake() --> eventfd ------------^
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from disagg.resource import Descriptor

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
EDGE_TRIGGERED = select.EPOLLET

#: Takes the events that epoll reports: `READABLE`, `WRITABLE`, or an error or hang-up beside them.
Handler = Callable[[int], object]


class Waiter(Descriptor):
    """All calls but `wake` belong to one thread. Its own `fd` is what wakes it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._wake_lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self.fd, READABLE, lambda _events: os.eventfd_read(self.fd))

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call `handler` when `fd` has some of `events` (0: errors only); again: change them."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Before closing `fd`. Unknown: no-op."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close_socket(self, watched: socket.socket | None) -> None:
        """Unwatch and close. None, or closed already: no-op."""
        if watched is not None and watched.fileno() >= 0:
            self.unwatch(watched.fileno())
            watched.close()

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for one event or more, then call their handlers."""
        if 0.0 < timeout < 1e-3:
            # epoll counts whole milliseconds and would round this up.
            time.sleep(timeout)
            timeout = 0.0
        for fd, events in self._epoll.poll(timeout):
            handler = self._handlers.get(fd)
            if handler is not None:  # else an earlier handler of this round closed it
                handler(events)

    def wake(self) -> None:
        """End the `wait` of now, or the next one. From any thread; after `close`: no-op."""
        with self._wake_lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close what is its own; watched descriptors are their owners'. May be called twice."""
        with self._wake_lock:
            super().close()
        self._epoll.close()
