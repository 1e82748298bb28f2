"""RDMA: the NIC writes pages into the peer's memory; no CPU copies, and the peer's is not asked.

    who connects                                  who is called
      |-- opening: NICs, regions with keys --------->|  (openings and notes travel on the control
      |<- opening: the same -------------------------|   connection)
      |-- note: our queue pairs -------------------->| connects its own to them, posts receives
      |<- note: its queue pairs ---------------------|
      |== first write, on every queue pair =========>| the way works, so the same in return
    ready <=========================== first write ==| ready

    post --> qp send queue --> NIC ==pages, imm==> NIC --> peer's memory, then cq --> arrived(imm)
    WritesDone <---- cq <---- NIC <-- acknowledged --'    (the peer's CPU did nothing until here)

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

import contextlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.kv_layout import Offsets
from disagg.transfer import verbs_device
from disagg.transfer.interface import Memory, Ticket, TransferError, WritesDone
from disagg.transfer.medium import Bytes, Connection, Job, Link, Medium, decode
from disagg.transfer.verbs_device import Address, End, Nic, Registration, Requests
from disagg.transfer.waiter import READABLE

MAX_NICS = 64
#: The first write of a queue pair is as long as the longest packet: does that fit the way?
PROBE_BYTES = 4096
#: For what is posted on a closing queue pair to come back, which takes microseconds.
FLUSH_SECONDS = 1.0

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, kw_only=True)
class Depths:
    """What a queue pair holds: `sends` on their way, and `receives` for what the peer writes before
    we look (two layers' pages). Both are posted in chains; of sends, the last one completes."""

    sends: int = 2048
    send_chain: int = 512
    receives: int = 4096
    receive_chain: int = 1024


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


class _Ends(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The note: our end of each queue pair."""

    ends: list[End]


@dataclass(frozen=True, kw_only=True)
class _Registered:
    """A region of ours on each NIC, and what a peer gets to know of it."""

    parts: list[Registration]
    granted: Region


class VerbsMedium(Medium):
    """Every region is registered on every NIC. The NICs are the medium's from now on: it closes
    them."""

    name = "verbs"

    def __init__(self, nics: Sequence[Nic], depths: Depths | None = None) -> None:
        if not 1 <= len(nics) <= MAX_NICS:
            raise TransferError(f"verbs: expected 1 to {MAX_NICS} RDMA NICs, got {len(nics)}")
        self.nics = nics
        self.depths = depths or Depths()
        self.regions: list[_Registered] = []
        self._held = contextlib.ExitStack()
        for nic in nics:
            self._held.callback(nic.close)
        self._probe_bytes = np.zeros(PROBE_BYTES, np.uint8)
        address = self._probe_bytes.ctypes.data
        self.probe = self._register(Memory(address=address, nbytes=PROBE_BYTES))

    def register(self, memory: Memory, view: Bytes) -> None:
        self.regions.append(self._register(memory))

    def link(self, connection: Connection) -> Link:
        return VerbsLink(connection, self)

    def close(self) -> None:
        self._held.close()

    def _register(self, memory: Memory) -> _Registered:
        with contextlib.ExitStack() as registering:
            parts = []
            for nic in self.nics:
                parts.append(nic.register(memory))
                registering.callback(parts[-1].close)
            self._held.push(registering.pop_all())  # on all of the NICs, or on none
        granted = Region(0, 0, [])
        if memory.writable:
            granted = Region(parts[0].base, memory.nbytes, [part.rkey for part in parts])
        return _Registered(parts=parts, granted=granted)


class VerbsLink(Link):
    """One connection's queue pairs: number k joins our NIC k and the peer's NIC k, each modulo how
    many there are, until the side with more has used all of them."""

    def __init__(self, connection: Connection, medium: VerbsMedium) -> None:
        super().__init__(connection)
        self._medium = medium
        self._arrived = connection.arrived
        self._lanes: list[_Lane] = []
        self._holds: Counter[Ticket] = Counter()
        self._connected = self._ready = self._over = False
        self._destroy_at = 0.0  # matters once it is over
        info = _Info(
            [nic.address for nic in medium.nics],
            [region.granted for region in medium.regions],
            medium.probe.granted,
        )
        self.info = msgspec.msgpack.encode(info)

    # From the opening to ready.

    def start(self, info: bytes) -> None:
        """Make the queue pairs; whoever connected names theirs."""
        self._theirs = theirs = decode(info, _Info, "malformed opening of verbs")
        for region in (theirs.probe, *theirs.regions):
            keys = len(theirs.nics) if region.nbytes else 0
            if region.address + region.nbytes > 1 << 64 or len(region.rkeys) != keys:
                raise TransferError(f"the peer's opening grants what cannot be: {region}")
        if theirs.probe.nbytes < PROBE_BYTES:
            raise TransferError(f"the peer's opening has no place for first writes: {theirs.probe}")
        own = self._medium.nics
        for k in range(max(len(own), len(theirs.nics))):
            lane = _Lane(self._medium, k % len(own), theirs.nics, k % len(theirs.nics))
            self._lanes.append(lane)
            self.control.waiter.watch(lane.qp.fd, READABLE, partial(self._on_event, lane))
        if self.outgoing:
            self._name_ends()

    def take_note(self, data: bytes) -> None:
        """The peer's end of each queue pair. Who was called names its own once they can receive."""
        ends = decode(data, _Ends, "malformed note of verbs").ends
        if self._connected or len(ends) != len(self._lanes):
            raise TransferError(
                f"the peer named {len(ends)} queue pairs; expected {len(self._lanes)}, once"
            )
        for lane, end in zip(self._lanes, ends, strict=True):
            lane.connect(end)
        self._connected = True
        if not self.outgoing:
            self._name_ends()
            return
        for lane in self._lanes:
            self._probe(lane)

    def _name_ends(self) -> None:
        ends = _Ends([End(lane.qp.qpn, lane.psn) for lane in self._lanes])
        self.control.send_note(self.peer, msgspec.msgpack.encode(ends))

    def _probe(self, lane: _Lane) -> None:
        """The first write. Nobody waits for its immediate: the first one on a queue pair."""
        start = np.zeros(1, np.int64)
        lane.post(None, self._medium.probe, self._theirs.probe, start, start, PROBE_BYTES, 0)

    def _prove(self, lane: _Lane) -> None:
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

    def post(self) -> None:
        """One chain on every queue pair that has room, the emptiest first."""
        self.guard(self._post)

    def end(self, ticket: Ticket) -> None:
        """A ticket is held by its job, from the first post on, and by each chain on its way."""
        self._holds[ticket] -= 1
        if self._holds[ticket] <= 0:
            del self._holds[ticket]
            super().end(ticket)

    def _post(self) -> None:
        job = self.jobs[0]
        source, target = self._medium.regions[job.source_region], self._theirs.regions[job.region]
        left = len(job.source_offsets) - job.num_posted
        share = min(self._medium.depths.send_chain, -(-left // len(self._lanes)))
        for lane in sorted(self._lanes, key=lambda lane: lane.room, reverse=True):
            some = slice(job.num_posted, job.num_posted + min(share, lane.room))
            sources, targets = job.source_offsets[some], job.destination_offsets[some]
            if not len(sources):
                break
            self._holds[job.ticket] += 1 if job.num_posted else 2
            lane.post(job, source, target, sources, targets, job.write_bytes, job.imm)
            job.num_posted += len(sources)
        if job.is_posted:
            self.end(self.jobs.popleft().ticket)

    # Completions come in.

    def take_ended(self) -> list[WritesDone]:
        for lane in self._lanes:
            self.guard(partial(self._take, lane))
        return super().take_ended()

    def take_arrivals(self) -> None:
        self.ended += self.take_ended()

    def _on_event(self, lane: _Lane, events: int) -> None:
        self.guard(lane.qp.rearm)
        self.guard(partial(self._take, lane))

    def _take(self, lane: _Lane) -> None:
        """A bounded amount of what has completed on a queue pair."""
        found = lane.qp.poll()
        if not len(found):
            return
        if len(found) == verbs_device.POLL_COMPLETIONS:
            self.control.waiter.wake()  # no event tells of the rest
        imms, counts = np.unique(lane.take(found), return_counts=True)
        for imm, count in zip(imms.tolist(), counts.tolist(), strict=True):
            self._arrived(imm, count)
        if self._over:
            return
        if found["status"].any():
            raise TransferError(lane.why(found[found["status"] != 0][0]))
        for job in lane.take_returned():
            self.end(job.ticket)
        lane.replenish()
        if not self._ready:
            self._prove(lane)

    # The end.

    def revoke(self) -> None:
        """Stop the queue pairs, and wait for our own writes to come back: none reads its source any
        more."""
        self._over = True
        self._destroy_at = time.monotonic() + FLUSH_SECONDS
        self._each(lambda lane: lane.qp.fail())
        while any(lane.returned < lane.posted for lane in self._lanes):
            self._each(self._take)

    def is_fenced(self) -> bool:
        self._each(self._take)
        return not any(lane.receives for lane in self._lanes)

    def close(self) -> None:
        while self._lanes:
            self._destroy(self._lanes[-1])

    def _each(self, step: Callable[[_Lane], None]) -> None:
        """One that fails now, or takes too long, is destroyed: nothing is left of it either."""
        for lane in list(self._lanes):
            try:
                step(lane)
                is_late = time.monotonic() > self._destroy_at
            except TransferError:  # the device is gone
                is_late = True
            if is_late:
                self._destroy(lane)

    def _destroy(self, lane: _Lane) -> None:
        self._lanes.remove(lane)
        self.control.waiter.unwatch(lane.qp.fd)
        lane.qp.close()


class _Lane:
    """A queue pair and what is under way on it.

    posted ----> 1 2 3 4 5 6 7    wr_ids; each chain ends in one that completes
    returned --> 1 2 3 |     |    so the chain (3, job a) is done, (7, job b) is not
    receives     how many immediates may still come before more are posted
    """

    def __init__(
        self, medium: VerbsMedium, own: int, peers: Sequence[Address], theirs: int
    ) -> None:
        nic, depths = medium.nics[own], medium.depths
        self.own, self.theirs, self.address = own, theirs, peers[theirs]
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
        self._chains: deque[tuple[int, Job | None]] = deque()
        # Filled anew for every post. Only what differs is written then.
        self._requests, self._elements = verbs_device.send_chain(depths.send_chain)
        self._numbers = np.arange(1, depths.send_chain + 1, dtype=np.uint64)

    @property
    def room(self) -> int:
        """Writes that may be posted now."""
        return self._depths.sends - (self.posted - self.returned)

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
        requests, elements = self._requests[:count], self._elements[:count]
        np.add(source_offsets.view(np.uint64), part.base, out=elements["addr"])
        np.add(target_offsets.view(np.uint64), target.address, out=requests["remote_addr"])
        np.add(self._numbers[:count], self.posted, out=requests["wr_id"])
        elements["length"], elements["lkey"] = nbytes, part.lkey
        requests["rkey"], requests["imm"] = target.rkeys[self.theirs], imm
        last = requests[-1]
        following = last["next"]
        last["next"], last["send_flags"] = 0, verbs_device.SEND_SIGNALED
        self.qp.post_sends(requests)
        last["next"], last["send_flags"] = following, 0
        self.posted += count
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

    def take_returned(self) -> list[Job]:
        """The job of each chain that is done."""
        jobs = []
        while self._chains and self._chains[0][0] <= self.returned:
            job = self._chains.popleft()[1]
            if job is not None:
                jobs.append(job)
        return jobs

    def why(self, failed: np.void) -> str:
        """In words, of the first completion that failed. Its opcode would tell nothing: that is
        undefined then; its wr_id is ours."""
        job = next((job for last, job in self._chains if failed["wr_id"] <= last), None)
        what = "a receive"
        if failed["wr_id"] != verbs_device.RECEIVE:
            what = "the first write"
            if job is not None:
                what = f"a write of {job.write_bytes} bytes with imm {job.imm}"
        hint = ""
        if not (self.heard and self.returned):
            hint = (
                "; the way is not open: check GID or LID, the MTU of switches, firewalls (UDP 4791)"
            )
        return (
            f"{what} failed: {self.qp.explain(int(failed['status']))}; {self.qp},"
            f" the peer's is {self.peer.qpn} at {self.address}{hint}"
        )
