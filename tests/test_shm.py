"""What only shm has: its lease, its Unix socket, its copying, and peers that lie about either."""

import contextlib
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.shared_memory import SharedMemory
from disagg.transfer import shm
from disagg.transfer.control import Opened
from disagg.transfer.interface import (
    ImmReached,
    Memory,
    MessageReceived,
    PeerFenced,
    PeerLost,
    TransferError,
    WritesDone,
)
from disagg.transfer.lease import HeldLease, Lease
from disagg.transfer.page_copy import copy_pages
from disagg.transfer.queued_engine import FENCE_INTERVAL_SECONDS
from disagg.transfer.shm import BATCH_BYTES, MAX_RECORDS
from tests.engines import OpeningControl, shm_engine
from tests.test_transfer_conformance import KIB, MIB, World, noise, shuffled


@pytest.fixture
def world():
    with contextlib.closing(World(shm_engine)) as world:
        yield world


# --- Copying ---


@settings(deadline=None)
@given(
    page_bytes=st.sampled_from([1, 3, 64, 1000]),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    shift=st.integers(0, 63),
)
def test_the_two_ways_of_copying_agree(page_bytes, count, seed, shift):
    """A shift of whole pages takes the fast path, any other the simple one."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, page_bytes * 50 + 63, dtype=np.uint8)
    results = []
    src = rng.integers(0, 50, count) * page_bytes
    dst = rng.permutation(50)[:count] * page_bytes
    for moved in (0, shift):
        destination = np.zeros_like(source)
        shifted = np.concatenate((np.zeros(moved, dtype=np.uint8), source[: -moved or None]))
        copy_pages(destination[: source.size], shifted, page_bytes, dst, src + moved)
        results.append(destination)
    wanted = np.zeros_like(source)
    for s, d in zip(src, dst, strict=True):
        wanted[d : d + page_bytes] = source[s : s + page_bytes]
    for result in results:
        np.testing.assert_array_equal(result, wanted)


def test_one_poll_copies_a_bounded_amount_and_peers_take_turns(world):
    writer = world.node(4 * BATCH_BYTES)
    owners = [world.node(4 * BATCH_BYTES) for _ in range(2)]
    writer.bytes[:] = 1
    page = 64 * KIB
    pages = np.arange(4 * BATCH_BYTES // page) * page
    peers = [world.connect(writer, owner)[0] for owner in owners]
    for owner, there in zip(owners, peers, strict=True):
        writer.engine.write_pages(
            there, writer.region, owner.region.descriptor, page, pages, pages, 1
        )
    copied = [[], []]
    for _ in range(8):
        writer.poll(5.0)  # has something to do, so it does not wait
        for seen, owner in zip(copied, owners, strict=True):
            seen.append(int(owner.bytes[::page].sum()) * page // BATCH_BYTES)
    assert copied == [[1, 1, 2, 2, 3, 3, 4, 4], [0, 1, 1, 2, 2, 3, 3, 4]]


def test_a_withdrawal_between_two_batches_says_exactly_what_was_copied(world):
    writer, owner = world.node(16 * MIB), world.node(16 * MIB)
    there, _ = world.connect(writer, owner)
    writer.bytes[:] = 1
    pages = shuffled(256, 64 * KIB)
    ticket = writer.engine.write_pages(
        there, writer.region, owner.region.descriptor, 64 * KIB, pages, pages, 1
    )
    writer.poll()
    assert writer.engine.withdraw([ticket]) == BATCH_BYTES // (64 * KIB)
    assert writer.poll() == [WritesDone(ticket=ticket)]
    assert owner.bytes.sum() == BATCH_BYTES


def test_a_half_copied_huge_write_can_be_withdrawn(world):
    writer, owner = world.node(16 * MIB), world.node(16 * MIB)
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 1)
    ticket = writer.engine.write(there, writer.region, 0, owner.region.descriptor, 0, 16 * MIB, 1)
    writer.poll()
    assert writer.engine.withdraw([ticket]) == 0
    world.run(lambda: writer.ended == [ticket])
    world.rounds()
    assert owner.reached == []


def test_withdrawing_from_a_lost_peer_is_of_unknown_outcome(world):
    writer, owner = world.node(), world.node()
    there, _ = world.connect(writer, owner)
    ticket = writer.engine.write(there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
    writer.engine.close_peer(there, "gone")
    assert writer.engine.withdraw([ticket]) is None
    world.run(lambda: writer.of(PeerFenced))
    assert writer.ended == []


def test_a_reader_that_sleeps_loses_no_notification(world):
    """The socket fills up; what does not fit is kept, in order."""
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    connection = writer.engine._control._connections[there]
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * KIB)
    imm = 0
    while imm < 100 or not connection.unsent:
        owner.engine.expect(back, imm, 1)
        writer.engine.write(there, writer.region, 0, owner.region.descriptor, 0, 1, imm)
        writer.poll()  # one note each
        imm += 1
    world.run(lambda: len(owner.reached) == imm)
    assert owner.reached == list(range(imm))
    world.run(lambda: len(writer.ended) == imm)


def test_one_poll_takes_a_bounded_number_of_tickets(world):
    writer, owner = world.node(), world.node()
    there, _ = world.connect(writer, owner)
    for _ in range(2 * MAX_RECORDS):
        writer.engine.write(there, writer.region, 0, owner.region.descriptor, 0, 1, 1)
    writer.poll()
    assert len(writer.ended) == MAX_RECORDS


def test_what_came_before_the_end_is_reported_before_it(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 1)
    writer.engine.write(there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
    writer.engine.send(there, b"last words")
    world.nodes.remove(owner)
    world.run(lambda: writer.ended)
    writer.engine.close()
    while not owner.of(PeerLost):
        owner.poll(5.0)
    kinds = [type(event) for event in owner.events[1:]]
    assert sorted(map(str, kinds[:-2])) == sorted(map(str, (MessageReceived, ImmReached)))
    assert kinds[-2:] == [PeerLost, PeerFenced]


def test_waiting_gives_up_pythons_lock(world):
    node = world.node()
    start = time.monotonic()
    with contextlib.closing(Counter()) as counter:
        node.poll(0.05)
        counted = counter.count
    assert time.monotonic() - start >= 0.045
    assert counted > 1000


class Counter:
    """A thread that counts as fast as it may."""

    def __init__(self):
        self.count = 0
        self.stop = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stop:
            self.count += 1

    def close(self):
        self.stop = True
        self.thread.join()


# --- Lease ---


@pytest.fixture
def lease():
    with contextlib.closing(Lease()) as lease, contextlib.closing(HeldLease(lease.fd)) as held:
        yield lease, held


def test_a_batch_under_way_holds_the_fence_up(lease):
    owner, writer = lease
    assert writer.begin()
    owner.revoke()
    assert not owner.is_free()
    writer.end()
    assert owner.is_free()
    assert not writer.begin()


def test_no_batch_starts_after_a_revocation(lease):
    owner, writer = lease
    assert writer.begin()
    writer.end()
    owner.revoke()
    assert not writer.begin()
    assert owner.is_free()  # the refused writer kept no lock


def test_death_unlocks(lease):
    """Another process holds the lock and is killed."""
    owner, _ = lease
    program = (
        "import sys, time\n"
        "from disagg.transfer.lease import HeldLease\n"
        f"held = HeldLease({owner.fd})\n"
        "assert held.begin()\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, pass_fds=[owner.fd]
    ) as child:
        assert child.stdout.readline() == b"locked\n"
        owner.revoke()
        assert not owner.is_free()
        child.kill()
        child.wait()
        assert owner.is_free()


def test_the_writer_locks_through_a_file_of_its_own(lease):
    """A passed descriptor shares the owner's lock; through it the owner would see no writer."""
    owner, _ = lease
    passed = os.dup(owner.fd)
    with contextlib.closing(HeldLease(passed)) as writer:
        os.close(passed)
        assert writer.begin()
        owner.revoke()
        assert not owner.is_free()


