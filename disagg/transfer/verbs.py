"""RDMA: the NIC writes pages into the peer's memory; no CPU copies, and the peer's is not asked.

    who connects                                  who is called
      |-- opening: NICs, regions with keys --------->|  (openings and notes travel on the control
      |<- opening: the same -------------------------|   connection)
      |-- note: our queue pairs -------------------->| connects its own to them, posts receives
      |<- note: its queue pairs ---------------------|
      |== first write, on every queue pair =========>| the way works, so the same in return
    ready <=========================== first write ==| ready

    post --> qp send queue --> NIC ==pages, imm==> NIC --> peer's memory, then cq --> arrived(imm)
    WritesDone <---- cq <---- NIC <-- acknowledged --'  (the peer's CPU did nothing for these bytes)

A program talks to its NIC through queues in memory. Into the send queue of a queue pair (qp) go
requests: write these bytes (an sge: address, length, lkey) to that address of the peer (with its
rkey), and give it this immediate. The NIC does it and answers in a completion queue (cq), by the
`wr_id` that we gave the request. A write's immediate uses up one of the receives that the peer
posted, and completes it. Memory is registered first (mr, memory region): that pins it and makes two
keys, `lkey` for our own requests and `rkey` for those of a peer. A reliable connection (RC, all we
use) loses and repeats nothing; the first error ends it, and the peer with it. With no receive left
the sender's NIC waits and asks again, so that costs time, never data.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from disagg.kv_layout import Offsets
from disagg.transfer import verbs_device
from disagg.transfer.control import Connection
from disagg.transfer.interface import Memory, TransferError
from disagg.transfer.medium import Arrived, Bytes, Job, Link, Medium
from disagg.transfer.verbs_device import Address, End, Nic, base_of
from disagg.transfer.waiter import READABLE
from disagg.transfer.wire import decode

MAX_NICS = 64
#: The first write of a queue pair is as long as the longest packet: does that fit the way?
FIRST_WRITE_BYTES = 4096
#: For what is posted on closing queue pairs to come back, which takes microseconds. Nothing else is
#: done meanwhile: several peers may be lost at once, and others must not find us silent.
FLUSH_SECONDS = 0.25

_NO_WAY = "; the way is not open: check GID or LID, the MTU of switches, firewalls (UDP 4791)"

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Depths(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue pair holds: `sends` on their way, and `receives` for what the peer writes before
    we look (two layers' pages; the queues of some NICs hold 4063). Both are posted in chains; of
    sends, only the last one reports its completion, for all of them."""

    sends: int = 2048
    send_chain: int = 512
    receives: int = 4000
    receive_chain: int = 1000


