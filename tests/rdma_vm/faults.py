"""Faults of RDMA devices, links and processes, on one machine with rxe0 and rxe1.

    writer [rxe1] roce1 ===== pages, imm =====> roce0 [rxe0] owner
     ^        ^      ^
     |        |      '- taken down, for a moment or for long
     |        '- unplugged
     '- killed, stopped; holds a wrong key, writes outside the region

Every one, but a link that is down for a moment and memory that cannot be locked, ends in `PeerLost`
and then `PeerFenced` on each side that is alive, of which one at least says the cause, with no byte
that was not sent, and the same engines can be connected again. This needs such a machine, so pytest
does not find it by itself: `python -m tests.rdma_vm one python -m pytest THIS_FILE`.

Machines are fast, slow or loaded: nothing here may hang on what is done first. `Pair.start` says
what is under way when a fault comes, and what must fail is posted after it.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from disagg.transfer import verbs_device
from disagg.transfer.interface import MessageReceived, PeerFenced, PeerLost
from tests.engines import RDMA_DEVICES, link_of, open_jobs, verbs_maker, write_pages
from tests.rdma_vm.patient import FOR_EVER
from tests.test_transfer_conformance import KIB, MIB, World, noise

pytestmark = [
    pytest.mark.skipif(len(RDMA_DEVICES) != 2, reason="runs in a machine of rdma_vm"),
    pytest.mark.timeout(900),
]

PAGE_BYTES = 4 * KIB
NUM_PAGES = MIB // PAGE_BYTES
PAGES = np.arange(NUM_PAGES) * PAGE_BYTES
#: Far more than anything here takes: it bounds what hangs.
SECONDS = 300.0
OWNERS_LINK, WRITERS_LINK = "roce0", "roce1"


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, timeout=SECONDS)


def take_down(link: str) -> None:
    ip(f"link set {link} down")


def bring_up(link: str) -> None:
    """With its route, which went away with it: see `guest.sh`."""
    here = int(link[-1])
    ip(f"link set {link} up")
    ip(f"route replace 10.99.{1 - here}.1 dev {link} table 5{here}")
    wait_until_active("rxe0", "rxe1")


def wait_until_active(*devices: str) -> None:
    """The kernel tells a device later that its link has a carrier again."""
    states = [Path(f"/sys/class/infiniband/{device}/ports/1/state") for device in devices]
    end = time.monotonic() + SECONDS
    while not all("ACTIVE" in state.read_text() for state in states):
        assert time.monotonic() < end, f"links stay down: {devices}"
        time.sleep(0.01)


@pytest.fixture
def world():
    with contextlib.closing(World(verbs_maker())) as world:
        yield world


@pytest.fixture(params=[OWNERS_LINK, WRITERS_LINK])
def link(request):
    """Up again afterwards, whatever happened."""
    yield request.param
    bring_up(request.param)


class Pair:
    """Two connected nodes: `owner` lets `writer` write noise, page i to page i, over and over."""

    def __init__(self, world):
        self.world = world
        self.owner, self.writer = world.node(), world.node()
        self.imms = itertools.count(1)
        self.connect()

    def connect(self):
        self.owner.bytes[:] = 0
        self.writer.bytes[:] = noise(MIB)
        self.there, self.back = self.world.connect(self.writer, self.owner)

    def post(self, times=1):
        """Write all pages so many times; returns the imm of the last time."""
        for _ in range(times):
            imm = next(self.imms)
            self.owner.engine.expect(self.back, imm, NUM_PAGES)
            self.write(PAGES, PAGES, imm)
        return imm

    def start(self, link):
        """Write until the link may go: some is through then, and some may be under way. At the
        writer's own link all is through. What soft-RoCE has sent when its link goes, and hears no
        answer to, it may forget: that never ends, well or badly."""
        last = self.post(4)
        if link == OWNERS_LINK:
            self.world.run(lambda: last - 3 in self.owner.reached, SECONDS)
        else:
            self.world.run(lambda: last in self.owner.reached and not self.open, SECONDS)

    @property
    def open(self):
        """Tickets of which some writes are not acknowledged."""
        return open_jobs(self.writer.engine)

    @property
    def link(self):
        """The writer's. It holds what the owner granted, to be forged."""
        return link_of(self.writer, self.there)

    def write(self, sources, targets, imm):
        target = self.owner.region.descriptor
        write_pages(
            self.writer.engine,
            self.there,
            self.writer.region,
            target,
            PAGE_BYTES,
            sources,
            targets,
            imm,
        )

    def must_end(self, *causes):
        """On both sides, for one of these causes; and nothing else was written. Whichever side
        finds it first closes the connection, which may be all that the other one hears."""
        sides = (self.writer, self.there), (self.owner, self.back)
        self.world.run(
            lambda: all(PeerFenced(peer=peer) in node.events for node, peer in sides), SECONDS
        )
        told = []
        for node, peer in sides:
            (lost,) = (event for event in node.of(PeerLost) if event.peer == peer)
            print(f"lost: {lost.why}")
            assert lost.why
            told.append(lost.why)
        assert any(cause in why for cause in causes for why in told), told
        assert only_of(self.owner.bytes, self.writer.bytes)

    def must_work(self):
        imm = self.post()
        self.world.run(lambda: imm in self.owner.reached, SECONDS)
        assert (self.owner.bytes == self.writer.bytes).all()


