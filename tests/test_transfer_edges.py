"""The shm transport where the system fails it: no descriptors left, bad moments, silence."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.messenger.messages import PROTOCOL_VERSION
from disagg.transfer import shm
from disagg.transfer.interface import MessageReceived, PeerFenced, PeerLost
from disagg.transfer.lease import HeldLease
from disagg.transfer.waiter import READABLE
from tests.engines import link_of, open_descriptors, shm_engine, tcp_engine
from tests.nodes import HeldNode, node_config, wait_until
from tests.test_transfer_conformance import World
from tests.tiny_models import make_tiny_llama


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World(shm_engine)) as world:
        yield world


@contextlib.contextmanager
def descriptors_left(spare: int) -> Iterator[None]:
    """Let this process open `spare` more descriptors and no further one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    fillers: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for _ in range(spare):
            os.close(fillers.pop())
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_strangers_cannot_end_a_node_that_runs_out_of_descriptors(world, spare):
    owner = world.node()
    address = owner.engine.listen("127.0.0.1", 0)
    strangers = [socket.create_connection(address) for _ in range(8)]
    with descriptors_left(spare):
        for _ in range(20):
            owner.poll(0.001)
    for stranger in strangers:
        stranger.close()
    other = world.node()
    other.engine.connect(*address)  # and it serves on
    wait_until(lambda: owner.poll(0.001) or other.poll(0.001) or owner.engine._links, seconds=5)


def test_a_caller_that_cannot_be_accepted_ends_no_wait(world):
    """It waits for a descriptor, and is accepted with the next one who calls."""
    owner = world.node()
    address = owner.engine.listen("127.0.0.1", 0)
    with socket.create_connection(address):
        with descriptors_left(0):
            owner.poll(5)  # ends early: somebody calls
            start = time.monotonic()
            owner.poll(0.05)
            assert time.monotonic() - start > 0.04
            assert not owner.engine.connections
        with socket.create_connection(address):
            wait_until(lambda: owner.poll(0.001) or len(owner.engine.connections) == 2, seconds=5)


def test_a_connection_without_a_socket_is_lost_at_once(world):
    owner = world.node()
    with descriptors_left(0):
        owner.engine.connect("127.0.0.1", 9)
    owner.poll(0)
    assert [type(event) for event in owner.events] == [PeerLost, PeerFenced]


def test_a_region_that_cannot_be_mapped_leaks_no_descriptor():
    size = 1 << 62
    fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    before = open_descriptors()
    for _ in range(10):
        with pytest.raises((OSError, ValueError)):
            shm._map_region("/proc/self/fd", shm.Extent(fd, 0, size))
    assert open_descriptors() == before
    os.close(fd)


@pytest.mark.parametrize("path", ["/proc/self/status", "/dev/null", "/nowhere"])
def test_a_lease_that_cannot_be_read_leaks_no_descriptor(path):
    before = open_descriptors()
    for _ in range(10):
        with pytest.raises((OSError, ValueError)):
            with HeldLease(path) as held:
                held.read_grant()
    assert open_descriptors() == before


class ResetOnLook:
    """A socket whose peer resets it while we ask whether it is connected."""

    def __init__(self, real: socket.socket, server: socket.socket) -> None:
        self.real = real
        self.server = server

    def __getattr__(self, name):
        return getattr(self.real, name)

    def getsockopt(self, *which):
        code = self.real.getsockopt(*which)
        accepted, _ = self.server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        time.sleep(0.05)  # until the reset is here
        return code


def test_a_reset_while_connecting_is_a_lost_peer(world):
    node = world.node()
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = node.engine.connect(*server.getsockname())
        connection = node.engine.connections[peer]
        connection.socket = ResetOnLook(connection.socket, server)
        wait_until(lambda: node.poll(0.01) or node.of(PeerLost), seconds=5)


def test_a_stale_event_ends_no_link():
    """A descriptor reused within one round of epoll gets its predecessor's event."""
    with contextlib.closing(World(tcp_engine)) as world:
        dialer, owner = world.node(), world.node()
        there, _ = world.connect(dialer, owner)
        link = link_of(dialer, there)
        link._on_data(link._data, READABLE)  # with nothing to read
        world.rounds(20)
        assert not dialer.of(PeerLost)


def test_a_connection_that_never_says_a_word_is_ended(world):
    owner, silent = world.node(opening_timeout=0.2), world.node()
    address = owner.engine.listen("127.0.0.1", 0)
    silent.engine.connect(*address)
    wait_until(lambda: owner.poll(0.001) or silent.poll(0.001) or owner.engine._links, seconds=5)
    wait_until(lambda: owner.poll(0.001) or silent.poll(0) or not owner.engine._links, seconds=5)


def test_a_decoder_of_another_version_hears_ours(tmp_path):
    model = make_tiny_llama(tmp_path)
    config = node_config(model, listen=("127.0.0.1", 0))
    with HeldNode(config) as node, shm_engine() as mine:
        peer = mine.connect(*node.address)
        mine.send(peer, bytes((PROTOCOL_VERSION + 1,)) + b"Hello of tomorrow")
        seen: list[object] = []

        def lost() -> bool:
            seen.extend(mine.poll(0.01))
            return any(isinstance(event, PeerLost) for event in seen)

        wait_until(lost, seconds=5)
        heard = [event.data for event in seen if isinstance(event, MessageReceived)]
        assert heard and heard[0][0] == PROTOCOL_VERSION, seen
