"""What every transfer engine must do, whatever moves the bytes: the contract of `interface.py`.

A transport joins by a line in `TRANSPORTS`. The first half runs all engines in this process; the
second half has real sockets, child processes that are stopped and killed, and ports that lie. What
verbs runs on stands in `engines.py`.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from disagg.shared_memory import SharedMemory
from disagg.transfer.interface import (
    ImmReached,
    Memory,
    MessageReceived,
    PeerFenced,
    PeerLost,
    TransferError,
    WritesDone,
)
from disagg.transfer.transfer_engine import TransferEngine
from disagg.transfer.verbs import Depths
from tests.adversarial import FakeTransfer, Network
from tests.engines import (
    PATIENCE,
    RDMA_DEVICES,
    auto_engine,
    in_halves,
    once,
    open_descriptors,
    open_jobs,
    shm_engine,
    tcp_engine,
    verbs_maker,
    write,
    write_pages,
)

DEADLINE_SECONDS = 10.0 * PATIENCE
KIB, MIB = 1 << 10, 1 << 20


def interrupted_shm(inside):
    """Calls `inside` once, in the middle of its first copy and inside the lease."""
    return shm_engine(in_halves(once(inside)))


def interrupted_tcp(inside):
    """Calls `inside` once, after half of its first frame."""
    inside = [inside]

    def send(data, buffers):
        if not inside:
            return socket.socket.sendmsg(data, buffers)
        sent = socket.socket.sendmsg(data, buffers[: len(buffers) // 2])
        inside.pop()()
        return sent

    return tcp_engine(send)


def interrupted_auto(inside):
    """Calls `inside` in the middle of its first copy: on one host, shm is the one that fits."""
    return auto_engine(in_halves(once(inside)))


def interrupted_verbs(inside):
    """Calls `inside` once, when half of its first ticket was handed to the NIC."""
    half, act = CHILD_PAGES // 2, once(inside)
    engine = verbs_maker(Depths(sends=half, send_chain=half))()
    poll = engine.poll

    def poll_and_look(timeout):
        events = poll(timeout)
        if any(job.num_posted for job in open_jobs(engine).values()):
            act()
        return events

    engine.poll = poll_and_look
    return engine


class SteppingFake(FakeTransfer):
    """The in-memory fake, whose medium does some random thing whenever an engine polls."""

    ports = itertools.count(1)

    def listen(self, host, port):
        return super().listen(host, port or next(self.ports))

    def poll(self, timeout):
        for _ in range(8):
            if actions := self.network.actions():
                self.network.rng.choice(actions)()
        return super().poll(timeout)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """`start()` gives a maker of engines that can reach each other."""

    start: Callable[[], Callable[..., TransferEngine]]


@dataclass(frozen=True, kw_only=True)
class RealTransport(Transport):
    """`interrupted(inside)`: an engine that calls `inside` once in the middle of a copy.

    `fences_stopped`: whether the owner can fence a writer whose process is stopped there.
    """

    interrupted: Callable[[Callable[[], None]], TransferEngine]
    fences_stopped: bool


def start_fake():
    network = Network(random.Random(7))
    names = itertools.count()
    return lambda: SteppingFake(network, f"engine {next(names)}")


REAL_TRANSPORTS = {
    "shm": RealTransport(
        start=lambda: shm_engine, interrupted=interrupted_shm, fences_stopped=False
    ),
    "tcp": RealTransport(
        start=lambda: tcp_engine, interrupted=interrupted_tcp, fences_stopped=True
    ),
    "auto": RealTransport(
        start=lambda: auto_engine, interrupted=interrupted_auto, fences_stopped=False
    ),
    "verbs": RealTransport(start=verbs_maker, interrupted=interrupted_verbs, fences_stopped=True),
}
TRANSPORTS = {**REAL_TRANSPORTS, "fake": Transport(start=start_fake)}
#: A fake NIC reaches no other process.
PROCESS_TRANSPORTS = [name for name in REAL_TRANSPORTS if name != "verbs" or RDMA_DEVICES]


class Node:
    """One engine with one registered region, and all it ever reported."""

    def __init__(self, engine, nbytes):
        self.engine = engine
        self.memory = SharedMemory(nbytes)
        self.bytes = self.memory.bytes
        self.region = self.register()
        self.events = []

    def register(self, *, writable=True):
        """All of the memory, as one more region."""
        memory, nbytes = self.memory, self.memory.nbytes
        return self.engine.register(
            Memory(address=memory.address, nbytes=nbytes, fd=memory.fd, writable=writable)
        )

    def poll(self, timeout=0.0):
        new = self.engine.poll(timeout)
        self.events += new
        return new

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def reached(self):
        return [event.imm for event in self.of(ImmReached)]

    @property
    def ended(self):
        return [event.ticket for event in self.events if isinstance(event, WritesDone)]

    def close(self):
        self.engine.close()
        self.memory.close()


class World:
    """The nodes of a test, polled in turn."""

    def __init__(self, make):
        self.make = make
        self.nodes = []

    def node(self, nbytes=MIB, **options):
        node = Node(self.make(**options), nbytes)
        self.nodes.append(node)
        return node

    def run(self, until, seconds=DEADLINE_SECONDS):
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() > end:
                pytest.fail(f"not within {seconds} s: {[node.events[-5:] for node in self.nodes]}")
            for node in self.nodes:
                node.poll(0.0005)

    def rounds(self, count=50):
        """Enough polls that whatever is under way arrives (for "nothing happens")."""
        for _ in range(count):
            for node in self.nodes:
                node.poll(0.0002)

    def connect(self, dialler, listener):
        """Both peer numbers: how the dialler calls the listener, and the other way round."""
        before = len(listener.of(MessageReceived))
        if not hasattr(listener, "address"):
            listener.address = listener.engine.listen("127.0.0.1", 0)
        there = dialler.engine.connect(*listener.address)
        dialler.engine.send(there, b"hello")
        self.run(lambda: len(listener.of(MessageReceived)) > before)
        return there, listener.of(MessageReceived)[-1].peer

    def close(self):
        for node in self.nodes:
            node.close()


@pytest.fixture(params=TRANSPORTS)
def world(request):
    with contextlib.closing(World(TRANSPORTS[request.param].start())) as world:
        yield world


@pytest.fixture(params=REAL_TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def real_world(transport):
    with contextlib.closing(World(REAL_TRANSPORTS[transport].start())) as world:
        yield world


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def shuffled(count, page_bytes, seed=0, shift=0):
    return np.random.default_rng(seed).permutation(count) * page_bytes + shift


# --- Contents and counts ---


@pytest.mark.parametrize("seed", range(12))
def test_contents_untouched_bytes_and_counts(world, seed):
    """Random tickets in both directions at once, some page-aligned and some not, against numpy."""
    rng = np.random.default_rng(seed)
    left, right = world.node(256 * KIB), world.node(256 * KIB)
    there, back = world.connect(left, right)
    wanted, tickets = {}, {}
    for node, seed_of in ((left, 1), (right, 2)):
        # The upper half is the source, the lower half the destination.
        node.bytes[128 * KIB :] = noise(128 * KIB, seed + seed_of)
        node.bytes[: 128 * KIB] = noise(128 * KIB, seed + 10 * seed_of)
        wanted[node] = node.bytes.copy()
        tickets[node] = []
    for source, peer, target, target_peer in (
        (left, there, right, back),
        (right, back, left, there),
    ):
        free = 0
        for imm in range(int(rng.integers(1, 6))):
            page_bytes = int(rng.choice([1, 24, 64, 100, 256, 4096]))
            shift = int(rng.integers(0, 2)) * int(rng.integers(0, page_bytes))
            free = -(-free // page_bytes) * page_bytes
            count = min(int(rng.integers(1, 20)), (128 * KIB - free - shift) // page_bytes)
            if count < 1:
                continue
            dst = free + shift + rng.permutation(count) * page_bytes
            src = 128 * KIB + rng.integers(0, 128 * KIB // page_bytes - 1, count) * page_bytes
            free += (count + 1) * page_bytes
            target.engine.expect(target_peer, imm, count)
            for s, d in zip(src, dst, strict=True):
                wanted[target][d : d + page_bytes] = wanted[source][s : s + page_bytes]
            tickets[source].append(
                write_pages(
                    source.engine,
                    peer,
                    source.region,
                    target.region.descriptor,
                    page_bytes,
                    src,
                    dst,
                    imm,
                )
            )
    world.run(
        lambda: (
            len(left.reached) == len(tickets[right]) and len(right.reached) == len(tickets[left])
        )
    )
    world.run(lambda: all(len(node.ended) == len(tickets[node]) for node in (left, right)))
    for node in (left, right):
        assert sorted(node.ended) == tickets[node]
        np.testing.assert_array_equal(node.bytes, wanted[node])


def test_an_imm_is_reached_at_its_count_and_not_before(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 10)
    owner.engine.expect(back, 2, 11)
    for imm in (1, 2):
        for part in range(2):  # an imm may span tickets
            pages = np.arange(5) * 64 + part * 320
            write_pages(
                writer.engine, there, writer.region, owner.region.descriptor, 64, pages, pages, imm
            )
    world.run(lambda: owner.reached and len(writer.ended) == 4)
    world.rounds()
    assert owner.reached == [1]
    write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 64, 2)
    world.run(lambda: len(owner.reached) == 2)
    write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 64, 1)
    world.rounds()
    assert owner.reached == [1, 2]


def test_bytes_are_there_when_the_imm_is_reached(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    writer.bytes[:] = 1
    for imm in range(50):
        owner.engine.expect(back, imm, 3)
        at = np.arange(3) * 1000 + imm * 4000
        write_pages(writer.engine, there, writer.region, owner.region.descriptor, 900, at, at, imm)
    seen = set()
    end = time.monotonic() + DEADLINE_SECONDS
    while len(seen) < 50 and time.monotonic() < end:
        writer.poll()
        for event in owner.poll():
            assert isinstance(event, ImmReached)
            seen.add(event.imm)
            for at in np.arange(3) * 1000 + event.imm * 4000:
                assert owner.bytes[at : at + 900].all()
                assert not owner.bytes[at + 900 : at + 1000].any()
    assert len(seen) == 50


def test_only_the_expected_peer_counts(world):
    first, second, owner = world.node(), world.node(), world.node()
    first_there, first_back = world.connect(first, owner)
    second_there, second_back = world.connect(second, owner)
    owner.engine.expect(first_back, 5, 2)
    owner.engine.expect(second_back, 6, 1)
    two = np.array([0, 64])
    for imm in (5, 6):
        write_pages(
            second.engine, second_there, second.region, owner.region.descriptor, 64, two, two, imm
        )
    world.run(lambda: owner.reached == [6])
    world.rounds()
    assert owner.reached == [6]
    write_pages(first.engine, first_there, first.region, owner.region.descriptor, 64, two, two, 5)
    world.run(lambda: owner.reached == [6, 5])


def test_one_imm_in_both_directions_is_two_things(world):
    left, right = world.node(), world.node()
    there, back = world.connect(left, right)
    left.engine.expect(there, 3, 1)
    right.engine.expect(back, 3, 1)
    write(left.engine, there, left.region, 0, right.region.descriptor, 0, 8, 3)
    world.run(lambda: right.reached == [3])
    assert left.reached == []
    write(right.engine, back, right.region, 0, left.region.descriptor, 0, 8, 3)
    world.run(lambda: left.reached == [3])


def test_lower_fires_when_enough_is_there(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 5)
    owner.engine.expect(back, 2, 5)
    two = np.array([0, 64])
    write_pages(writer.engine, there, writer.region, owner.region.descriptor, 64, two, two, 1)
    world.run(lambda: writer.ended)
    world.rounds()
    owner.engine.lower(1, 3)
    assert owner.poll(0) == []
    owner.engine.lower(1, 2)
    world.run(lambda: owner.reached == [1])
    owner.engine.lower(2, 0)
    assert owner.poll(DEADLINE_SECONDS) == [ImmReached(imm=2)]
    owner.engine.lower(2, 0)
    assert owner.poll(0) == []


def test_counts_of_zero_and_used_imms_are_errors(world):
    node = world.node()
    with pytest.raises(ValueError, match="count"):
        node.engine.expect(1, 1, 0)
    node.engine.expect(1, 4, 1)
    for imm in (4, 3):
        with pytest.raises(ValueError, match=f"imm {imm}"):
            node.engine.expect(1, imm, 1)


def test_offsets_may_be_changed_after_posting(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    writer.bytes[:64] = 1
    owner.engine.expect(back, 1, 2)
    offsets = np.array([0, 64]), np.array([64, 128])
    write_pages(writer.engine, there, writer.region, owner.region.descriptor, 64, *offsets, 1)
    for array in offsets:
        array[:] = 2**40
    world.run(lambda: owner.reached == [1])
    assert owner.bytes[64:128].all()


def test_one_write_larger_than_any_batch(world):
    writer, owner = world.node(11 * MIB), world.node(11 * MIB)
    there, back = world.connect(writer, owner)
    writer.bytes[:] = noise(11 * MIB)
    owner.engine.expect(back, 1, 2)
    for at, nbytes in ((5, 9 * MIB + 3), (10 * MIB, 1)):
        write(writer.engine, there, writer.region, at + 7, owner.region.descriptor, at, nbytes, 1)
    world.run(lambda: owner.reached == [1])
    np.testing.assert_array_equal(owner.bytes[5 : 9 * MIB + 8], writer.bytes[12 : 9 * MIB + 15])
    assert not owner.bytes[:5].any()
    assert not owner.bytes[9 * MIB + 8 : 10 * MIB].any()


# --- Withdrawing, refusing ---


@pytest.mark.parametrize("polls", [0, 1, 2, 3])
def test_withdrawn_writes_never_land_and_posted_ones_all_count(world, polls):
    page = 64 * KIB
    writer, owner = world.node(16 * MIB), world.node(16 * MIB)
    there, back = world.connect(writer, owner)
    writer.bytes[:] = 1
    owner.engine.expect(back, 9, 256)
    order = shuffled(256, page)
    tickets = [
        write_pages(
            writer.engine, there, writer.region, owner.region.descriptor, page, part, part, 9
        )
        for part in np.split(order, 4)
    ]
    for _ in range(polls):
        writer.poll()
    still_open = [ticket for ticket in tickets if ticket not in writer.ended]
    posted = writer.engine.withdraw(still_open)
    assert posted is not None
    posted += 64 * (4 - len(still_open))
    world.run(lambda: len(writer.ended) == 4)
    world.rounds()
    assert sorted(writer.ended) == tickets
    owner.engine.lower(9, posted)
    if posted < 256:
        world.run(lambda: owner.reached == [9])
    pages = owner.bytes.reshape(256, page)
    assert pages.all(axis=1).sum() == pages.any(axis=1).sum() == posted


def test_other_tickets_survive_a_withdrawal(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 4)
    pages = np.arange(4) * 64
    dropped, kept = (
        write_pages(
            writer.engine, there, writer.region, owner.region.descriptor, 64, pages, pages, imm
        )
        for imm in (0, 1)
    )
    assert writer.engine.withdraw([dropped]) == 0
    world.run(lambda: owner.reached == [1] and sorted(writer.ended) == [dropped, kept])


@pytest.mark.parametrize(
    ("page_bytes", "src", "dst"),
    [
        (64, [0, -1], [0, 64]),
        (64, [0, 64], [-64, 64]),
        (64, [0, MIB - 63], [0, 64]),
        (64, [0, 64], [0, MIB - 63]),
        (64, [2**62, 0], [0, 64]),
        (MIB + 1, [0], [0]),
    ],
)
def test_writes_out_of_bounds_post_nothing(world, page_bytes, src, dst):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    writer.bytes[:] = 1
    owner.engine.expect(back, 1, 1)
    with pytest.raises(TransferError, match="offset"):
        write_pages(
            writer.engine,
            there,
            writer.region,
            owner.region.descriptor,
            page_bytes,
            np.array(src),
            np.array(dst),
            1,
        )
    world.rounds()
    assert not owner.bytes.any()
    assert owner.reached == writer.ended == []
    write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 64, 1)
    world.run(lambda: owner.reached == [1])


def test_writes_that_make_no_sense_post_nothing(real_world):
    writer, owner = real_world.node(), real_world.node()
    there, _ = real_world.connect(writer, owner)
    one, two, none = np.array([0]), np.array([0, 8]), np.array([], dtype=np.int64)
    good = owner.region.descriptor
    for dst, nbytes, sources, destinations, imm in (
        (good, 8, one, two, 1),
        (good, 8, none, none, 1),
        (good, 0, one, one, 1),
        (good, -8, one, one, 1),
        (good, 8, one, one, -1),
        (good, 8, one, one, 2**32),
        (-1, 8, one, one, 1),
        (1, 8, one, one, 1),
        (2**70, 8, one, one, 1),
    ):
        with pytest.raises(TransferError):
            write_pages(
                writer.engine, there, writer.region, dst, nbytes, sources, destinations, imm
            )
    with pytest.raises(TransferError):
        write(writer.engine, there, owner.region, 0, good, 0, 8, 1)
    real_world.rounds()
    assert writer.ended == []


def test_a_refused_write_names_the_offset_and_the_limits(real_world):
    writer, owner = real_world.node(), real_world.node(1000)
    there, _ = real_world.connect(writer, owner)
    with pytest.raises(TransferError, match=r"destination offset 937: 64 bytes.*1000.*0 to 936"):
        write(writer.engine, there, writer.region, 0, owner.region.descriptor, 937, 64, 1)


def test_a_region_that_is_a_source_alone_is_written_from_and_never_to(world):
    """Its neighbours keep their numbers."""
    writer, owner = world.node(), world.node()
    source = owner.register(writable=False)
    last = owner.register()
    there, back = world.connect(writer, owner)
    with pytest.raises(TransferError, match=r"source alone|none that the peer lets us write to"):
        write(writer.engine, there, writer.region, 0, source.descriptor, 0, 8, 1)
    owner.bytes[:8] = 7
    writer.engine.expect(there, 2, 1)
    write(owner.engine, back, source, 0, writer.region.descriptor, 64, 8, 2)
    world.run(lambda: writer.reached == [2])
    owner.engine.expect(back, 3, 1)
    write(writer.engine, there, writer.region, 64, last.descriptor, 128, 8, 3)
    world.run(lambda: owner.reached == [3])
    assert owner.bytes.sum() == 2 * 8 * 7


# --- Messages and the end of a peer ---


def test_messages_keep_their_order_both_ways_and_may_be_large(world):
    left, right = world.node(), world.node()
    there, back = world.connect(left, right)
    sent = [b"%d" % i for i in range(200)] + [noise(3 * MIB).tobytes(), b"last"]
    for data in sent:
        left.engine.send(there, data)
        right.engine.send(back, data)
    world.run(lambda: len(left.of(MessageReceived)) == len(sent))
    world.run(lambda: len(right.of(MessageReceived)) == len(sent) + 1)
    assert [event.data for event in left.of(MessageReceived)] == sent
    assert [event.data for event in right.of(MessageReceived)][1:] == sent
    assert {event.peer for event in left.of(MessageReceived)} == {there}


def test_a_closed_peer_is_lost_once_then_fenced_and_hears_nothing_more(world):
    left, right = world.node(), world.node()
    there, _ = world.connect(left, right)
    pages = np.arange(8) * 64
    left.engine.close_peer(there, "enough")
    left.engine.send(there, b"dropped")
    write_pages(left.engine, there, left.region, right.region.descriptor, 64, pages, pages, 1)
    world.run(lambda: left.of(PeerFenced) and right.of(PeerFenced))
    left.engine.close_peer(there, "again")
    left.engine.close_peer(999, "unknown")
    world.rounds()
    assert left.events == [PeerLost(peer=there, why="enough"), PeerFenced(peer=there)]
    assert [type(event) for event in right.events[1:]] == [PeerLost, PeerFenced]
    assert not right.bytes.any()


def test_nothing_lands_after_the_fence(world):
    """The writer has much to write and does not know yet that it was fenced."""
    page = 64 * KIB
    writer, owner = world.node(16 * MIB), world.node(16 * MIB)
    there, back = world.connect(writer, owner)
    pages = shuffled(256, page)
    write_pages(writer.engine, there, writer.region, owner.region.descriptor, page, pages, pages, 1)
    writer.poll()
    owner.engine.close_peer(back, "enough")
    end = time.monotonic() + DEADLINE_SECONDS
    while not owner.of(PeerFenced):
        assert time.monotonic() < end
        owner.poll(0.001)
    owner.bytes[:] = 0xEE
    world.run(lambda: writer.of(PeerLost))
    assert (owner.bytes == 0xEE).all()


def test_an_imm_of_a_lost_peer_is_never_reached(world):
    left, right = world.node(), world.node()
    there, back = world.connect(left, right)
    right.engine.expect(back, 1, 2)
    left.engine.close_peer(there, "done")
    world.run(lambda: right.of(PeerFenced))
    right.engine.lower(1, 0)
    world.rounds()
    assert right.reached == []


def test_closing_an_engine_is_seen_by_its_peers(world):
    left, right, third = world.node(), world.node(), world.node()
    there, _ = world.connect(left, right)
    world.connect(third, right)
    right.engine.close()
    right.engine.close()
    world.nodes.remove(right)
    world.run(lambda: left.of(PeerFenced) and third.of(PeerFenced))
    assert [event.peer for event in left.of(PeerLost)] == [there]
    right.close()


def test_losing_one_peer_leaves_the_others(world):
    first, second, owner = world.node(), world.node(), world.node()
    first_there, first_back = world.connect(first, owner)
    second_there, second_back = world.connect(second, owner)
    owner.engine.expect(first_back, 1, 1)
    owner.engine.expect(second_back, 2, 1)
    first.engine.close_peer(first_there, "done")
    world.run(lambda: owner.of(PeerFenced))
    write(second.engine, second_there, second.region, 0, owner.region.descriptor, 0, 8, 2)
    world.run(lambda: owner.reached == [2])
    assert [event.peer for event in owner.of(PeerLost)] == [first_back]


def test_a_second_connection_is_a_new_peer(world):
    left, right = world.node(), world.node()
    there, back = world.connect(left, right)
    left.engine.close_peer(there, "restart")
    world.run(lambda: left.of(PeerFenced) and right.of(PeerFenced))
    again, again_back = world.connect(left, right)
    assert again > there
    assert again_back > back
    right.engine.expect(again_back, 1, 1)
    write(left.engine, again, left.region, 0, right.region.descriptor, 0, 8, 1)
    world.run(lambda: right.reached == [1])


# --- Real sockets ---


def test_an_engine_can_write_as_soon_as_it_received_a_message(real_world):
    """Also the very first one, from either side."""
    left, right = real_world.node(), real_world.node()
    there = left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    left.engine.send(there, b"%d" % left.region.descriptor)
    real_world.run(lambda: right.of(MessageReceived))
    first = right.of(MessageReceived)[0]
    left.engine.expect(there, 1, 1)
    write(right.engine, first.peer, right.region, 0, int(first.data), 0, 8, 1)
    right.engine.send(first.peer, b"%d" % right.region.descriptor)
    real_world.run(lambda: left.of(MessageReceived))
    right.engine.expect(first.peer, 1, 1)
    answer = left.of(MessageReceived)[0]
    write(left.engine, there, left.region, 0, int(answer.data), 0, 8, 1)
    real_world.run(lambda: left.reached == right.reached == [1])


def test_wake_ends_a_wait_from_another_thread(real_world):
    node = real_world.node()
    node.engine.wake()
    start = time.monotonic()
    node.poll(2 * DEADLINE_SECONDS)
    waker = threading.Timer(0.05, node.engine.wake)
    waker.start()
    node.poll(2 * DEADLINE_SECONDS)
    waker.join()
    assert time.monotonic() - start < DEADLINE_SECONDS
    node.engine.close()
    node.engine.wake()


def test_a_port_where_nobody_listens(real_world):
    node = real_world.node()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host, port = unused.getsockname()
        peer = node.engine.connect(host, port)
        node.engine.send(peer, b"hello")
        real_world.run(lambda: node.of(PeerFenced))
    (lost,) = node.of(PeerLost)
    assert lost.peer == peer
    assert f"{host}:{port}: Connection refused" in lost.why


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "within 0.2 s"),
        (b"\x08\x00\x00\x00half", "within 0.2 s"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "expected 1 to"),
        (struct.pack("<I", 2**32 - 1), "expected 1 to"),
        (struct.pack("<I", 0), "expected 1 to"),
    ],
)
def test_a_port_that_is_no_engine(real_world, data, why):
    # What is wrong is found however late it is read.
    node = real_world.node(**({"opening_timeout": 0.2} if "within" in why else {}))
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.engine.connect(*server.getsockname())
        stranger, _ = server.accept()
        with stranger:
            stranger.sendall(data)
            real_world.run(lambda: node.of(PeerFenced))
    assert why in node.of(PeerLost)[0].why


def was_closed(tcp):
    """Whether the other side ended it; what it said before is skipped."""
    try:
        return tcp.recv(1 << 16, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_strangers_at_the_door_disturb_nobody(real_world):
    skipped = [0.0]
    writer, owner = real_world.node(), real_world.node()
    owner.engine.clock = lambda: time.monotonic() + skipped[0]
    there, back = real_world.connect(writer, owner)
    with contextlib.ExitStack() as stack:
        strangers = []
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 0), b"\x01"):
            strangers.append(stack.enter_context(socket.create_connection(owner.address)))
            strangers[-1].sendall(data)
        real_world.rounds()
        owner.engine.expect(back, 1, 1)
        write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
        real_world.run(lambda: owner.reached == [1])
        skipped[0] = 1000.0  # past the time for an opening
        real_world.run(lambda: all(was_closed(stranger) for stranger in strangers))
    real_world.run(lambda: len(owner.of(PeerFenced)) == len(strangers))
    assert back not in {event.peer for event in owner.of(PeerLost)}


def test_a_taken_port_is_an_error_that_names_it(real_world):
    first, second = real_world.node(), real_world.node()
    host, port = first.engine.listen("127.0.0.1", 0)
    with pytest.raises(TransferError, match=f"{host}:{port}"):
        second.engine.listen(host, port)


def test_opening_and_closing_leaks_no_descriptor(transport):
    def once(fail):
        with contextlib.closing(World(REAL_TRANSPORTS[transport].start())) as world:
            left, right = world.node(), world.node()
            there, _ = world.connect(left, right)
            pages = np.arange(16) * 64
            write_pages(
                left.engine, there, left.region, right.region.descriptor, 64, pages, pages, 1
            )
            if fail:
                raise RuntimeError("in the middle of a transfer")
            left.engine.close_peer(there, "done")
            world.run(lambda: right.of(PeerFenced))

    once(fail=False)
    before = open_descriptors()
    for i in range(50):
        with contextlib.suppress(RuntimeError):
            once(fail=i % 2 == 1)
    assert open_descriptors() == before


# --- Other processes ---

in_processes = pytest.mark.parametrize("transport", PROCESS_TRANSPORTS, indirect=True)

CHILD_PAGES, CHILD_PAGE_BYTES = 64, 4096


def child_main(transport, address, pipe, interruption):
    """Writes 0x11 over the whole region that the first message names; then says how it ended.

    With an `interruption` it sends itself that signal in the middle of the copy.
    """

    def inside():
        pipe.send("inside")
        if interruption is not None:
            os.kill(os.getpid(), interruption)

    with contextlib.closing(World(None)) as world:
        child = Node(REAL_TRANSPORTS[transport].interrupted(inside), CHILD_PAGES * CHILD_PAGE_BYTES)
        world.nodes.append(child)
        child.bytes[:] = 0x11
        peer = child.engine.connect(*address)
        child.engine.send(peer, b"hello")
        world.run(lambda: child.of(MessageReceived))
        pages = shuffled(CHILD_PAGES, CHILD_PAGE_BYTES)
        write_pages(
            child.engine,
            peer,
            child.region,
            int(child.of(MessageReceived)[0].data),
            CHILD_PAGE_BYTES,
            pages,
            pages,
            1,
        )
        world.run(lambda: child.of(PeerLost), seconds=60 * PATIENCE)
        pipe.send("lost")


class Child:
    """A writer in a process of its own, connected to `owner` and told where to write."""

    def __init__(self, transport, world, interruption=None):
        self.owner = world.node(CHILD_PAGES * CHILD_PAGE_BYTES)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        address = self.owner.engine.listen("127.0.0.1", 0)
        self.process = context.Process(
            target=child_main, args=(transport, address, theirs, interruption), daemon=True
        )
        self.process.start()
        theirs.close()
        world.run(lambda: self.owner.of(MessageReceived), seconds=30 * PATIENCE)
        self.peer = self.owner.of(MessageReceived)[0].peer
        self.owner.engine.expect(self.peer, 1, CHILD_PAGES)
        self.owner.engine.send(self.peer, b"%d" % self.owner.region.descriptor)

    def wait_for(self, world, word):
        world.run(self.pipe.poll)
        assert self.pipe.recv() == word

    @property
    def is_stopped(self):
        return (
            Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )

    def kill(self):
        self.process.kill()
        self.process.join(DEADLINE_SECONDS)
        self.process.close()


@pytest.fixture
def start_child(transport, real_world):
    children = []

    def start(**options):
        children.append(Child(transport, real_world, **options))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@in_processes
def test_two_processes(real_world, start_child):
    child = start_child()
    real_world.run(lambda: child.owner.reached == [1])
    assert (child.owner.bytes == 0x11).all()
    child.owner.engine.close_peer(child.peer, "thank you")
    real_world.run(lambda: child.owner.of(PeerFenced))
    child.wait_for(real_world, "inside")
    child.wait_for(real_world, "lost")


@in_processes
def test_a_process_killed_in_the_middle_of_a_copy(real_world, start_child):
    child = start_child(interruption=signal.SIGKILL)
    real_world.run(lambda: child.owner.of(PeerFenced))
    assert [type(event) for event in child.owner.events[1:]] == [PeerLost, PeerFenced]
    assert child.owner.reached == []


@in_processes
def test_a_process_killed_while_idle(real_world, start_child):
    child = start_child()
    real_world.run(lambda: child.owner.reached == [1])
    child.process.kill()
    real_world.run(lambda: child.owner.of(PeerFenced))


@in_processes
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_process_stopped_in_the_middle_of_a_copy(transport, real_world, start_child, end):
    child = start_child(interruption=signal.SIGSTOP)
    child.wait_for(real_world, "inside")
    real_world.run(lambda: child.is_stopped)
    owner = child.owner
    owner.engine.close_peer(child.peer, "silent for too long")
    assert owner.poll()[0] == PeerLost(peer=child.peer, why="silent for too long")
    for _ in range(30):
        owner.poll(0.002)
    if not REAL_TRANSPORTS[transport].fences_stopped:
        assert not owner.of(PeerFenced)
        assert 0 < (owner.bytes == 0x11).sum() < owner.bytes.size
        os.kill(child.process.pid, end)
    real_world.run(lambda: owner.of(PeerFenced))
    owner.bytes[:] = 0xEE
    if end == signal.SIGCONT:
        os.kill(child.process.pid, end)
        child.wait_for(real_world, "lost")
    assert (owner.bytes == 0xEE).all()
    assert owner.reached == []