def test_a_lease_that_is_no_file_is_refused():
    reading, writing = os.pipe()
    with pytest.raises(ValueError, match="regular file"):
        HeldLease(reading)
    os.close(reading)
    os.close(writing)


def test_a_writer_whose_lease_is_revoked_takes_the_peer_for_lost(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    owner.engine._peers[back].link.lease.revoke()
    writer.engine.write(there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
    writer.bytes[:] = 1
    world.run(lambda: writer.of(PeerLost))
    assert writer.of(PeerLost)[0].why == "the peer took its memory back"
    assert writer.ended == []
    assert not owner.bytes.any()


def test_fences_are_looked_at_on_a_timer(world):
    """A held lock costs one look each interval, not one each poll."""

    class Clock:
        now = 50.0

        def __call__(self):
            return self.now

    clock = Clock()
    writer, owner = world.node(), world.node(clock=clock)
    there, back = world.connect(writer, owner)
    held = writer.engine._peers[there].link.held_lease
    assert held.begin()
    owner.engine.close_peer(back, "enough")
    owner.poll()
    owner.poll()
    held.end()
    assert owner.poll() == []
    clock.now += FENCE_INTERVAL_SECONDS
    assert owner.poll() == [PeerFenced(peer=back)]
    assert not held.begin()


def test_a_poll_that_waits_looks_at_fences_too(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    held = writer.engine._peers[there].link.held_lease
    assert held.begin()
    owner.engine.close_peer(back, "enough")
    start = time.monotonic()
    unlock = threading.Timer(0.05, held.end)
    unlock.start()
    while not owner.of(PeerFenced):
        owner.poll(30.0)
    unlock.join()
    assert time.monotonic() - start < 15.0


# --- Peers that lie, over a control connection of the right transport ---


class Impostor:
    """Opens like shm, then does on the Unix socket whatever a test says."""

    def __init__(self, info):
        self.token = secrets.token_bytes(16)
        self.control = OpeningControl(
            lambda: {"shm": info(self.token)}, transports=["shm"], epoch=5
        )
        self.unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.their_token = b""
        self.name = None

    def dial(self, victim):
        """Connect by TCP; afterwards the victim waits on its Unix socket."""
        self.control.connect(*victim.engine.listen("127.0.0.1", 0))
        end = time.monotonic() + 5
        while self.name is None:
            assert time.monotonic() < end
            victim.poll()
            for event in self.control.poll(0.001):
                if isinstance(event, Opened):
                    self.their_token, self.name, _ = msgspec.msgpack.decode(event.offers["shm"])
                    self.peer = event.peer
        self.unix.connect(f"\0{self.name}")

    def introduce(self, extents=(), fds=(), token=None, lease=True):
        with contextlib.closing(Lease()) as own:
            packet = msgspec.msgpack.encode([token or self.their_token, list(extents)])
            socket.send_fds(self.unix, [packet], [own.fd] * lease + list(fds))

    def note(self, data):
        """As from a link that is ready."""
        self.control.ready(self.peer)
        self.control.send_note(self.peer, data)

    def close(self):
        self.control.close()
        self.unix.close()


@pytest.fixture
def impostor():
    with contextlib.closing(
        Impostor(lambda token: msgspec.msgpack.encode([token, None, ""]))
    ) as made:
        yield made


def fate(world, impostor, node):
    """Why the node lost the impostor; it was never announced, so only the control knows."""
    reasons = []
    lose = node.engine._control._lose

    def spy(connection, why):
        reasons.append(why)
        lose(connection, why)

    node.engine._control._lose = spy
    end = time.monotonic() + 5
    while node.engine._peers:
        assert time.monotonic() < end, "the impostor was not thrown out"
        node.poll(0.001)
        impostor.control.poll(0)
    assert node.events == []
    return reasons[0]


def test_an_honest_impostor_is_a_peer(world, impostor):
    """So that the refusals below are for their own reasons."""
    node = world.node()
    impostor.dial(node)
    with SharedMemory(4096) as memory:
        impostor.introduce([[4096, 0, 4096]], [memory.fd])
        world.rounds(5)
        (link,) = [peer.link for peer in node.engine._peers.values()]
        assert link.regions[0].nbytes == 4096
        impostor.note(struct.pack("=II", 7, 1))
        node.engine.expect(link.peer, 7, 1)
        world.run(lambda: node.reached == [7])


@pytest.mark.parametrize(
    ("extent", "why"),
    [
        ([8192, 0, 8192], "announced memory of 8192 bytes and passed a descriptor of 4096"),
        ([4096, 0, 4097], "outside its memory"),
        ([4096, -1, 16], "outside its memory"),
        ([4096, 4096, 1], "outside its memory"),
        ([4096, 0, 0], "outside its memory"),
        ([2**64 - 1, 0, 1], "announced memory of 18446744073709551615"),
        ([4096, 2**64 - 1, 1], "outside its memory"),
        (["4096", 0, 1], "malformed introduction"),
        ([4096, 0], "malformed introduction"),
    ],
)
def test_a_peer_that_lies_about_its_memory_is_lost(world, impostor, extent, why):
    node = world.node()
    impostor.dial(node)
    with SharedMemory(4096) as memory:
        impostor.introduce([extent], [memory.fd])
        assert why in fate(world, impostor, node)


def test_a_peer_that_passes_something_else_than_memory_is_lost(world, impostor):
    node = world.node()
    impostor.dial(node)
    impostor.introduce([[0, 0, 16]], [impostor.unix.fileno()])
    assert "announced memory of 0 bytes" in fate(world, impostor, node)


def test_a_peer_that_could_shrink_its_memory_is_lost(world, impostor):
    node = world.node()
    impostor.dial(node)
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    impostor.introduce([[4096, 0, 4096]], [fd])
    assert "could shrink" in fate(world, impostor, node)
    os.close(fd)


@pytest.mark.parametrize("missing", ["lease", "region", "all"])
def test_a_peer_that_passes_too_few_descriptors_is_lost(world, impostor, missing):
    node = world.node()
    impostor.dial(node)
    with SharedMemory(4096) as memory:
        fds = [memory.fd] * (missing == "lease")
        impostor.introduce([[4096, 0, 4096]], fds, lease=missing == "region")
        assert "1 regions and a lease, but passed" in fate(world, impostor, node)


def test_a_peer_whose_lease_is_no_file_is_lost(world, impostor):
    node = world.node()
    impostor.dial(node)
    impostor.introduce([], [impostor.unix.fileno()], lease=False)
    assert "regular file" in fate(world, impostor, node)


def test_a_wrong_token_is_refused(world, impostor):
    node = world.node()
    impostor.dial(node)
    impostor.introduce(token=b"0" * 16)
    assert "wrong token" in fate(world, impostor, node)


def test_a_hang_up_instead_of_an_introduction(world, impostor):
    node = world.node()
    impostor.dial(node)
    impostor.unix.close()
    assert "closed the Unix socket" in fate(world, impostor, node)


@pytest.mark.parametrize("data", [b"x", bytes(9), bytes(4097), bytes(64 * KIB + 1)])
def test_a_malformed_note_ends_the_connection(world, impostor, data):
    node = world.node()
    impostor.dial(node)
    impostor.introduce()
    world.rounds(5)
    impostor.note(data)
    assert f"malformed note of {len(data)} bytes" in fate(world, impostor, node)


@settings(max_examples=30, deadline=None)
@given(packet=st.binary(min_size=1, max_size=64), introduced=st.booleans())
def test_no_packet_makes_poll_raise(packet, introduced):
    info = msgspec.msgpack.encode([b"token", None, ""])
    with contextlib.closing(World(shm_engine)) as world:
        with contextlib.closing(Impostor(lambda _: info)) as impostor:
            node = world.node(4096)
            impostor.dial(node)
            if introduced:
                impostor.introduce()
            world.rounds(2)
            with contextlib.suppress(BrokenPipeError):  # introduced: nobody listens any more
                impostor.unix.send(packet)
                impostor.unix.send(packet)
            impostor.note(packet)
            world.rounds(4)


@settings(max_examples=30, deadline=None)
@given(info=st.binary(max_size=40))
def test_no_opening_makes_poll_raise(info):
    with contextlib.closing(World(shm_engine)) as world:
        with contextlib.closing(Impostor(lambda _: info)) as impostor:
            node = world.node(4096)
            impostor.control.connect(*node.engine.listen("127.0.0.1", 0))
            for _ in range(4):
                node.poll(0.0005)
                impostor.control.poll(0)


@pytest.mark.parametrize("name", ["disagg-no-such-name", "x" * 200, None])
def test_an_unreachable_unix_socket_means_another_host(world, name):
    node = world.node()
    info = msgspec.msgpack.encode([b"token", name, ""])
    with contextlib.closing(Impostor(lambda _: info)) as impostor:
        peer = node.engine.connect(*impostor.control.listen("127.0.0.1", 0))
        while not node.of(PeerFenced):
            node.poll(0.001)
            impostor.control.poll(0)
    wanted = "not on the same host" if name else "expected the name of a Unix socket"
    assert wanted in node.of(PeerLost)[0].why
    assert node.of(PeerLost)[0].peer == peer


def test_another_users_socket_is_refused(world, monkeypatch):
    dialler, listener = world.node(), world.node()
    monkeypatch.setattr(shm, "_uid_of", lambda unix: os.getuid() + 1)
    dialler.engine.connect(*listener.engine.listen("127.0.0.1", 0))
    world.run(lambda: dialler.of(PeerFenced))
    assert f"ours is {os.getuid()}, got {os.getuid() + 1}" in dialler.of(PeerLost)[0].why


def test_another_users_call_leaves_the_door_open(world, monkeypatch):
    """Names of abstract sockets are no secret."""
    dialler, listener = world.node(), world.node()
    answers = [os.getuid() + 1, os.getuid()]
    dialler.engine.connect(*listener.engine.listen("127.0.0.1", 0))
    while not listener.engine._peers:
        dialler.poll(0.001)  # says its opening
        listener.poll(0.001)  # answers it
    (link,) = [peer.link for peer in listener.engine._peers.values()]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(link._unix.getsockname())
        while dialler.engine._peers[1].link.lease is None:
            dialler.poll(0.01)  # it calls after the stranger
        monkeypatch.setattr(
            shm, "_uid_of", lambda unix: answers.pop(0) if len(answers) > 1 else answers[0]
        )
        listener.poll(1.0)
        listener.poll(1.0)
        assert answers == [os.getuid()]
        dialler.engine.send(1, b"hello")
        world.run(lambda: listener.of(MessageReceived))


# --- Registering ---


def test_memory_without_a_descriptor_is_refused():
    with contextlib.closing(shm_engine()) as engine:
        with pytest.raises(TransferError, match="file descriptor, got none"):
            engine.register(Memory(address=1, nbytes=8))


def test_memory_beyond_its_file_and_late_memory_are_refused(world):
    node = world.node()
    memory = node.region.memory
    beyond = Memory(address=memory.address, nbytes=MIB, fd=memory.fd, fd_offset=1)
    with pytest.raises(TransferError, match="memory offset 1"):
        node.engine.register(beyond)
    node.engine.listen("127.0.0.1", 0)
    with pytest.raises(TransferError, match="before listen and connect"):
        node.engine.register(memory)


def test_regions_inside_one_file(world):
    """An offset that no mapping could start at, and a second region behind the first."""
    writer, owner = world.node(), world.node()
    base = owner.region.memory
    inner = owner.engine.register(
        Memory(address=base.address + 100, nbytes=50, fd=base.fd, fd_offset=100)
    )
    there, back = world.connect(writer, owner)
    writer.bytes[:] = noise(MIB)
    owner.engine.expect(back, 1, 1)
    with pytest.raises(TransferError, match="region of 50 bytes"):
        writer.engine.write(there, writer.region, 0, inner.descriptor, 1, 50, 1)
    writer.engine.write(there, writer.region, 0, inner.descriptor, 0, 50, 1)
    world.run(lambda: owner.reached == [1])
    np.testing.assert_array_equal(owner.bytes[100:150], writer.bytes[:50])
    assert not owner.bytes[:100].any()
    assert not owner.bytes[150:].any()
