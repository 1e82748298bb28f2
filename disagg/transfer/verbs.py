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
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.kv_layout import Offsets
from disagg.transfer import verbs_device
from disagg.transfer.interface import Memory, Ticket, TransferError, WritesDone
from disagg.transfer.medium import Bytes, Connection, Job, Link, Medium
from disagg.transfer.opening import decode
from disagg.transfer.verbs_device import Address, End, Nic, Requests, base_of
from disagg.transfer.waiter import READABLE

MAX_NICS = 64
#: The first write of a queue pair is as long as the longest packet: does that fit the way?
FIRST_WRITE_BYTES = 4096
#: For what is posted on closing queue pairs to come back, which takes microseconds. Nothing else is
#: done meanwhile: several peers may be lost at once, and others must not find us silent.
FLUSH_SECONDS = 0.25

_NO_WAY = "; the way is not open: check GID or LID, the MTU of switches, firewalls (UDP 4791)"

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, kw_only=True)
class Depths:
    """What a queue pair holds: `sends` on their way, and `receives` for what the peer writes before
    we look (two layers' pages; the queues of some NICs hold 4063). Both are posted in chains; of
    sends, only the last one reports its completion, for all of them."""

    sends: int = 2048
    send_chain: int = 512
    receives: int = 4000
    receive_chain: int = 1000


