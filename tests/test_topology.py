"""NICs chosen on machines of many kinds, from trees as sysfs has them; and what flags change."""

from itertools import chain
from pathlib import Path

import pytest

from disagg.transfer.topology import (
    RdmaFlags,
    Topology,
    choose_address,
    choose_nics,
    nearness,
    poll_cpus,
)
from tests import sysfs_trees as trees
from tests.sysfs_trees import GLOBAL_IPV6, LINK_LOCAL, V1, V2, Machine, PortRow, Tree, ipv4

GPUS = [f"cuda:{index}" for index in range(8)]


def choose(root: Path, machine: Machine, devices=None, **flags):
    """NICs of each memory as "mlx5_0 mlx5_1", and the lines."""
    topology = Topology(machine(root).root)
    devices = ["cpu", *topology.gpus] if devices is None else devices
    nics, lines = choose_nics(topology, devices, RdmaFlags(**flags))
    return {device: " ".join(nic.name for nic in each) for device, each in nics.items()}, lines


def each_gpu(*nics: str) -> dict[str, str]:
    """cuda:0 has the first, and so on; the CPU has them all."""
    return {f"cuda:{i}": nic for i, nic in enumerate(nics)} | {"cpu": " ".join(dict.fromkeys(nics))}


@pytest.mark.parametrize(
    ("machine", "nics", "line"),
    [
        (
            trees.eight_to_eight,
            each_gpu(*(f"mlx5_{nic}" for nic in range(8))),
            "cuda:7 -> mlx5_7 port 1, GID 3 (RoCE v2, 10.0.0.7, eth7, routable): same PCI switch",
        ),
        (
            trees.eight_to_four,
            each_gpu(*(f"mlx5_{gpu // 2}" for gpu in range(8))),
            "cuda:1 -> mlx5_0 port 1, GID 3 (RoCE v2, 10.0.0.0, eth0, routable): same PCI switch",
        ),
        (
            trees.cascade,
            each_gpu("mlx5_1", "mlx5_0"),
            "cuda:0 -> mlx5_1 port 1, GID 3 (RoCE v2, 10.0.0.1, eth1, routable): same PCI switch",
        ),
        (
            trees.four_to_one,
            each_gpu(*["mlx5_0"] * 4),
            "cuda:2 -> mlx5_0 port 1, GID 3 (RoCE v2, 10.0.0.0, eth0, routable): same host bridge",
        ),
        (
            trees.four_to_eight,
            {
                "cuda:0": "mlx5_0 mlx5_2",
                "cuda:1": "mlx5_1 mlx5_3",
                "cuda:2": "mlx5_4 mlx5_6",
                "cuda:3": "mlx5_5 mlx5_7",
                "cpu": "mlx5_0 mlx5_2 mlx5_1 mlx5_3 mlx5_4 mlx5_6 mlx5_5 mlx5_7",
            },
            "cuda:0 -> mlx5_0 port 1, GID 3 (RoCE v2, 10.0.0.0, eth0, routable): same host bridge",
        ),
        (
            trees.no_gpu,
            {"cpu": "mlx5_0 mlx5_1 mlx5_2"},
            "cpu -> mlx5_2 port 1, GID 3 (RoCE v2, 10.0.0.2, eth2, routable): all in use",
        ),
        (trees.infiniband, {"cpu": "mlx5_0"}, "cpu -> mlx5_0 port 1, LID 0x1f: all in use"),
        (
            trees.bonded,
            {"cpu": "mlx5_bond_0"},
            "cpu -> mlx5_bond_0 port 1, GID 3 (RoCE v2, 10.0.0.9, bond0, routable): all in use",
        ),
        (
            trees.bonded_by_kernel,
            {"cpu": "mlx5_0"},
            "left out: mlx5_1 port 1 (Ethernet, 400 Gb/sec (4X NDR), state ACTIVE) at "
            "GID 0 (RoCE v2, fe80::a00:27ff:fe00:1, eth1, not routable): "
            "mlx5_0 port 1 (Ethernet, 400 Gb/sec (4X NDR), state ACTIVE) is better",
        ),
        (
            trees.soft_roce,
            {"cpu": "rxe1 rxe0"},
            "cpu -> rxe1 port 1, GID 3 (RoCE v2, 10.0.0.1, eth1, routable): all in use",
        ),
    ],
)
def test_each_memory_has_its_nearest_nics(tmp_path, machine, nics, line):
    found, lines = choose(tmp_path, machine)
    assert found == nics
    assert line in lines


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (trees.nothing, "none, load the driver"),
        (trees.efa, "rdmap16s27 port 1 .*EFA has no RC queue pairs"),
    ],
)
def test_without_a_port_that_can_be_used_the_error_says_why(tmp_path, machine, why):
    with pytest.raises(ValueError, match=why):
        choose(tmp_path, machine)


