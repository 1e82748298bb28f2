"""Which NICs move which memory: the machine as sysfs shows it, and a choice with its reasons.

    NUMA node 0, CPUs 0-31                             NUMA node 1, CPUs 32-63
      host bridge pci0000:17                             host bridge pci0000:97
        root port 17:01.0       root port 17:03.0          root port 97:01.0
          PCI switch              NIC mlx5_1                 PCI switch
            GPU cuda:0                                         GPU cuda:1
            NIC mlx5_0                                         NIC mlx5_2

    seen from cuda:0: mlx5_0 same PCI switch < mlx5_1 same host bridge < mlx5_2 other NUMA node

Bytes that turn round in the switch load neither a host bridge nor the link between the nodes, so
each GPU takes the NICs nearest to it. Here files are read; devices open in `verbs_device.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from itertools import chain
from pathlib import Path
from statistics import mode

#: The way to a device: NUMA node, host bridge, root port, both ends of each switch, itself.
Place = tuple[str, ...]
#: As a flag names a NIC: device and port; without a port, all of them that are active.
NicName = tuple[str, int | None]
Cpus = Mapping[int, Set[int]]

#: In words, how near two devices are whose ways begin with as many common steps.
_NEARNESS = ("other or unknown NUMA node", "same NUMA node", "same host bridge", "same PCI switch")
_PCI_STEP = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA_GPUS = ("0x10de 0x0300", "0x10de 0x0302")
_NIC_NAME = re.compile(r"([\w.-]+)(?::([1-9][0-9]*))?")


@dataclass(frozen=True, kw_only=True)
class Gid:
    """An entry of a port's GID table: an address and, in `kind`, a version of RoCE."""

    index: int
    address: IPv4Address | IPv6Address
    kind: str
    netdev: str

    @property
    def faults(self) -> tuple[bool, bool, bool]:
        """Less is better. The first two are not routable: RoCE v1, a link-local address."""
        ip = self.address
        return self.kind != "RoCE v2", ip.is_link_local, ip.version != 4

    def __str__(self) -> str:
        routable = "not routable" if any(self.faults[:2]) else "routable"
        return f"GID {self.index} ({self.kind}, {self.address}, {self.netdev}, {routable})"


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an RDMA device. `gids`: the entries that are not empty. Texts are as in sysfs."""

    name: str
    port: int
    place: Place
    gids: tuple[Gid, ...]
    driver: str
    state: str
    link_layer: str
    rate: str
    lid: str

    def __str__(self) -> str:
        return f"{self.name} port {self.port} ({self.link_layer}, {self.rate}, state {self.state})"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """GPUs by the name of their memory ("cuda:0"), ports by place, CPUs by NUMA node."""

    gpus: Mapping[str, Place]
    ports: Sequence[Port]
    cpus: Cpus


@dataclass(frozen=True, kw_only=True)
class NicWishes:
    """What the flags ask for, parsed. Each takes the place of a choice."""

    rdma_device: Sequence[NicName] = ()
    gid_index: int | None = None
    nic_map: Mapping[str, Sequence[NicName]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NicPort:
    """What to open, and why; `gid_index` None: addressed by LID. `numa_node` -1: unknown."""

    name: str
    port: int
    gid_index: int | None
    numa_node: int
    reason: str = field(compare=False)


def read_topology(root: Path = Path("/sys"), cuda_gpus: Sequence[str] = ()) -> Topology:
    """The machine under `root`, a sysfs; a folder that is missing holds nothing.

    `cuda_gpus`: PCI addresses as CUDA counts its GPUs. Those not named come behind, by address,
    which is CUDA's order too with CUDA_DEVICE_ORDER=PCI_BUS_ID and all GPUs visible.
    """
    nodes = (root / "devices/system/node").glob("node[0-9]*")
    cpus = {int(node.name[4:]): _parse_cpus(_read(node / "cpulist")) for node in nodes}
    gpus = {
        device.name: _place(device, cpus)
        for device in sorted((root / "bus/pci/devices").glob("*"))
        if f"{_read(device / 'vendor')} {_read(device / 'class')}".startswith(_NVIDIA_GPUS)
    }
    order = dict.fromkeys([*(address.lower() for address in cuda_gpus), *gpus])
    ports = [_read_port(path, cpus) for path in (root / "class/infiniband").glob("*/ports/*")]
    return Topology(
        gpus={f"cuda:{index}": gpus.get(address, ()) for index, address in enumerate(order)},
        ports=sorted(ports, key=lambda port: (port.place, port.name, port.port)),
        cpus=cpus,
    )


def nearness(a: Place, b: Place) -> int:
    """How many steps the ways to two devices have in common; more is nearer.

    Below the same root port there must be a switch, for such a port has a single link.
    """
    return len(set(a) & set(b))


def choose_gid(port: Port, wanted: int | None = None) -> Gid | None:
    """How to address a port: by the entry wanted, else by LID (None), else by its best GID.

    ValueError if RC queue pairs cannot use the port now, or not with this entry.
    """
    if port.driver == "efa":
        raise ValueError(f"{port}: EFA has no RC queue pairs; use another device or transport")
    if port.state != "ACTIVE":
        raise ValueError(f"{port}: expected ACTIVE; check cable, interface and subnet manager")
    if port.link_layer == "InfiniBand" and wanted is None:
        return None
    gids = [gid for gid in port.gids if wanted in (None, gid.index)]
    if not gids:
        entry = "GID" if wanted is None else f"GID {wanted} (empty, or beyond the table)"
        valid = "; ".join(map(str, port.gids)) or "none, give its interface an address"
        raise ValueError(f"{port} has no {entry}; valid: {valid}")
    return min(gids, key=lambda gid: (gid.faults, gid.index))


def choose_nics(
    topology: Topology, devices: Sequence[str], wishes: NicWishes
) -> tuple[dict[str, tuple[NicPort, ...]], list[str]]:
    """The NICs of each of `devices` ("cpu", "cuda:0"...), and lines for a log: the choice and why.

    ValueError if no port can be used, or not as wished.
    """
    if unknown := wishes.nic_map.keys() - {*devices}:
        raise ValueError(f"no memory {', '.join(unknown)} to map; there is {', '.join(devices)}")
    gids, left_out = _usable(topology.ports, wishes.rdma_device, wishes.gid_index)
    candidates = [*gids] if wishes.rdma_device else _best(gids)
    worse = [f"{port} at {gids[port] or port.lid}" for port in gids if port not in candidates]
    left_out += [f"{port}: {candidates[0]} is better" for port in worse]
    lines = [f"left out: {why}" for why in left_out]
    nics: dict[str, tuple[NicPort, ...]] = {}
    in_use: dict[Port, None] = {}
    # The CPU comes last: where there are GPUs, its bytes take the NICs that are open anyway.
    for device in sorted(devices, key="cpu".__eq__):
        if device in wishes.nic_map:
            mapped, _ = _usable(topology.ports, wishes.nic_map[device], wishes.gid_index)
            gids |= mapped
            ports, why = [*mapped], "as mapped"
        elif device != "cpu":
            ports, why = _share(topology, topology.gpus[device], candidates)
        else:
            ports, why = ([*in_use], "a GPU's") if in_use else (candidates, "all, as no GPU")
        in_use |= dict.fromkeys(ports)
        nics[device] = tuple(_nic_port(port, gids[port], why) for port in ports)
        lines += [f"{device} -> {nic.name} port {nic.port}, {nic.reason}" for nic in nics[device]]
    return nics, lines


def poll_cpus(
    topology: Topology, nics: Iterable[NicPort], available: Set[int], wanted: int | None
) -> tuple[Set[int], str]:
    """Where the polling thread may run, and why: on the NUMA node that most of its NICs are on.

    `available`: where the process may. ValueError if what is wanted is not among them.
    """
    if wanted is not None and wanted not in available:
        raise ValueError(f"--poll-cpu {wanted}: expected one of {sorted(available)}")
    if wanted is not None:
        return {wanted}, "as asked"
    node = mode(nic.numa_node for nic in nics)
    near = topology.cpus.get(node, frozenset()) & available
    return (near, f"NUMA node {node}, as its NICs") if near else (available, "none known as nearer")


def parse_nics(text: str) -> list[NicName]:
    """The value of `--rdma-device`, NAME[:PORT][,NAME...]. ValueError for anything else."""
    matches = [_NIC_NAME.fullmatch(part.strip()) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"expected NAME[:PORT][,NAME...] as in mlx5_0,mlx5_1:2, got {text!r}")
    return [(match[1], int(match[2]) if match[2] else None) for match in matches if match]


def parse_nic_map(text: str) -> dict[str, list[NicName]]:
    """The value of `--nic-map`, as in "cuda:0=mlx5_0,mlx5_1;cuda:1=mlx5_2". Else ValueError."""
    pairs = [part.strip().partition("=") for part in text.split(";")]
    if not all(nics for _, _, nics in pairs) or len({device for device, *_ in pairs}) < len(pairs):
        raise ValueError(f"expected each memory once, as in cuda:0=mlx5_0;cpu=mlx5_1, got {text!r}")
    return {device: parse_nics(nics) for device, _, nics in pairs}


# --- Choosing ---


def _usable(
    ports: Sequence[Port], names: Sequence[NicName], gid_index: int | None
) -> tuple[dict[Port, Gid | None], list[str]]:
    """Ports of these names, or all: which can be used, by what address, and why not the others."""
    gids: dict[Port, Gid | None] = {}
    problems = []
    for port in ports:
        if not names or {(port.name, None), (port.name, port.port)} & {*names}:
            try:
                gids[port] = choose_gid(port, gid_index)
            except ValueError as error:
                problems.append(str(error))
    usable = {(port.name, number) for port in gids for number in (None, port.port)}
    missing = [f"{name}:{number or '*'} cannot be used" for name, number in {*names} - usable]
    if missing or not gids:
        there = ", ".join(map(str, ports)) or "none, load the driver of one"
        raise ValueError("; ".join([*missing, *problems, f"RDMA ports are: {there}"]))
    return gids, problems


def _best(gids: Mapping[Port, Gid | None]) -> list[Port]:
    """The ports with the best addresses and speed.

    Pages are spread evenly, so a slower port would set the pace of all; and the peers of one
    fabric, or kind of address, are not reached from another.
    """

    def merit(port: Port) -> tuple[bool, float, str]:
        gid = gids[port]
        routable = gid is None or not any(gid.faults[:2])
        return routable, float((port.rate or "0").split()[0]), port.link_layer

    return [port for port in gids if merit(port) == max(map(merit, gids))]


def _share(topology: Topology, gpu: Place, ports: Sequence[Port]) -> tuple[list[Port], str]:
    """The nearest ports to a GPU, dealt out among all GPUs to which just these are nearest."""

    def nearest(place: Place) -> list[Port]:
        most = max(nearness(place, port.place) for port in ports)
        return [port for port in ports if nearness(place, port.place) == most]

    near = nearest(gpu)
    rivals = sorted(other for other in topology.gpus.values() if nearest(other) == near)
    rank = rivals.index(gpu)
    mine = near[rank :: len(rivals)] or [near[rank % len(near)]]
    return mine, _NEARNESS[min(nearness(gpu, near[0].place), 3)]


def _nic_port(port: Port, gid: Gid | None, why: str) -> NicPort:
    return NicPort(
        name=port.name,
        port=port.port,
        gid_index=gid.index if gid else None,
        numa_node=int(port.place[0]) if port.place[0].isdecimal() else -1,
        reason=f"{gid or f'LID {port.lid}'}: {why}",
    )


# --- Reading sysfs ---


def _read_port(path: Path, cpus: Cpus) -> Port:
    """Of `class/infiniband/NAME/ports/PORT`."""
    device = path.parents[1]
    driver = device / "device/driver"
    table = sorted((int(entry.name), _read(entry)) for entry in (path / "gids").glob("*"))
    return Port(
        name=device.name,
        port=int(path.name),
        place=_place(device / "device", cpus),
        gids=tuple(_read_gid(path, index, gid) for index, gid in table if gid.strip("0:")),
        driver=driver.resolve().name if driver.exists() else "",
        state=_read(path / "state").rpartition(" ")[2],
        **{file: _read(path / file) for file in ("link_layer", "rate", "lid")},
    )


def _read_gid(port: Path, index: int, text: str) -> Gid:
    kind, netdev = (_read(port / f"gid_attrs/{folder}/{index}") for folder in ("types", "ndevs"))
    address = IPv6Address(text)
    return Gid(index=index, address=address.ipv4_mapped or address, kind=kind, netdev=netdev)


def _place(device: Path, cpus: Cpus) -> Place:
    """Where a link leads. Some devices are a part of a PCI device; virtual ones are of none."""
    folder = device.resolve()
    pci = [part for part in folder.parts if _PCI_STEP.fullmatch(part)]
    node = next(filter(None, (_read(d / "numa_node") for d in (folder, *folder.parents))), "-1")
    # A machine of one node often does not say so of its devices.
    node = str(*cpus) if len(cpus) == 1 else node
    return (f"unknown, {pci[:1]}" if node == "-1" else node, *pci)


def _parse_cpus(text: str) -> frozenset[int]:
    """Of "0-3,8-11"."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return frozenset(chain(*(range(int(a), int(b or a) + 1) for a, _, b in ranges)))


def _read(path: Path) -> str:
    """What a file holds; "" if there is none, or no value for it: an empty GID has no type."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
