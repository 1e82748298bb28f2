"""What only shm has: its lease, its copying, and peers that lie about what they grant."""

import contextlib
import os
import socket
import stat
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
from disagg.transfer.interface import (
    ImmReached,
    Memory,
    MessageReceived,
    PeerFenced,
    PeerLost,
    TransferError,
    WritesDone,
)
from disagg.transfer.lease import HeldLease, Lease, OpenFile
from disagg.transfer.shm import BATCH_BYTES, MAX_RECORDS, copy_pages, host_identity
from tests.engines import Opened, OpeningControl, link_of, shm_engine, write, write_pages
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
        copy_pages(shifted, destination[: source.size], page_bytes, (src + moved, dst))
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
        write_pages(
            writer.engine, there, writer.region, owner.region.descriptor, page, pages, pages, 1
        )
    copied = [[], []]
    for _ in range(8):
        writer.poll(5.0)  # has something to do, so it does not wait
        for seen, owner in zip(copied, owners, strict=True):
            seen.append(int(owner.bytes[::page].sum()) * page // BATCH_BYTES)
    assert copied == [[1, 1, 2, 2, 3, 3, 4, 4], [0, 1, 1, 2, 2, 3, 3, 4]]


def test_a_withdrawal_between_two_batches_says_exactly_what_was_copied(world):
    writer, owner = world.node(4 * BATCH_BYTES), world.node(4 * BATCH_BYTES)
    there, _ = world.connect(writer, owner)
    writer.bytes[:] = 1
    pages = shuffled(4 * BATCH_BYTES // (64 * KIB), 64 * KIB)
    ticket = write_pages(
        writer.engine, there, writer.region, owner.region.descriptor, 64 * KIB, pages, pages, 1
    )
    writer.poll()
    assert writer.engine.withdraw([ticket]) == BATCH_BYTES // (64 * KIB)
    assert writer.poll() == [WritesDone(ticket=ticket)]
    assert owner.bytes.sum() == BATCH_BYTES


def test_a_huge_write_is_a_batch_of_its_own(world):
    writer, owner = world.node(2 * BATCH_BYTES), world.node(2 * BATCH_BYTES)
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 1)
    region, nbytes = owner.region.descriptor, 2 * BATCH_BYTES
    first, second = (
        write(writer.engine, there, writer.region, 0, region, 0, nbytes, 1) for _ in range(2)
    )
    writer.bytes[:] = 1
    assert writer.poll() == [WritesDone(ticket=first)]
    assert writer.engine.withdraw([second]) == 0
    world.run(lambda: writer.ended == [first, second] and owner.reached == [1])
    assert owner.bytes.all()


def test_withdrawing_from_a_lost_peer_is_of_unknown_outcome(world):
    writer, owner = world.node(), world.node()
    there, _ = world.connect(writer, owner)
    ticket = write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
    writer.engine.close_peer(there, "gone")
    assert writer.engine.withdraw([ticket]) is None
    world.run(lambda: writer.of(PeerFenced))
    assert writer.ended == []


def test_a_reader_that_sleeps_loses_no_notification(world):
    """The socket fills up; what does not fit is kept, in order."""
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    connection = writer.engine.connections[there]
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * KIB)
    imm = 0
    while imm < 100 or not connection.unsent:
        owner.engine.expect(back, imm, 1)
        write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 1, imm)
        writer.poll()  # one note each
        imm += 1
    world.run(lambda: len(owner.reached) == imm)
    assert owner.reached == list(range(imm))
    world.run(lambda: len(writer.ended) == imm)


def test_one_poll_takes_a_bounded_number_of_tickets(world):
    writer, owner = world.node(), world.node()
    there, _ = world.connect(writer, owner)
    for _ in range(2 * MAX_RECORDS):
        write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 1, 1)
    writer.poll()
    assert len(writer.ended) == MAX_RECORDS


def test_what_came_before_the_end_is_reported_before_it(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 1)
    write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
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