def test_ports_that_are_slow_or_not_active_are_left_out_with_the_reason(tmp_path):
    _, lines = choose(tmp_path, trees.eight_to_eight)
    down, slow = (line for line in lines if line.startswith("left out"))
    assert "mlx5_9 port 1" in down and "state DOWN" in down
    assert "mlx5_8 port 1 (Ethernet, 25 Gb/sec" in slow and "better" in slow


def test_only_the_nics_of_the_gpus_in_use_are_opened(tmp_path):
    nics, _ = choose(tmp_path, trees.eight_to_eight, ["cpu", "cuda:3"])
    assert nics == {"cuda:3": "mlx5_3", "cpu": "mlx5_3"}


def test_gpus_take_turns_where_there_are_fewer_nics(tmp_path):
    nics, _ = choose(tmp_path, trees.eight_to_eight, GPUS[:4], rdma_device="mlx5_4, mlx5_6")
    assert [*nics.values()] == ["mlx5_4", "mlx5_6", "mlx5_4", "mlx5_6"]


def test_gpus_are_counted_by_their_pci_address(tmp_path):
    gpus = Topology(trees.eight_to_eight(tmp_path).root).gpus
    assert [*gpus] == GPUS
    addresses = [place[-1] for place in gpus.values()]
    assert addresses == sorted(addresses)


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (trees.no_gpu, [(3, "0"), (3, "1"), (3, "1")]),
        (trees.soft_roce, [(3, "1"), (3, "unknown, []")]),
        (trees.infiniband, [(None, "0")]),
    ],
)
def test_a_nic_has_its_gid_index_and_numa_node(tmp_path, machine, found):
    nics, _ = choose_nics(Topology(machine(tmp_path).root), ["cpu"], RdmaFlags())
    assert [(address.index, port.place[0]) for port, address in nics["cpu"].items()] == found


@pytest.mark.parametrize(
    ("other", "steps"),
    [
        (("0", "pci0000:17", "17:01.0", "18:00.0", "19:01.0", "1b:00.0"), 4),
        (("0", "pci0000:17", "17:01.0", "20:00.0"), 3),
        (("0", "pci0000:17", "17:03.0", "30:00.0"), 2),
        (("0", "pci0000:5d", "5d:01.0", "5e:00.0"), 1),
        (("1", "pci0000:97", "97:01.0", "98:00.0"), 0),
    ],
)
def test_nearness_counts_common_steps(other, steps):
    assert nearness(("0", "pci0000:17", "17:01.0", "18:00.0", "19:00.0", "1a:00.0"), other) == steps


def test_devices_of_unknown_nodes_are_near_only_below_the_same_bridge(tmp_path):
    tree = Tree(tmp_path, "0-3", "4-7")
    for way in ("pci0000:17/0000:17:01.0", "pci0000:17/0000:17:02.0", "pci0000:97/0000:97:01.0"):
        tree.gpu(way, -1)
    first, second, third = Topology(tmp_path).gpus.values()
    assert (nearness(first, second), nearness(first, third)) == (2, 0)


def port(tmp_path: Path, row: PortRow):
    tree = Tree(tmp_path, "0-7")
    tree.nic("mlx5_0", tree.pci("pci0000:17/0000:17:01.0/0000:18:00.0", 0), row)
    return Topology(tmp_path).ports[0]