def only_of(written, sent):
    """Whether each byte is still 0 or the one that was sent there."""
    return bool(((written == 0) | (written == sent)).all())


def test_a_wrong_key(world):
    pair = Pair(world)
    link = pair.link
    (region,) = link.theirs.regions
    forged = msgspec.structs.replace(region, rkeys=[key ^ 0xFF00 for key in region.rkeys])
    link.theirs = msgspec.structs.replace(link.theirs, regions=[forged])
    pair.post()
    pair.must_end("remote access error")
    assert not pair.owner.bytes.any()
    pair.connect()
    pair.must_work()


@pytest.mark.parametrize("beyond", [1, PAGE_BYTES, 64 * MIB])
def test_an_address_outside_the_region(world, beyond):
    """The sender's own check would refuse it; the owner's NIC does without that."""
    pair = Pair(world)
    pair.link.region_bytes = [1 << 40]
    pair.write(PAGES[:1], PAGES[-1:] + beyond, 1)
    pair.must_end("remote access error")
    assert not pair.owner.bytes.any()
    pair.connect()
    pair.must_work()


def test_a_link_that_goes_down_and_up(world, link):
    pair = Pair(world)
    pair.start(link)
    take_down(link)
    pair.post()
    pair.must_end("does not answer" if link == OWNERS_LINK else "cannot send")
    bring_up(link)
    pair.connect()
    pair.must_work()


def test_a_link_that_is_down_for_a_moment(world, link, monkeypatch):
    """The NIC sends again, and nobody notices. How often it tries is no matter here, since a moment
    may be long on a slow machine. Without its own link it does not even try."""
    monkeypatch.setattr(verbs_device, "_RETRIES", FOR_EVER)
    pair = Pair(world)
    pair.start(link)
    take_down(link)
    imm = pair.post()
    if link == OWNERS_LINK:
        world.rounds()
        assert imm not in pair.owner.reached
    bring_up(link)
    world.run(lambda: imm in pair.owner.reached, SECONDS)
    assert (pair.owner.bytes == pair.writer.bytes).all()
    assert not pair.owner.of(PeerLost) + pair.writer.of(PeerLost)


