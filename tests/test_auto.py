"""Two engines choose a transport, each by itself, from what both openings offer."""

import contextlib
import itertools
import os
import subprocess
from pathlib import Path

import pytest

from disagg.transfer import shm
from disagg.transfer.auto import TRANSPORTS, make_engine
from disagg.transfer.interface import PeerFenced, PeerLost
from disagg.transfer.shm import ShmLink, host_identity
from disagg.transfer.tcp import TcpLink
from disagg.transfer.verbs import VerbsLink
from tests.engines import auto_engine, write
from tests.fake_verbs import Fabric
from tests.test_transfer_conformance import Node, World


@pytest.fixture
def world():
    with contextlib.closing(World(auto_engine)) as world:
        yield world


NAMES = {ShmLink: "shm", TcpLink: "tcp", VerbsLink: "verbs"}


def node(world, transport, nics=()):
    world.nodes.append(Node(make_engine(transport, nics), 4096))
    return world.nodes[-1]


def kind_of_link(world, dialler, listener):
    """Which link both ends of a new connection have; pages cross it both ways."""
    there, back = world.connect(dialler, listener)
    listener.bytes[:64] = dialler.bytes[:64] = 7
    dialler.engine.expect(there, 1, 1)
    listener.engine.expect(back, 1, 1)
    write(dialler.engine, there, dialler.region, 0, listener.region.descriptor, 100, 64, 1)
    write(listener.engine, back, listener.region, 0, dialler.region.descriptor, 200, 64, 1)
    world.run(lambda: dialler.reached == listener.reached == [1])
    assert listener.bytes[100:164].all()
    assert dialler.bytes[200:264].all()
    links = [dialler.engine._peers[there].links, listener.engine._peers[back].links]
    (kind,) = {type(link) for each in links for link in each.values()}
    names = {dialler.engine.transport_to(there), listener.engine.transport_to(back)}
    assert names == {NAMES[kind]}
    return kind


@pytest.mark.parametrize(
    ("dialling", "listening", "kind"),
    [
        ("auto", "auto", ShmLink),
        ("auto", "shm", ShmLink),
        ("shm", "auto", ShmLink),
        ("auto", "tcp", TcpLink),
        ("tcp", "auto", TcpLink),
    ],
)
def test_both_sides_choose_the_first_that_both_have(world, dialling, listening, kind):
    assert kind_of_link(world, node(world, dialling), node(world, listening)) is kind


def test_different_hosts_choose_tcp(world, monkeypatch):
    hosts = map(str, itertools.count())
    monkeypatch.setattr(shm, "host_identity", lambda: next(hosts))
    assert kind_of_link(world, node(world, "auto"), node(world, "auto")) is TcpLink


@pytest.mark.parametrize(
    ("dialling", "listening", "kind"),
    [
        ("auto", "auto", VerbsLink),
        ("auto", "verbs", VerbsLink),
        ("verbs", "auto", VerbsLink),
        ("auto", "auto without", TcpLink),
        ("auto without", "auto", TcpLink),
        ("auto", "tcp", TcpLink),
        ("tcp", "auto", TcpLink),
    ],
)
def test_different_hosts_choose_verbs_where_both_have_a_nic(
    world, monkeypatch, dialling, listening, kind
):
    hosts, fabric = map(str, itertools.count()), Fabric()
    monkeypatch.setattr(shm, "host_identity", lambda: next(hosts))
    nodes = []
    for transport in (dialling, listening):
        name, *without = transport.split()
        nics = [] if without or name == "tcp" else [fabric.nic()]
        nodes.append(node(world, name, nics))
    assert kind_of_link(world, *nodes) is kind


def test_one_host_chooses_shm_though_there_are_nics(world):
    fabric = Fabric()
    nodes = [node(world, "auto", [fabric.nic()]) for _ in range(2)]
    assert kind_of_link(world, *nodes) is ShmLink


def test_memory_that_cannot_be_opened_chooses_tcp(world, monkeypatch):
    """A host that looks like ours, but the process is not to be seen there."""
    dialler, listener = node(world, "auto"), node(world, "auto")
    with subprocess.Popen(["true"]) as ended:
        pass
    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    assert kind_of_link(world, dialler, listener) is TcpLink


def test_one_listener_serves_both_kinds(world):
    listener = node(world, "auto")
    peers = [node(world, transport) for transport in ("shm", "tcp")]
    for dialler in peers:
        world.connect(dialler, listener)
    kinds = [type(known.link) for known in listener.engine._peers.values()]
    assert kinds == [ShmLink, TcpLink]


def test_nothing_in_common_is_refused_with_both_names(world):
    dialler, listener = node(world, "shm"), node(world, "tcp")
    dialler.engine.connect(*listener.engine.listen("127.0.0.1", 0))
    world.run(lambda: dialler.of(PeerFenced))
    why = dialler.of(PeerLost)[0].why
    assert "an opening for transport tcp, ours is shm; give both the same --transport" in why


def test_the_host_identity_is_of_host_network_and_user(monkeypatch):
    ours = host_identity()
    assert ours == host_identity()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert ours != host_identity()


def test_a_link_that_was_not_chosen_leaves_nothing_behind(world):
    """Neither a lease nor a key that still opens the door."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    dialler, listener = node(world, "auto"), node(world, "tcp")
    assert kind_of_link(world, dialler, listener) is TcpLink
    for each in world.nodes:
        (connection,) = each.engine._control._connections.values()
        assert not connection.joins
        assert len(each.engine._peers) == 1
    # Of each: memory and its mapping, epoll, eventfd, two connections; and one listener.
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2 * 6 + 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_has_an_engine_and_no_other_name_has(transport):
    wanted = {"auto": ["shm", "verbs", "tcp"]}.get(transport, [transport])
    with contextlib.closing(make_engine(transport, [Fabric().nic()])) as engine:
        assert [medium.name for medium in engine._media] == wanted
    with pytest.raises(ValueError, match=r"expected one of auto, shm, verbs, tcp, got 'rdma'"):
        make_engine("rdma")