BAD, LOCAL, SIX, FOUR, FOUR_V1 = (
    *((LINK_LOCAL, V1, "eth0"), (LINK_LOCAL, V2, "eth0"), (GLOBAL_IPV6, V2, "eth0")),
    *((ipv4("10.0.0.1"), V2, "eth0"), (ipv4("10.0.0.1"), V1, "eth0")),
)


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([BAD, LOCAL, FOUR_V1, FOUR, SIX], 3),
        ([BAD, SIX, None, FOUR, FOUR], 3),
        ([BAD, LOCAL, SIX], 2),
        ([BAD, LOCAL, (ipv4("169.254.1.1"), V2, "eth0"), SIX], 3),
        ([BAD, FOUR_V1, LOCAL], 2),
        ([None, BAD], 1),
    ],
)
def test_a_routable_entry_comes_before_link_local_before_v1(tmp_path, gids, index):
    assert choose_address(port(tmp_path, PortRow(gids=gids))).index == index


def test_infiniband_is_addressed_by_lid_unless_an_entry_is_asked_for(tmp_path):
    found = port(tmp_path, trees.INFINIBAND)
    assert choose_address(found).index is None
    assert choose_address(found, 0).index == 0


def test_the_entry_asked_for_wins(tmp_path):
    found = port(tmp_path, PortRow(gids=[BAD, LOCAL, FOUR_V1, FOUR]))
    assert choose_address(found, 0).index == 0


@pytest.mark.parametrize("wanted", [-1, 1, 99])
def test_an_entry_that_is_empty_or_beyond_the_table_is_refused_with_the_valid_ones(
    tmp_path, wanted
):
    found = port(tmp_path, PortRow(gids=[BAD, None, FOUR]))
    valid = (
        "GID 0 (IB/RoCE v1, fe80::a00:27ff:fe00:1, eth0, not routable); "
        "GID 2 (RoCE v2, 10.0.0.1, eth0, routable)"
    )
    with pytest.raises(ValueError) as caught:
        choose_address(found, wanted)
    assert f"GID {wanted}" in str(caught.value)
    assert str(caught.value).endswith(valid)


def test_a_port_without_any_address_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no GID; .*give its interface an address"):
        choose_address(port(tmp_path, PortRow(gids=[None])))


@pytest.mark.parametrize(
    ("wishes", "nics"),
    [
        (
            {"rdma_device": "mlx5_4,mlx5_8"},
            {"cuda:0": "mlx5_8", "cuda:4": "mlx5_4", "cpu": "mlx5_8 mlx5_4"},
        ),
        (
            {"rdma_device": "mlx5_6,mlx5_0:1"},
            {"cuda:0": "mlx5_0", "cuda:4": "mlx5_6", "cpu": "mlx5_0 mlx5_6"},
        ),
        (
            {"nic_map": "cuda:0=mlx5_7,mlx5_8"},
            {"cuda:0": "mlx5_8 mlx5_7", "cuda:4": "mlx5_4", "cpu": "mlx5_8 mlx5_7 mlx5_4"},
        ),
        (
            {"nic_map": "cuda:4=mlx5_0;cpu=mlx5_2"},
            {"cuda:0": "mlx5_0", "cuda:4": "mlx5_0", "cpu": "mlx5_2"},
        ),
        (
            {"rdma_device": "mlx5_1", "nic_map": "cuda:4=mlx5_5"},
            {"cuda:0": "mlx5_1", "cuda:4": "mlx5_5", "cpu": "mlx5_1 mlx5_5"},
        ),
    ],
)
def test_wishes_take_the_place_of_choices(tmp_path, wishes, nics):
    found, _ = choose(tmp_path, trees.eight_to_eight, ["cpu", "cuda:0", "cuda:4"], **wishes)
    assert found == nics