def test_too_little_lockable_memory():
    """Root is exempt from the limit by a right that `setpriv` takes away."""
    limits = ["setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536:65536"]
    code = (
        "from tests.rdma_vm.faults import *; from disagg.transfer.interface import TransferError\n"
        "try: World(verbs_maker()).node()\n"
        "except TransferError as error: print(error)"
    )
    done = subprocess.run(
        [*limits, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=SECONDS
    )
    print(done.stdout)
    for part in ("cannot register 1048576 bytes", "limit for locked memory is 65536", "ulimit -l"):
        assert part in done.stdout


# --- Other processes ---


def child_main(address, target):
    """Connects, and writes as long as it is connected; then again."""
    with contextlib.closing(World(verbs_maker())) as world:
        writer = world.node()
        writer.bytes[:] = noise(MIB)
        while True:
            write_until_lost(world, writer, address, target)


def write_until_lost(world, writer, address, target):
    """The first message from there is the imm."""
    peer = writer.engine.connect(*address)
    writer.engine.send(peer, b"hello")

    def is_over():
        return PeerFenced(peer=peer) in writer.events

    def told():
        return [event.data for event in writer.of(MessageReceived) if event.peer == peer]

    world.run(lambda: told() or is_over(), SECONDS)
    while not is_over():
        if len(open_jobs(writer.engine)) < 2:
            imm = int(told()[0])
            write_pages(writer.engine, peer, writer.region, target, PAGE_BYTES, PAGES, PAGES, imm)
        writer.poll(0.001)


class Child:
    """A process that writes to `owner` for ever, until its death."""

    def __init__(self, world):
        self.world, self.owner = world, world.node()
        self.imms = itertools.count(1)
        address = self.owner.engine.listen("127.0.0.1", 0)
        context = multiprocessing.get_context("spawn")
        arguments = address, self.owner.region.descriptor
        self.process = context.Process(target=child_main, args=arguments, daemon=True)
        self.process.start()

    def must_write(self):
        """On the next connection, if there was one before; ends in the middle of the writes."""
        self.owner.bytes[:] = 0
        known = len(self.owner.of(MessageReceived))
        self.world.run(lambda: len(self.owner.of(MessageReceived)) > known, SECONDS)
        self.peer, imm = self.owner.of(MessageReceived)[-1].peer, next(self.imms)
        self.owner.engine.expect(self.peer, imm, 3 * NUM_PAGES)
        self.owner.engine.send(self.peer, str(imm).encode())
        self.world.run(lambda: imm in self.owner.reached, SECONDS)
        assert (self.owner.bytes == noise(MIB)).all()
        self.owner.bytes[:] = 0

    def signal(self, number):
        os.kill(self.process.pid, number)

    def must_end(self):
        self.world.run(lambda: PeerFenced(peer=self.peer) in self.owner.events, SECONDS)
        (lost,) = (event for event in self.owner.of(PeerLost) if event.peer == self.peer)
        print(f"lost: {lost.why}")
        assert lost.why
        assert only_of(self.owner.bytes, noise(MIB))


@pytest.fixture
def child(world):
    child = Child(world)
    yield child
    child.process.kill()
    child.process.join(SECONDS)


def test_a_writer_that_is_killed(world, child):
    child.must_write()
    child.signal(signal.SIGKILL)
    child.must_end()
    Pair(world).must_work()


def test_a_writer_that_is_stopped(world, child):
    """Its NIC goes on with what was posted, until the owner fences it."""
    child.must_write()
    child.signal(signal.SIGSTOP)
    child.owner.engine.close_peer(child.peer, "silent for too long")
    child.must_end()
    child.owner.bytes[:] = 0xEE
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        child.owner.poll(0.1)
    child.signal(signal.SIGCONT)
    assert (child.owner.bytes == 0xEE).all()
    child.must_write()


# --- Last, for it takes a device away ---


def test_a_device_that_is_unplugged(world):
    """The kernel takes rxe1 away when its link leaves. The owner, on the other device, lives."""
    pair = Pair(world)
    pair.start(WRITERS_LINK)
    ip("netns add elsewhere")
    ip("link set roce1 netns elsewhere")
    pair.post()
    pair.must_end("cannot send")
    ip("-n elsewhere link set roce1 up")  # without a carrier, rxe0 would be of no use either
    wait_until_active("rxe0")
    pair.writer.close()
    world.nodes.remove(pair.writer)
    device = Path("/sys/class/infiniband/rxe1")
    world.run(lambda: not device.exists(), SECONDS)
    pair.writer = world.node()  # on rxe0, which is next
    pair.connect()
    pair.must_work()