class Region(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Memory that a peer may write to: its address for a NIC, and the rkey of each of our NICs. Not
    granted: no bytes, no keys."""

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
        self.granted = Region(0, 0, [])
        if memory.writable:
            self.granted = Region(self.base, memory.nbytes, [part.rkey for part in self.parts])


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

    def link(self, connection: Connection) -> Link:
        return VerbsLink(connection, self)

    def close(self) -> None:
        for nic in self.nics:
            nic.close()


class VerbsLink(Link):
    """One connection's queue pairs: number k joins our NIC k and the peer's NIC k, each modulo how
    many there are, until the side with more has used all of them."""

    def __init__(self, connection: Connection, medium: VerbsMedium) -> None:
        super().__init__(connection)
        self._medium = medium
        self._arrived = connection.arrived
        self._lanes: list[_Lane] = []
        self._holds: Counter[Ticket] = Counter()
        self._ready = False
        addresses = [nic.address for nic in medium.nics]
        granted = [region.granted for region in medium.regions]
        self.info = msgspec.msgpack.encode(_Info(addresses, granted, medium.probe.granted))

    # From the opening to ready.

    def start(self, info: bytes) -> None:
        """Make the queue pairs; whoever connected names theirs."""
        self._theirs = theirs = decode(info, _Info, "malformed opening of verbs")
        granted = [theirs.probe, *(region for region in theirs.regions if region.nbytes)]
        keys = {len(region.rkeys) for region in granted}
        if keys != {len(theirs.nics)} or theirs.probe.nbytes < FIRST_WRITE_BYTES:
            raise TransferError(f"the peer's opening grants what cannot be: {granted}")
        for number in range(max(len(self._medium.nics), len(theirs.nics))):
            lane = _Lane(self._medium, number, theirs.nics)
            self._lanes.append(lane)
            self.control.waiter.watch(lane.qp.fd, READABLE, partial(self._on_event, lane))
        if self.outgoing:
            self._name_ends()

    def take_note(self, data: bytes) -> None:
        """The peer's end of each queue pair. Who was called names its own once they can receive."""
        ends = decode(data, list[End], "malformed note of verbs")
        if len(ends) != len(self._lanes):
            raise TransferError(f"expected {len(self._lanes)} queue pairs, got {len(ends)}: {ends}")
        for lane, end in zip(self._lanes, ends, strict=True):
            lane.connect(end)
        if not self.outgoing:
            self._name_ends()
        else:
            for lane in self._lanes:
                self._probe(lane)

    def _name_ends(self) -> None:
        ends = [End(lane.qp.qpn, lane.psn) for lane in self._lanes]
        self.control.send_note(self.peer, msgspec.msgpack.encode(ends))

    def _probe(self, lane: _Lane) -> None:
        """The first write. Nobody waits for its immediate: the first one on a queue pair."""
        start = np.zeros(1, np.int64)
        lane.post(None, self._medium.probe, self._theirs.probe, start, start, FIRST_WRITE_BYTES, 0)

    def _check_ready(self, lane: _Lane) -> None:
        """Something came on a queue pair; ready once the first writes of both sides are through."""
        if lane.heard and not lane.posted:
            self._probe(lane)
        if all(lane.heard and lane.returned for lane in self._lanes):
            self._ready = True
            self.region_bytes = [region.nbytes for region in self._theirs.regions]
            self.control.ready(self.peer)

    # Writes go out.

    def can_post(self) -> bool:
        return bool(self.jobs) and any(lane.room for lane in self._lanes)

    def end(self, ticket: Ticket) -> None:
        """Release one hold on a ticket; the last one ends it. Its job holds it, from the first post
        until it leaves `jobs`, and each chain on its way. Withdrawn before, nothing holds it."""
        self._holds[ticket] -= 1
        if self._holds[ticket] <= 0:
            del self._holds[ticket]
            super().end(ticket)

    def post(self) -> None:
        """One chain on every queue pair that has room, the emptiest first."""
        job = self.jobs[0]
        source, target = self._medium.regions[job.source_region], self._theirs.regions[job.region]
        left = len(job.source_offsets) - job.num_posted
        share = min(self._medium.depths.send_chain, -(-left // len(self._lanes)))
        for lane in sorted(self._lanes, key=lambda lane: lane.room, reverse=True):
            some = slice(job.num_posted, job.num_posted + min(share, lane.room))
            sources, targets = job.source_offsets[some], job.destination_offsets[some]
            if not len(sources):
                break
            self._holds[job.ticket] += 1 if job.num_posted else 2  # the first also for its job
            lane.post(job, source, target, sources, targets, job.write_bytes, job.imm)
            job.num_posted += len(sources)
        if job.is_posted:
            self.end(self.jobs.popleft().ticket)

    # Completions come in.

    def take_ended(self) -> list[WritesDone]:
        for lane in self._lanes:
            self.guard(partial(self._take, lane))
        return super().take_ended()

    def _on_event(self, lane: _Lane, events: int) -> None:
        self.guard(lane.qp.rearm)
        self.guard(partial(self._take, lane))

    def _take(self, lane: _Lane) -> None:
        """A bounded amount of what has completed on a queue pair."""
        failed = self._count(lane)
        if len(failed):
            raise TransferError(lane.why(failed[0]))
        for job in lane.take_returned():
            self.end(job.ticket)
        lane.replenish()
        if not self._ready:
            self._check_ready(lane)

    def _count(self, lane: _Lane) -> Requests:
        """Account for what has completed, and count what arrived. Returns what failed."""
        found = lane.qp.poll()
        if not len(found):
            return found
        if len(found) == verbs_device.POLL_COMPLETIONS:
            self.control.waiter.wake()  # no event tells of the rest
        imms, counts = np.unique(lane.take(found), return_counts=True)
        for imm, count in zip(imms.tolist(), counts.tolist(), strict=True):
            self._arrived(imm, count)
        failed: Requests = found[found["status"] != 0]
        return failed

    # The end.

    def revoke(self) -> None:
        """Stop all queue pairs, wait for what is posted to come back and count what arrived, then
        destroy them. A destroyed one reads and writes nothing, also if the wait was too short or
        the device is gone."""
        stopped = []
        for lane in self._lanes:
            with suppress(TransferError):
                lane.qp.fail()
                stopped.append(lane)
        destroy_at = time.monotonic() + FLUSH_SECONDS
        for lane in stopped:
            with suppress(TransferError):
                while lane.has_posted and time.monotonic() < destroy_at:
                    self._count(lane)
        self.close()

    def close(self) -> None:
        while self._lanes:
            qp = self._lanes.pop().qp
            self.control.waiter.unwatch(qp.fd)
            qp.close()


class _Lane:
    """A queue pair and what is under way on it.

    posted ----> 1 2 3 4 5 6 7    wr_ids; each chain ends in one that completes
    returned --> 1 2 3 |     |    so the chain (3, job a) is done, (7, job b) is not
    receives     how many immediates may still come before more are posted
    """

    def __init__(self, medium: VerbsMedium, number: int, peers: Sequence[Address]) -> None:
        self.own, self.theirs = number % len(medium.nics), number % len(peers)
        nic, self.address, depths = medium.nics[self.own], peers[self.theirs], medium.depths
        if bool(nic.address.gid) != bool(self.address.gid):
            raise TransferError(
                f"{nic} and the peer's NIC at {self.address} cannot meet: one is addressed by GID"
                " (RoCE), the other by LID (InfiniBand); choose others with --rdma-device"
            )
        self._depths = depths
        self.qp = nic.queue_pair(depths.sends, depths.receives, depths.receive_chain)
        self.psn = secrets.randbits(24)
        self.posted = self.returned = self.receives = 0
        self.heard = False
        self._chains: deque[tuple[int, Job]] = deque()
        # Filled anew for every post, from the end. Only what differs is written then.
        self._requests, self._elements = verbs_device.send_chain(depths.send_chain)

    @property
    def room(self) -> int:
        """Writes that may be posted now."""
        return self._depths.sends - (self.posted - self.returned)

    @property
    def has_posted(self) -> bool:
        """Whether something is posted that did not come back."""
        return self.receives > 0 or self.returned < self.posted

    def connect(self, peer: End) -> None:
        """Receives first: the peer may write as soon as it can."""
        self.peer = peer
        self.replenish()
        self.qp.connect(self.psn, peer, self.address)

    def replenish(self) -> None:
        """Post receives again, in whole chains."""
        while self.receives + self._depths.receive_chain <= self._depths.receives:
            self.qp.post_receives()
            self.receives += self._depths.receive_chain

    def post(
        self,
        job: Job | None,
        source: _Registered,
        target: Region,
        source_offsets: Offsets,
        target_offsets: Offsets,
        nbytes: int,
        imm: int,
    ) -> None:
        """One chain: a write of `nbytes` with the immediate for each pair of offsets."""
        count, part = len(source_offsets), source.parts[self.own]
        requests, elements = self._requests[-count:], self._elements[-count:]
        np.add(source_offsets.view(np.uint64), source.base, out=elements["addr"])
        np.add(target_offsets.view(np.uint64), target.address, out=requests["remote_addr"])
        requests["wr_id"] = np.arange(self.posted + 1, self.posted + count + 1)
        elements["length"], elements["lkey"] = nbytes, part.lkey
        requests["rkey"], requests["imm"] = target.rkeys[self.theirs], imm
        self.qp.post_sends(requests)
        self.posted += count
        if job is not None:
            self._chains.append((self.posted, job))

    def take(self, found: Requests) -> npt.NDArray[np.uint32]:
        """Account for these completions. Returns the immediates that came, but for the first."""
        ids = found["wr_id"]
        self.returned = max(self.returned, int(ids.max()))
        received = ids == verbs_device.RECEIVE
        self.receives -= int(np.count_nonzero(received))
        imms: npt.NDArray[np.uint32] = found["imm"][received & (found["status"] == 0)]
        if len(imms) and not self.heard:
            self.heard = True
            return imms[1:]
        return imms

    def take_returned(self) -> Iterator[Job]:
        """The job of each chain that is done."""
        while self._chains and self._chains[0][0] <= self.returned:
            yield self._chains.popleft()[1]

    def why(self, failed: np.void) -> str:
        """In words, of the first completion that failed. Its opcode would tell nothing: that is
        undefined then; its wr_id is ours."""
        job = next((job for last, job in self._chains if failed["wr_id"] <= last), None)
        what = (
            f"a write of {job.write_bytes} bytes with imm {job.imm}" if job else "the first write"
        )
        if failed["wr_id"] == verbs_device.RECEIVE:
            what = "a receive"
        hint = "" if self.heard and self.returned else _NO_WAY
        return (
            f"{what} failed: {self.qp.explain(int(failed['status']))}; {self.qp},"
            f" the peer's is {self.peer.qpn} at {self.address}{hint}"
        )
