"""The transfer engine contract: one-sided writes with immediates, and messages beside them.

         writer                                             owner of the memory
    write_pages(peer, pages, imm)   == bytes, then imm ==>  expect(peer, imm, count)
         poll() -> WritesDone(ticket)                       poll() -> ImmReached(imm)
         send(peer, bytes)          ------ message ------>  poll() -> MessageReceived

Reliable but UNORDERED: two writes, or a write and a message, may arrive in any order. What is
promised: an immediate is counted only after the bytes of its write are visible, and each posted
write is counted exactly once. Messages to one peer keep their order among themselves.

One thread owns an engine and makes every call but `wake()`. Nothing calls back: what happened is
what `poll()` returns. Here is what goes in and comes out; the calls are in `transfer_engine.py`, on
top of `control.py`. Bytes move over `shm.py` (same host), `verbs.py` (RDMA), `tcp.py` (any two), or
several. All pass `tests/test_transfer_conformance.py`.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from disagg.kv_layout import Offsets

#: A connection. Numbers are never used twice by one engine: a restarted process is another peer.
Peer = int
#: Names the writes of one `write` or `write_pages` call. Never used twice by one engine.
Ticket = int
#: An immediate is a u32.
MAX_IMM = 2**32 - 1


class TransferError(ValueError):
    """A transfer could not be set up or posted: what, expected and got, what to do."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """`nbytes` at `address` of this process; the same bytes lie at `fd_offset` of `fd`, if any.

    Not `writable`: a source for writes alone. Whoever connects may write to writable memory from
    the first moment on, so make only that writable which waits for writes.
    """

    address: int
    nbytes: int
    fd: int | None = None
    fd_offset: int = 0
    device: str = "cpu"
    writable: bool = True


class MemoryRegion(msgspec.Struct, frozen=True, kw_only=True):
    """Registered memory. Its number is all that a connected peer needs to write into it."""

    memory: Memory
    descriptor: int


class Pages(NamedTuple):
    """Writes of `page_bytes`, from each source offset of our region `source` to the offset beside
    it in the peer's region `destination`, its descriptor. Offsets are bytes: int64 `[num_writes]`.
    """

    source: MemoryRegion
    destination: int
    page_bytes: int
    source_offsets: Offsets
    destination_offsets: Offsets


class WritesDone(msgspec.Struct, frozen=True, kw_only=True):
    """Every write of the ticket completed: its source bytes will not be read again."""

    ticket: Ticket


class ImmReached(msgspec.Struct, frozen=True, kw_only=True):
    """As many writes with this immediate as expected have arrived; said once per `expect`."""

    imm: int


class MessageReceived(msgspec.Struct, frozen=True, kw_only=True):
    """A message. The first one of an unknown `peer` is how an accepted connection shows itself."""

    peer: Peer
    data: bytes


class PeerLost(msgspec.Struct, frozen=True, kw_only=True):
    """The connection is over; said once for each, also of a caller that never spoke.

    No write of ours to it reads its source any more; its open tickets end without an event of their
    own. What it posted may still land HERE until `PeerFenced`.
    """

    peer: Peer
    why: str


class PeerFenced(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of this lost peer can land in our memory any more. Follows its `PeerLost`."""

    peer: Peer


Event = WritesDone | ImmReached | MessageReceived | PeerLost | PeerFenced


def check_offsets(what: str, offsets: Offsets, page_bytes: int, region_bytes: int) -> None:
    """Every page lies inside the region, or TransferError names the first that does not."""
    wrong = np.flatnonzero((offsets < 0) | (offsets > region_bytes - page_bytes))
    if wrong.size:
        raise TransferError(
            f"{what} offset {offsets[wrong[0]]}: {page_bytes} bytes there leave the region of"
            f" {region_bytes} bytes; expected 0 to {region_bytes - page_bytes}. Nothing was written"
        )
