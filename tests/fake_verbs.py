"""RDMA NICs that exist in this process alone: `Nic` and `QueuePair` of `verbs_device.py`, faked.

    post_sends --> pending --Fabric.move()--> memmove --> cq of the peer: imm
                      |  held: when the test says so  '-> cq of the sender, if signalled
                      '--> no receive left: waits;  key, address, peer or way wrong: error, flushes

Requests are read where their addresses say, as a NIC would. What a NIC or its driver would not take
is an AssertionError: more on their way than the queue is deep, a chain that does not end.
"""

import ctypes
import itertools
import os
import weakref
from collections import Counter, deque

import numpy as np

from disagg.transfer import auto, topology, verbs_device
from disagg.transfer.interface import TransferError
from disagg.transfer.verbs_device import (
    POLL_COMPLETIONS,
    RDMA_WRITE_WITH_IMM,
    RECEIVE,
    SEND_SIGNALED,
    SEND_WR,
    SGE,
    WC,
    Address,
    base_of,
)

SUCCESS, LOCAL_PROTECTION, FLUSHED, REMOTE_ACCESS, RETRIES_EXCEEDED = 0, 4, 5, 10, 12


def at(address, dtype):
    """A copy of the C struct that lies there."""
    return np.frombuffer(ctypes.string_at(int(address), dtype.itemsize), dtype)[0]


class Fabric:
    """The network and all on it. `held`: writes move when the test calls `move`. `holds_flushes`:
    queue pairs in error keep what is posted. `way_mtu`: no longer write gets through a first time;
    `cut`: names of NICs that nothing reaches or leaves."""

    def __init__(self, *, held=False):
        self.held, self.holds_flushes = held, False
        self.way_mtu, self.cut, self.gone = 1 << 31, set(), set()
        self.queue_pairs = {}
        self.memory = {}  # by key: NIC, base, bytes, writable
        self.open = Counter()
        self.numbers = itertools.count(17)
        self.written = Counter()  # writes that landed, by queue pair
        self.locked_bytes_limit = None

    def nic(self, **options):
        return FakeNic(self, **options)

    def move(self, count=None, *, forced=True):
        """Carry out up to `count` writes, in turns over the queue pairs."""
        moved = True
        while moved and (forced or not self.held):
            moved = False
            for pair in list(self.queue_pairs.values()):
                if count == 0:
                    return
                if pair.pending and pair.carry_out(pair.pending[0]):
                    moved = True
                    count = None if count is None else count - 1


class FakeNic:
    def __init__(self, fabric, *, name=None, gid=True, mtu=1024, port=1):
        number = next(fabric.numbers)
        self.fabric, self.name, self.port = fabric, name or f"fake{number}", port
        self.address = Address(
            f"0000:{'0000:' * 4}ffff:0a63:{number:04x}" if gid else "", number, mtu
        )
        fabric.open["nic"] += 1
        self.is_open = True
        self.registrations = weakref.WeakSet()

    def __str__(self):
        return f"{self.name} port {self.port} ({self.address})"

    def register(self, memory):
        limit = self.fabric.locked_bytes_limit
        if limit is not None and memory.nbytes > limit:
            raise TransferError(f"{self.name} cannot register {memory.nbytes} bytes")
        return FakeRegistration(self, memory)

    def queue_pair(self, sends, receives, receive_chain):
        return FakeQueuePair(self, sends, receives, receive_chain)

    def close(self):
        if self.is_open:
            assert not any(pair.nic is self for pair in self.fabric.queue_pairs.values())
            self.fabric.open["nic"] -= 1
            self.is_open = False
            for registration in list(self.registrations):
                registration.close()


class FakeRegistration:
    """Ends when nobody holds it any more, or with its NIC; as those of pyverbs do."""

    def __init__(self, nic, memory):
        self.fabric = nic.fabric
        self.lkey = self.rkey = next(self.fabric.numbers)
        self.fabric.memory[self.lkey] = (nic, base_of(memory), memory.nbytes, memory.writable)
        self.fabric.open["registration"] += 1
        nic.registrations.add(self)

    def close(self):
        if self.fabric.memory.pop(self.lkey, None):
            self.fabric.open["registration"] -= 1

    __del__ = close