def held_lease(fd):
    """As by another process."""
    return HeldLease(f"/proc/{os.getpid()}/fd/{fd}")


@pytest.fixture
def lease():
    with (
        contextlib.closing(Lease(b"grant")) as lease,
        contextlib.closing(held_lease(lease.fd)) as held,
    ):
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
        f"held = HeldLease('/proc/{os.getpid()}/fd/{owner.fd}')\n"
        "assert held.begin()\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"locked\n"
        owner.revoke()
        assert not owner.is_free()
        child.kill()
        child.wait()
        assert owner.is_free()


def test_the_writer_locks_through_a_file_of_its_own(lease):
    """A copy of a descriptor shares its lock; through it the owner would see no writer."""
    owner, _ = lease
    passed = os.dup(owner.fd)
    with contextlib.closing(held_lease(passed)) as writer:
        os.close(passed)
        assert writer.begin()
        owner.revoke()
        assert not owner.is_free()


def test_a_lease_that_is_no_file_is_refused():
    reading, writing = os.pipe()
    with pytest.raises(ValueError, match="regular file"):
        held_lease(reading)
    os.close(reading)
    os.close(writing)


def test_a_pipe_that_takes_the_place_of_the_file_is_not_opened(monkeypatch):
    """In the moment after it was looked at; the pipe has a writer, so that no open would block."""
    fd = os.memfd_create("place")
    ends = os.pipe()

    def then_swap(look):
        def swapped(path, *how, **more):
            found = look(path, *how, **more)
            os.dup2(ends[0], fd)
            return found

        return swapped

    for look in ("open", "stat"):
        monkeypatch.setattr(os, look, then_swap(getattr(os, look)))
    with OpenFile(f"/proc/self/fd/{fd}", os.O_RDONLY) as file:
        assert stat.S_ISREG(os.fstat(file.fd).st_mode)
    for each in (fd, *ends):
        os.close(each)


def test_a_lease_that_is_no_memory_is_not_read(monkeypatch):
    """Some regular files of procfs block whoever reads them."""
    reads = []
    monkeypatch.setattr(os, "pread", lambda *what: reads.append(what) or b"")
    with HeldLease("/proc/self/status") as held:
        with pytest.raises(OSError, match="Invalid argument"):
            held.read_grant()
    assert reads == []