class Region(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Memory that a peer may write to: its address for a NIC, its size, and the rkey of each NIC of
    ours. Memory that is not granted has no bytes and no keys."""

    address: _Count
    nbytes: _Count
    rkeys: list[_Key]


class _Info(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """In the opening. First writes go into `probe`."""

    nics: Annotated[list[Address], msgspec.Meta(min_length=1, max_length=MAX_NICS)]
    regions: list[Region]
    probe: Region


class _Registered:
    """A region of ours, registered on each NIC."""

    def __init__(self, memory: Memory, nics: Sequence[Nic]) -> None:
        self.parts = [nic.register(memory) for nic in nics]
        self.base = base_of(memory)
        #: What a peer gets to know of it.
        granted = self.base, memory.nbytes, [part.rkey for part in self.parts]
        self.granted = Region(*granted) if memory.writable else Region(0, 0, [])


class VerbsMedium(Medium):
    """Every region is registered on every NIC. The NICs are the medium's from now on: it closes
    them."""

    name = "verbs"

    def __init__(self, nics: Sequence[Nic], depths: Depths | None = None) -> None:
        self.nics = nics
        self.depths = depths or Depths()
        self.regions: list[_Registered] = []
        self._first_bytes = np.zeros(FIRST_WRITE_BYTES, np.uint8)
        address = self._first_bytes.ctypes.data
        self.probe = _Registered(Memory(address=address, nbytes=FIRST_WRITE_BYTES), nics)

    def register(self, memory: Memory, view: Bytes) -> None:
        self.regions.append(_Registered(memory, self.nics))

    def link(self, connection: Connection, arrived: Arrived) -> Link:
        return VerbsLink(connection, arrived, self)

    def close(self) -> None:
        for nic in self.nics:
            nic.close()


class VerbsLink(Link):
    """One connection's queue pairs ("lanes"): number k joins our NIC k and the peer's NIC k, each
    modulo how many there are; there are as many lanes as the side with more NICs has."""

    def __init__(self, connection: Connection, arrived: Arrived, medium: VerbsMedium) -> None:
        super().__init__(connection, arrived)
        self.medium = medium
        self._lanes: list[_Lane] = []
        addresses = [nic.address for nic in medium.nics]
        granted = [region.granted for region in medium.regions]
        self.info = msgspec.msgpack.encode(_Info(addresses, granted, medium.probe.granted))

    # From the opening to ready.

    def start(self, info: bytes) -> None:
        """Make the queue pairs; if we connected, name them to the peer."""
        self.theirs = theirs = decode(info, _Info, "malformed opening of verbs")
        granted = [theirs.probe, *(region for region in theirs.regions if region.nbytes)]
        keys = {len(region.rkeys) for region in granted}
        if keys != {len(theirs.nics)} or theirs.probe.nbytes < FIRST_WRITE_BYTES:
            raise TransferError(f"the peer's opening grants what cannot be: {granted}")
        for number in range(max(len(self.medium.nics), len(theirs.nics))):
            lane = _Lane(self, number)
            self._lanes.append(lane)
            handler = partial(self.connection.guard, self._take, lane)
            self.waiter.watch(lane.qp.fd, READABLE, handler)
        if self.connection.outgoing:
            self._name_ends()

    def take_note(self, data: bytes) -> None:
        """The peer's end of each queue pair. Who was called names its own once they can receive."""
        ends = decode(data, list[End], "malformed note of verbs")
        if len(ends) != len(self._lanes):
            raise TransferError(f"expected {len(self._lanes)} queue pairs, got {len(ends)}: {ends}")
        for lane, end in zip(self._lanes, ends, strict=True):
            lane.connect(end)
            if self.connection.outgoing:
                self._probe(lane)
        if not self.connection.outgoing:
            self._name_ends()

    def _name_ends(self) -> None:
        ends = [End(lane.qp.qpn, lane.psn) for lane in self._lanes]
        self.connection.send_note(msgspec.msgpack.encode(ends))

    def _probe(self, lane: _Lane) -> None:
        """The first write. Its immediate is not counted: it is the first on its queue pair."""
        start = np.zeros(1, np.int64)
        lane.post(self.medium.probe, self.theirs.probe, (start, start), FIRST_WRITE_BYTES, 0)

    # Writes go out.

    def can_post(self) -> bool:
        return bool(self.jobs) and any(lane.room for lane in self._lanes)

    def post(self) -> None:
        """One chain on every queue pair that has room, the emptiest first."""
        job = self.jobs[0]
        source = self.medium.regions[job.pages.source.descriptor]
        target = self.theirs.regions[job.pages.destination]
        share = min(self.medium.depths.send_chain, -(-job.num_left // len(self._lanes)))
        for lane in sorted(self._lanes, key=lambda lane: lane.room, reverse=True):
            if not job.num_left or not lane.room:
                break
            _, *offsets = self.take(min(share, lane.room))
            lane.post(source, target, offsets, job.pages.page_bytes, job.imm)
            lane.chains.append((lane.posted, job))
            job.under_way += 1

    # Completions come in.

    def settle(self) -> list[Job]:
        for lane in self._lanes:
            self.connection.guard(self._take, lane)
        return super().settle()

    def _take(self, lane: _Lane, events: int = 0) -> None:
        """A bounded amount of what has completed on a queue pair. Ready once the first writes of
        both sides are through on all."""
        if events:
            lane.qp.rearm()
        if (failed := lane.take()) is not None:
            raise TransferError(lane.why(failed))
        while lane.chains and lane.chains[0][0] <= lane.returned:
            lane.chains.popleft()[1].under_way -= 1
        lane.replenish()
        if lane.heard and not lane.posted:
            self._probe(lane)
        through = all(lane.heard and lane.returned for lane in self._lanes)
        if through and not self.connection.is_ready:
            self.region_bytes = [region.nbytes for region in self.theirs.regions]
            self.connection.ready()

    # The end.

    def revoke(self) -> None:
        """Stop all queue pairs, wait for what is posted to come back and count what arrived, then
        destroy them. A destroyed one reads and writes nothing, also if the wait was too short or
        the device is gone."""
        for lane in self._lanes:
            with suppress(TransferError):
                lane.qp.fail()
        until = time.monotonic() + FLUSH_SECONDS
        for lane in self._lanes:
            with suppress(TransferError):
                while (lane.receives or lane.returned < lane.posted) and time.monotonic() < until:
                    lane.take()
        self.close()

    def close(self) -> None:
        while self._lanes:
            qp = self._lanes.pop().qp
            self.waiter.unwatch(qp.fd)
            qp.close()


class _Lane:
    """A queue pair and what is under way on it.

    posted ----> 1 2 3 4 5 6 7    wr_ids; each chain ends in one that completes
    returned --> 1 2 3 |     |    so the chain (3, job a) is done, (7, job b) is not
    receives     how many immediates may still come before more are posted
    """

    def __init__(self, link: VerbsLink, number: int) -> None:
        nics, peers, depths = link.medium.nics, link.theirs.nics, link.medium.depths
        self.own, self.their = number % len(nics), number % len(peers)
        nic, self.address = nics[self.own], peers[self.their]
        if bool(nic.address.gid) != bool(self.address.gid):
            raise TransferError(
                f"{nic} and the peer's NIC at {self.address} cannot meet: one is addressed by GID"
                " (RoCE), the other by LID (InfiniBand); choose others with --rdma-device"
            )
        self._link, self._depths = link, depths
        self.qp = nic.queue_pair(depths.sends, depths.receives, depths.receive_chain)
        self.psn = secrets.randbits(24)
        self.posted = self.returned = self.receives = 0
        self.heard = False
        self.chains: deque[tuple[int, Job]] = deque()
        # Made once. A post of n writes fills in the last n, since the last of all is the one that
        # reports its completion.
        self._requests, self._elements = verbs_device.send_chain(depths.send_chain)

    @property
    def room(self) -> int:
        """Writes that may be posted now."""
        return self._depths.sends - (self.posted - self.returned)

    def connect(self, peer: End) -> None:
        """Join the peer's queue pair. Receives first: it may write as soon as it is connected."""
        self.peer = peer
        self.replenish()
        self.qp.connect(self.psn, peer, self.address)

    def replenish(self) -> None:
        """Post receives again, in whole chains."""
        while self.receives + self._depths.receive_chain <= self._depths.receives:
            self.qp.post_receives()
            self.receives += self._depths.receive_chain

    def post(
        self, source: _Registered, target: Region, offsets: Sequence[Offsets], nbytes: int, imm: int
    ) -> None:
        """One chain: a write of `nbytes` with the immediate for each pair of offsets."""
        source_offsets, target_offsets = offsets
        count, part = len(source_offsets), source.parts[self.own]
        requests, elements = self._requests[-count:], self._elements[-count:]
        np.add(source_offsets.view(np.uint64), source.base, out=elements["addr"])
        np.add(target_offsets.view(np.uint64), target.address, out=requests["remote_addr"])
        requests["wr_id"] = np.arange(self.posted + 1, self.posted + count + 1)
        elements["length"], elements["lkey"] = nbytes, part.lkey
        requests["rkey"], requests["imm"] = target.rkeys[self.their], imm
        self.qp.post_sends(requests)
        self.posted += count

    def take(self) -> np.void | None:
        """Account for a bounded amount of what has completed, and count the immediates that came,
        but for the first. Returns the first that failed, if any."""
        found = self.qp.poll()
        if not len(found):
            return None
        if len(found) == verbs_device.POLL_COMPLETIONS:
            self._link.waiter.wake()  # no event tells of the rest
        self.returned = max(self.returned, int(found["wr_id"].max()))
        received, failed = found["wr_id"] == verbs_device.RECEIVE, found["status"] != 0
        self.receives -= int(np.count_nonzero(received))
        imms = found["imm"][received & ~failed]
        if len(imms) and not self.heard:
            self.heard, imms = True, imms[1:]
        imms, counts = np.unique(imms, return_counts=True)
        for imm, count in zip(imms.tolist(), counts.tolist(), strict=True):
            self._link.arrived(imm, count)
        return found[failed][0] if failed.any() else None

    def why(self, failed: np.void) -> str:
        """In words, of the first completion that failed. What it was is told by its wr_id, which is
        ours: its opcode is undefined."""
        what = "a receive" if failed["wr_id"] == verbs_device.RECEIVE else "the first write"
        jobs = [job for last, job in self.chains if verbs_device.RECEIVE < failed["wr_id"] <= last]
        if jobs:
            what = f"a write of {jobs[0].pages.page_bytes} bytes with imm {jobs[0].imm}"
        hint = "" if self.heard and self.returned else _NO_WAY
        return (
            f"{what} failed: {self.qp.explain(int(failed['status']))}; {self.qp},"
            f" the peer's is {self.peer.qpn} at {self.address}{hint}"
        )