class FakeQueuePair:
    def __init__(self, nic, sends, receives, receive_chain):
        self.nic, self.fabric = nic, nic.fabric
        self.sends, self.max_receives, self.receive_chain = sends, receives, receive_chain
        self.qpn = next(self.fabric.numbers)
        self.fabric.queue_pairs[self.qpn] = self
        self.fabric.open["queue pair"] += 1
        self.state = "INIT"
        self.pending, self.receives, self.completions = deque(), 0, deque()
        self.outstanding = 0  # posted, and not known to be over: what takes room in the queue
        self.most_outstanding = 0
        self.psn = self.peer_psn = self.peer = None
        self.posted_ids, self.chains = [], []
        self.armed = True
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __str__(self):
        return f"queue pair {self.qpn} of {self.nic}"

    def connect(self, own_psn, peer, address):
        self.check_device()
        if self.state != "INIT":
            raise TransferError(f"{self} cannot get ready to receive: Invalid argument")
        assert self.receives, "receives come first: the peer may write at once"
        theirs = self.fabric.queue_pairs.get(peer.qpn)
        if theirs is None or theirs.nic.address != address:
            raise TransferError(f"{self} cannot get ready to receive, with {peer.qpn} at {address}")
        self.peer, self.psn, self.peer_psn = theirs, own_psn, peer.psn
        self.state = "RTS"
        self.fabric.move(forced=False)

    def post_receives(self):
        self.check_device()
        self.receives += self.receive_chain
        assert self.receives <= self.max_receives, "more receives than the queue is deep"
        self.fabric.move(forced=False)

    def post_sends(self, requests):
        self.check_device()
        assert self.state == "RTS"
        assert requests.dtype == SEND_WR
        here = requests.ctypes.data
        while here:
            request = at(here, SEND_WR)
            assert request["opcode"] == RDMA_WRITE_WITH_IMM
            assert request["num_sge"] == 1
            self.pending.append((request, at(request["sg_list"], SGE)))
            self.posted_ids.append(int(request["wr_id"]))
            here = int(request["next"])
        assert self.pending[-1][0]["send_flags"] == SEND_SIGNALED, "nobody would hear of the last"
        self.chains.append(len(requests))
        self.outstanding += len(requests)
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        assert self.outstanding <= self.sends, "more sends than the queue is deep"
        self.fabric.move(forced=False)

    def poll(self):
        self.check_device()
        found = np.zeros(min(len(self.completions), POLL_COMPLETIONS), WC)
        for completion in found:
            completion["wr_id"], completion["status"], completion["imm"] = (
                self.completions.popleft()
            )
        return found

    def rearm(self):
        self.check_device()
        os.eventfd_read(self.fd)  # an error if there is no event: the real one would block
        self.armed = True

    def fail(self):
        self.check_device()
        self.state = "ERROR"
        if not self.fabric.holds_flushes:
            self.flush()

    def flush(self):
        while self.pending:
            self.complete(int(self.pending.popleft()[0]["wr_id"]), FLUSHED)
        for _ in range(self.receives):
            self.complete(RECEIVE, FLUSHED)
        self.receives = 0

    def explain(self, status):
        return {
            SUCCESS: "success",
            LOCAL_PROTECTION: "local protection error",
            FLUSHED: "WR flush error",
            REMOTE_ACCESS: "remote access error",
            RETRIES_EXCEEDED: "retry exceeded error",
        }[status]

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.state = "closed"
            del self.fabric.queue_pairs[self.qpn]
            self.fabric.open["queue pair"] -= 1

    # Inside the NIC.

    def check_device(self):
        assert self.state != "closed"
        if self.nic.name in self.fabric.gone:
            raise TransferError(f"{self} cannot be reached: Input/output error")

    def complete(self, wr_id, status, imm=0):
        self.completions.append((wr_id, status, imm))
        assert len(self.completions) <= self.sends + self.max_receives, "completion queue overrun"
        if wr_id != RECEIVE:
            self.outstanding = self.posted_ids[-1] - wr_id
        if self.armed:
            self.armed = False
            os.eventfd_write(self.fd, 1)

    def carry_out(self, pending):
        """Whether the first pending write is over; if not, the peer has no receive for it."""
        request, element = pending
        wr_id, nbytes = int(request["wr_id"]), int(element["length"])
        source, target = int(element["addr"]), int(request["remote_addr"])
        peer = self.peer
        status = SUCCESS
        if not granted(self.fabric, element["lkey"], self.nic, source, nbytes):
            status = LOCAL_PROTECTION
        elif (
            peer.state != "RTS"
            or peer.peer is not self
            or (peer.psn, peer.peer_psn) != (self.peer_psn, self.psn)
            or {self.nic.name, peer.nic.name} & self.fabric.cut
            or min(nbytes, self.nic.address.mtu, peer.nic.address.mtu) > self.fabric.way_mtu
        ):
            assert peer.state != "INIT", "a NIC drops what comes before it can receive"
            status = RETRIES_EXCEEDED
        elif not granted(self.fabric, request["rkey"], peer.nic, target, nbytes, written=True):
            status = REMOTE_ACCESS
        elif not peer.receives:
            return False
        self.pending.popleft()
        if status != SUCCESS:
            self.complete(wr_id, status)
            self.state = "ERROR"
            self.flush()
            if status == REMOTE_ACCESS:
                peer.fail()
            return True
        ctypes.memmove(target, source, nbytes)
        self.fabric.written[self.qpn] += 1
        peer.receives -= 1
        peer.complete(RECEIVE, SUCCESS, int(request["imm"]))
        if request["send_flags"] & SEND_SIGNALED:
            self.complete(wr_id, SUCCESS)
        return True


class FakeMachine:
    """A sysfs under `root` with 16 CPUs in place of this machine's, and NICs that open as fakes.

    `opened`: name, port and GID index of each; `polled_on`: CPUs of each thread that chose some.
    """

    def __init__(self, monkeypatch, root):
        self.fabric, self.opened, self.polled_on, self.broken = Fabric(), [], [], set()
        monkeypatch.setattr(verbs_device, "MISSING", "")
        monkeypatch.setattr(auto, "Nic", self.open)
        monkeypatch.setattr(topology.Topology.__init__, "__defaults__", (root,))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: self.polled_on.append(cpus))

    def open(self, name, port, gid_index):
        if name in self.broken:
            raise TransferError(f"cannot open RDMA device {name}")
        self.opened.append((name, port, gid_index))
        return self.fabric.nic(name=name, port=port, gid=gid_index is not None)


def granted(fabric, key, nic, address, nbytes, *, written=False):
    """Whether the memory is registered on the NIC under the key."""
    owner, base, size, writable = fabric.memory.get(int(key), (None, 0, 0, False))
    inside = base <= address and address + nbytes <= base + size
    return owner is nic and inside and (writable or not written)