def test_a_writer_whose_lease_is_revoked_takes_the_peer_for_lost(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    link_of(owner, back).lease.revoke()
    write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
    writer.bytes[:] = 1
    world.run(lambda: writer.of(PeerLost))
    assert writer.of(PeerLost)[0].why == "the peer took its memory back"
    assert writer.ended == []
    assert not owner.bytes.any()


def test_a_held_lock_holds_the_fence_up_and_each_poll_looks(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    held = link_of(writer, there).held_lease
    assert held.begin()
    owner.engine.close_peer(back, "enough")
    owner.poll()
    assert owner.poll() == []
    held.end()
    assert owner.poll() == [PeerFenced(peer=back)]
    assert not held.begin()


def test_a_poll_that_waits_looks_at_fences_too(world):
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    held = link_of(writer, there).held_lease
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
    """Opens like shm, and grants whatever a test wants."""

    def __init__(self):
        self.token = b"t" * 16
        self.lease = Lease(b"nothing")
        self.control = OpeningControl(lambda: {"shm": self.info}, transports=["shm"])
        self.peer = None

    def dial(self, victim, regions=(), *, grant=None, **lies):
        """Connect; the opening is honest but for `lies`."""
        if grant is None:
            grant = msgspec.msgpack.encode(list(regions))
        self.lease.close()
        self.lease = Lease(self.token + grant)
        truth = {"host": host_identity(), "pid": os.getpid(), "lease": self.lease.fd}
        self.info = msgspec.msgpack.encode(list(({**truth, "token": self.token} | lies).values()))
        self.control.connect(*victim.engine.listen("127.0.0.1", 0))

    def meet(self, victim):
        """Until both have opened."""
        end = time.monotonic() + 5
        while self.peer is None:
            assert time.monotonic() < end
            victim.poll()
            for event in self.control.poll(0.001):
                if isinstance(event, Opened):
                    self.peer = event.peer

    def note(self, data):
        """As from a link that is ready."""
        self.control.ready(self.peer)
        self.control.connections[self.peer].send_note(data)

    def close(self):
        self.control.close()
        self.lease.close()


@pytest.fixture
def impostor():
    with contextlib.closing(Impostor()) as made:
        yield made


def fate(impostor, node, act):
    """Why the node lost the impostor."""
    act()
    end = time.monotonic() + 5
    while not node.of(PeerFenced):
        assert time.monotonic() < end, "the impostor was not thrown out"
        node.poll(0.001)
        impostor.control.poll(0)
    lost, fenced = node.events
    assert fenced == PeerFenced(peer=lost.peer)
    assert not node.engine._links
    return lost.why


def fate_of(impostor, node, *regions, **lies):
    """Why the node lost the impostor as soon as it had opened."""
    return fate(impostor, node, lambda: impostor.dial(node, *regions, **lies))


def test_an_honest_impostor_is_a_peer(world, impostor):
    """So that the refusals below are for their own reasons."""
    node = world.node()
    with SharedMemory(4096) as memory:
        impostor.dial(node, [[memory.fd, 0, 4096]])
        impostor.meet(node)
        (link,) = (link_of(node, peer) for peer in node.engine._links)
        assert link.regions[0].nbytes == 4096
        impostor.note(msgspec.msgpack.encode([[7, 1]]))
        node.engine.expect(link.connection.peer, 7, 1)
        world.run(lambda: node.reached == [7])


@pytest.mark.parametrize(
    ("extent", "why"),
    [
        ([0, 8192], "outside its memory of 4096 bytes"),
        ([0, 4097], "outside its memory"),
        ([-1, 16], "outside its memory"),
        ([4096, 1], "outside its memory"),
        ([0, -1], "outside its memory"),
        ([0, 2**64 - 1], "outside its memory"),
        ([2**64 - 1, 1], "outside its memory"),
        (["0", 1], "malformed grant"),
        ([0], "malformed grant"),
    ],
)
def test_a_peer_that_lies_about_its_memory_is_lost(world, impostor, extent, why):
    with SharedMemory(4096) as memory:
        assert why in fate_of(impostor, world.node(), [[memory.fd, *extent]])


def test_a_peer_that_grants_something_else_than_memory_is_lost(world, impostor):
    """Neither is opened: that alone could have an effect, or never return."""
    with socket.socket() as other:
        assert "regular file" in fate_of(impostor, world.node(), [[other.fileno(), 0, 16]])


def test_a_peer_whose_lease_is_no_file_is_lost(world, impostor):
    with socket.socket() as other:
        assert "regular file" in fate_of(impostor, world.node(), lease=other.fileno())


def test_a_peer_that_could_shrink_its_memory_is_lost(world, impostor):
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    assert "could shrink" in fate_of(impostor, world.node(), [[fd, 0, 4096]])
    os.close(fd)


@pytest.mark.parametrize("missing", ["lease", "region", "process"])
def test_a_peer_that_grants_what_it_does_not_have_is_lost(world, impostor, missing):
    with subprocess.Popen(["true"]) as ended:
        pass
    lies = {"lease": {"lease": 9999}, "process": {"pid": ended.pid}, "region": {}}[missing]
    why = fate_of(impostor, world.node(), [[9999, 0, 4096]], **lies)
    wanted = "broke: No such file or directory" if missing == "region" else "with other rights"
    assert wanted in why


def test_a_wrong_token_is_refused(world, impostor):
    """Whoever names a process, but has not heard from it, cannot lend it."""
    assert "another token" in fate_of(impostor, world.node(), token=b"0" * 16)


def test_another_host_is_refused(world, impostor):
    assert "not on the same host" in fate_of(impostor, world.node(), host="elsewhere")


def test_another_users_memory_is_refused(world, impostor, monkeypatch):
    """Root could open it."""
    node, ours = world.node(), os.getuid()
    why = fate(impostor, node, lambda: (impostor.dial(node), change_user(monkeypatch, ours + 1)))
    assert f"one user on both sides; ours is {ours + 1}, got {ours}" in why


def change_user(monkeypatch, uid):
    monkeypatch.setattr(os, "getuid", lambda: uid)


@pytest.mark.parametrize(
    "data", [b"x", bytes(9), bytes(64 * KIB + 1), b"\x91\x91\x01", b"\x91\x92\x01\xa1x"]
)
def test_a_malformed_note_ends_the_connection(world, impostor, data):
    node = world.node()
    impostor.dial(node)
    impostor.meet(node)
    why = fate(impostor, node, lambda: impostor.note(data))
    assert "malformed note of shm" in why


@settings(max_examples=30, deadline=None)
@given(
    packet=st.one_of(
        st.binary(min_size=1, max_size=64),
        st.lists(st.lists(st.integers(-2, 2**40), min_size=2, max_size=3), max_size=4).map(
            msgspec.msgpack.encode
        ),
    ),
    honest=st.booleans(),
)
def test_no_grant_and_no_note_makes_poll_raise(packet, honest):
    with contextlib.closing(World(shm_engine)) as world:
        with contextlib.closing(Impostor()) as impostor:
            node = world.node(4096)
            impostor.dial(node, grant=None if honest else packet)
            impostor.meet(node)
            impostor.note(packet)
            world.rounds(4)


@settings(max_examples=30, deadline=None)
@given(info=st.binary(max_size=40))
def test_no_opening_makes_poll_raise(info):
    with contextlib.closing(World(shm_engine)) as world:
        with contextlib.closing(Impostor()) as impostor:
            node = world.node(4096)
            impostor.info = info
            impostor.control.connect(*node.engine.listen("127.0.0.1", 0))
            for _ in range(4):
                node.poll(0.0005)
                impostor.control.poll(0)


@pytest.mark.parametrize("lie", ["host", "pid"])
def test_who_is_called_may_be_on_another_host_too(world, impostor, lie):
    node = world.node()
    info = [host_identity(), os.getpid(), impostor.lease.fd, impostor.token]
    info[["host", "pid"].index(lie)] = {"host": "elsewhere", "pid": 2**40}[lie]
    impostor.info = msgspec.msgpack.encode(info)
    peer = node.engine.connect(*impostor.control.listen("127.0.0.1", 0))
    while not node.of(PeerFenced):
        node.poll(0.001)
        impostor.control.poll(0)
    assert "shm cannot reach the peer: it is not on the same host" in node.of(PeerLost)[0].why
    assert node.of(PeerLost)[0].peer == peer


# --- Registering ---


def test_memory_without_a_descriptor_is_refused():
    with contextlib.closing(shm_engine()) as engine:
        with pytest.raises(TransferError, match="file descriptor, got none"):
            engine.register(Memory(address=1, nbytes=8))


def test_late_memory_is_refused(world):
    node = world.node()
    memory = node.region.memory
    node.engine.listen("127.0.0.1", 0)
    with pytest.raises(TransferError, match="before listen and connect"):
        node.engine.register(memory)


def test_a_region_that_is_a_source_alone_is_not_mapped(world):
    writer, owner = world.node(), world.node()
    owner.register(writable=False)
    owner.register()
    there, _ = world.connect(writer, owner)
    regions = link_of(writer, there).regions
    assert [region.nbytes for region in regions] == [MIB, 0, MIB]


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
        write(writer.engine, there, writer.region, 0, inner.descriptor, 1, 50, 1)
    write(writer.engine, there, writer.region, 0, inner.descriptor, 0, 50, 1)
    world.run(lambda: owner.reached == [1])
    np.testing.assert_array_equal(owner.bytes[100:150], writer.bytes[:50])
    assert not owner.bytes[:100].any()
    assert not owner.bytes[150:].any()