@pytest.mark.parametrize(
    ("machine", "wishes", "why"),
    [
        (
            trees.eight_to_eight,
            {"rdma_device": "mlx5_9"},
            r"mlx5_9 port 1 .*state DOWN\).*ports are: mlx5_0",
        ),
        (trees.eight_to_eight, {"rdma_device": "mlx5_0,mlx5_99"}, r"mlx5_99.*mlx5_9 port 1"),
        (trees.eight_to_eight, {"rdma_device": "mlx5_0:2"}, r"mlx5_0:2.*mlx5_0 port 1"),
        (trees.eight_to_eight, {"nic_map": "cuda:1=mlx5_9"}, r"mlx5_9 port 1 .*state DOWN\)"),
        (
            trees.eight_to_eight,
            {"nic_map": "cuda:8=mlx5_0"},
            r"no memory cuda:8 to map; there is cpu, cuda:1",
        ),
        (trees.eight_to_eight, {"gid_index": 7}, r"GID 7 .*valid: GID 0"),
        (trees.infiniband, {"rdma_device": "mlx5_0:2"}, r"mlx5_0 port 2 .*state INIT\)"),
        (trees.efa, {"rdma_device": "rdmap16s27"}, r"EFA has no RC queue pairs"),
        (trees.nothing, {"rdma_device": "mlx5_0"}, r"mlx5_0.*none, load the driver"),
        (trees.eight_to_eight, {"rdma_device": "mlx5_0,"}, r"'' cannot be used.*are: mlx5_0"),
        (trees.eight_to_eight, {"rdma_device": "mlx5_0:x"}, r"'mlx5_0:x' cannot.*are: mlx5_0"),
        (trees.eight_to_eight, {"nic_map": "mlx5_0"}, r"expected as in .*=mlx5_0.*got 'mlx5_0'"),
        (trees.eight_to_eight, {"nic_map": "cpu=mlx5_0;"}, r"expected as in cpu=mlx5_0"),
        (trees.eight_to_eight, {"nic_map": "cpu="}, r"'' cannot be used.*are: mlx5_0"),
    ],
)
def test_a_wish_that_cannot_be_met_is_an_error_that_says_what_there_is(
    tmp_path, machine, wishes, why
):
    with pytest.raises(ValueError, match=why):
        choose(tmp_path, machine, ["cpu", "cuda:1"], **wishes)


def test_a_device_without_a_port_means_those_that_are_active(tmp_path):
    nics, _ = choose(tmp_path, trees.infiniband, ["cpu"], rdma_device="mlx5_0")
    assert nics == {"cpu": "mlx5_0"}


def test_an_index_asked_for_is_that_of_every_port(tmp_path):
    topology = Topology(trees.eight_to_eight(tmp_path).root)
    nics, _ = choose_nics(topology, GPUS, RdmaFlags(gid_index=1, nic_map="cuda:0=mlx5_8"))
    assert {address.index for each in nics.values() for address in each.values()} == {1}


@pytest.mark.parametrize(
    ("machine", "available", "wanted", "cpus"),
    [
        (trees.no_gpu, range(8), None, {4, 5, 6, 7}),
        (trees.no_gpu, range(6), None, {4, 5}),
        (trees.no_gpu, range(4), None, {0, 1, 2, 3}),
        (trees.no_gpu, range(8), 2, {2}),
        (trees.four_to_eight, range(8), None, set(range(8))),
        (trees.soft_roce, range(4), None, {2, 3}),
        (trees.eight_to_eight, range(16), None, {0, 1, 2, 3, 8, 9, 10, 11}),
    ],
)
def test_the_polling_thread_runs_near_its_nics(tmp_path, machine, available, wanted, cpus):
    topology = Topology(machine(tmp_path).root)
    nics, _ = choose_nics(topology, ["cpu", *topology.gpus], RdmaFlags())
    found, why = poll_cpus(topology, chain(*nics.values()), set(available), wanted)
    assert (found, bool(why)) == (cpus, True)


def test_a_cpu_where_the_process_may_not_run_is_refused(tmp_path):
    topology = Topology(trees.no_gpu(tmp_path).root)
    with pytest.raises(ValueError, match=r"--poll-cpu 9: .*\[0, 1\]"):
        poll_cpus(topology, [], {0, 1}, 9)
