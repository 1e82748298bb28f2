"""Two engines choose a transport, each by itself, from what both openings offer."""

import contextlib
import itertools
import logging
import os
import subprocess
from pathlib import Path

import pytest

from disagg.transfer import shm, verbs_device
from disagg.transfer.auto import TRANSPORTS, make_engine, open_nics
from disagg.transfer.interface import PeerFenced, PeerLost, TransferError
from disagg.transfer.shm import ShmLink, host_identity
from disagg.transfer.tcp import TcpLink
from disagg.transfer.topology import RdmaFlags
from disagg.transfer.verbs import VerbsLink
from tests import sysfs_trees
from tests.engines import auto_engine, link_of, open_descriptors, write
from tests.fake_verbs import Fabric, FakeMachine
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
    links = [dialler.engine._links[there], listener.engine._links[back]]
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
    kinds = [type(link_of(listener, peer)) for peer in listener.engine._links]
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
    before = open_descriptors()
    dialler, listener = node(world, "auto"), node(world, "tcp")
    assert kind_of_link(world, dialler, listener) is TcpLink
    for each in world.nodes:
        (connection,) = each.engine.connections.values()
        assert not connection.joins
        assert len(each.engine._links) == 1
    # Of each: memory and its mapping, epoll, eventfd, two connections; and one listener.
    assert open_descriptors() == before + 2 * 6 + 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_has_an_engine(transport):
    wanted = {"auto": ["shm", "verbs", "tcp"]}.get(transport, [transport])
    with contextlib.closing(make_engine(transport, [Fabric().nic()])) as engine:
        assert [medium.name for medium in engine._media] == wanted


# --- Which NICs are opened ---


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """8 NICs as fast as each other, a slower one and one that is down; 4 on each NUMA node."""
    sysfs_trees.eight_to_eight(tmp_path)
    return FakeMachine(monkeypatch, tmp_path)


ALL = [(f"mlx5_{number}", 1, 3) for number in range(8)]
NODE_0 = {0, 1, 2, 3, 8, 9, 10, 11}


@pytest.mark.parametrize("transport", ["auto", "verbs"])
@pytest.mark.parametrize(
    ("flags", "opened", "cpus"),
    [
        ({}, ALL, NODE_0),
        ({"rdma_device": "mlx5_8:1,mlx5_1"}, [("mlx5_1", 1, 3), ("mlx5_8", 1, 3)], NODE_0),
        ({"rdma_device": "mlx5_6"}, [("mlx5_6", 1, 3)], set(range(16)) - NODE_0),
        ({"gid_index": 1}, [(name, port, 1) for name, port, _ in ALL], NODE_0),
        ({"nic_map": "cpu=mlx5_5"}, [("mlx5_5", 1, 3)], set(range(16)) - NODE_0),
        ({"poll_cpu": 5}, ALL, {5}),
    ],
)
def test_nics_are_opened_as_the_flags_say(machine, caplog, transport, flags, opened, cpus):
    caplog.set_level(logging.INFO)
    nics, found = open_nics(transport, RdmaFlags(**flags))
    assert sorted(machine.opened) == opened
    assert [nic.name for nic in nics] == [name for name, _, _ in machine.opened]
    assert found == cpus
    assert ("RDMA: left out: mlx5_9 port 1" in caplog.text) == ("rdma_device" not in flags)
    assert f"RDMA: cpu -> {opened[0][0]} port 1, GID {opened[0][2]}" in caplog.text
    assert f"RDMA: polled on CPUs {sorted(cpus)}: " in caplog.text


def test_infiniband_is_opened_by_its_lid(monkeypatch, tmp_path):
    sysfs_trees.infiniband(tmp_path)
    machine = FakeMachine(monkeypatch, tmp_path)
    open_nics("auto", RdmaFlags())
    assert machine.opened == [("mlx5_0", 1, None)]


def test_an_address_of_the_own_link_is_used_only_if_somebody_asks(monkeypatch, tmp_path, caplog):
    """A cable between two NICs works; two hosts that chose by themselves would not meet."""
    caplog.set_level(logging.INFO)
    tree = sysfs_trees.Tree(tmp_path, "0-3")
    port = sysfs_trees.PortRow(gids=[(sysfs_trees.LINK_LOCAL, sysfs_trees.V2, "eth0")])
    tree.nic("mlx5_0", tree.pci("pci0000:17/0000:17:01.0", 0), port)
    machine = FakeMachine(monkeypatch, tmp_path)
    assert open_nics("auto", RdmaFlags())[0] == machine.opened == []
    assert "no RDMA: cpu -> mlx5_0 port 1, GID 0 (RoCE v2, fe80:" in caplog.text
    assert "not routable): all in use; give its interface an address" in caplog.text
    open_nics("verbs", RdmaFlags())
    open_nics("auto", RdmaFlags(rdma_device="mlx5_0"))
    assert machine.opened == [("mlx5_0", 1, 0)] * 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_other_transports_open_no_nics(machine, transport):
    assert open_nics(transport, RdmaFlags()) == ([], set(range(16)))
    with pytest.raises(ValueError, match=f"--transport {transport}: shm and tcp use no NICs"):
        open_nics(transport, RdmaFlags(gid_index=3))
    assert machine.opened == []


def without_pyverbs(monkeypatch, machine):
    monkeypatch.setattr(verbs_device, "MISSING", "RDMA needs pyverbs")


def without_devices(monkeypatch, machine):
    FakeMachine(monkeypatch, Path("/nowhere"))


def not_to_be_opened(monkeypatch, machine):
    machine.broken.add("mlx5_7")


LACKS = {
    without_pyverbs: "RDMA needs pyverbs",
    without_devices: "RDMA ports are: none, load the driver of one",
    not_to_be_opened: "cannot open RDMA device mlx5_7",
}


@pytest.mark.parametrize("lack", LACKS, ids=lambda lack: lack.__name__)
def test_auto_does_without_nics_and_logs_why(monkeypatch, machine, caplog, lack):
    caplog.set_level(logging.INFO)
    lack(monkeypatch, machine)
    assert open_nics("auto", RdmaFlags()) == ([], set(range(16)))
    assert caplog.messages == [f"no RDMA: {LACKS[lack]}"]


@pytest.mark.parametrize(
    ("transport", "flags"),
    [
        ("verbs", {}),
        *(
            ("auto", {"rdma_device": "mlx5_7"}),
            ("auto", {"gid_index": 3}),
            ("auto", {"poll_cpu": 0}),
        ),
        ("auto", {"nic_map": "cpu=mlx5_7"}),
    ],
)
@pytest.mark.parametrize("lack", LACKS, ids=lambda lack: lack.__name__)
def test_whoever_asks_for_nics_is_told_why_there_are_none(
    monkeypatch, machine, lack, transport, flags
):
    lack(monkeypatch, machine)
    with pytest.raises(TransferError) as caught:
        open_nics(transport, RdmaFlags(**flags))
    assert str(caught.value).startswith(f"--transport {transport}: ")
    assert LACKS[lack] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
