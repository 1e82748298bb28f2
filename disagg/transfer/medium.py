"""What a transfer engine needs of what moves the bytes: a medium, and of it a link for each peer.

    Medium      once an engine: its memory                   name: how the opening calls it
      | link()
    Link        once a connection:  info --opening--> start(their info) --> connection.ready()
                post(), settle() ... revoke(), is_fenced(), close()

A link takes writes from the front of its `jobs`, in order: those can no longer be withdrawn. A job
that has no more waits in `out` until none of its writes is `under_way`; then its ticket ends.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.kv_layout import Offsets
from disagg.transfer.control import Connection
from disagg.transfer.interface import Memory, Pages, Ticket, TransferError

Bytes = npt.NDArray[np.uint8]
#: Counts what the peer wrote: an immediate, and how many writes came with it.
Arrived = Callable[[int, int], None]


class Job(msgspec.Struct, kw_only=True, eq=False):
    """The writes of a ticket, of which `num_posted` are out. `source` has the bytes of the source
    region; every offset was checked. `under_way`: chains or frames that still read them."""

    ticket: Ticket
    pages: Pages
    source: Bytes
    imm: int
    num_posted: int = 0
    under_way: int = 0

    @property
    def num_left(self) -> int:
        """Writes that are not out yet."""
        return len(self.pages.source_offsets) - self.num_posted


class Link(ABC):
    """One connection's path for writes. Every failure ends the connection.

    `info` is for our opening. `region_bytes`: sizes of the peer's regions, known once ready; 0 for
    one that it does not let us write to. `jobs` wait to be posted, those `out` for their end.
    """

    def __init__(self, connection: Connection, arrived: Arrived) -> None:
        self.connection = connection
        self.waiter = connection.control.waiter
        self.arrived = arrived
        self.info = b""
        self.jobs: deque[Job] = deque()
        self.out: list[Job] = []
        self.region_bytes: list[int] = []

    @abstractmethod
    def start(self, info: bytes) -> None:
        """The peer's opening is here: build the path, then `connection.ready`."""

    def can_post(self) -> bool:
        """Whether `post` would move something now."""
        return bool(self.jobs)

    @abstractmethod
    def post(self) -> None:
        """Move a bounded amount of what `take` gives."""

    def take(self, most: int) -> tuple[Job, Offsets, Offsets]:
        """The first job, and the offsets of its next writes, at most `most`: they are out now."""
        job = self.jobs[0]
        some = slice(job.num_posted, job.num_posted + most)
        offsets = job.pages.source_offsets[some], job.pages.destination_offsets[some]
        job.num_posted += len(offsets[0])
        if not job.num_left:
            self.out.append(self.jobs.popleft())
        return job, *offsets

    def settle(self) -> list[Job]:
        """Jobs that are out and whose source is read no more, each returned once."""
        ended = [job for job in self.out if not job.under_way]
        self.out = [job for job in self.out if job.under_way]
        return ended

    def take_note(self, data: bytes) -> None:
        """What the peer's link said by `connection.send_note`."""
        raise TransferError(f"a note of {len(data)} bytes, which this transport does not know")

    def revoke(self) -> None:
        """The connection ended: count what the peer wrote before, if there is more to read, let
        nothing new land here, and read no source any more."""
        self.close()

    def is_fenced(self) -> bool:
        """After `revoke`: whether nothing of the peer can land any more."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. May be called twice."""


class Medium(ABC):
    """A way to move bytes, once in each engine."""

    #: Its name in openings and for `--transport`.
    name: ClassVar[str]

    @abstractmethod
    def register(self, memory: Memory, view: Bytes) -> None:
        """One more region; `view` is its bytes. TransferError if it cannot be reached this way."""

    @abstractmethod
    def link(self, connection: Connection, arrived: Arrived) -> Link:
        """A link for a new connection. OSError."""

    def fits(self, info: bytes) -> bool:
        """Whether a peer with this opening can be reached; asked if there is another way.
        TransferError for what no peer says."""
        return bool(info)

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Give back what is held, after all links. May be called twice."""
