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
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path
from statistics import mode

import msgspec

from disagg.config import RdmaFlags

#: The way to a device: NUMA node, host bridge, root port, both ends of each switch, itself.
Place = tuple[str, ...]

#: In words, how near two devices are whose ways begin with as many common steps.
_NEARNESS = ("other or unknown NUMA node", "same NUMA node", "same host bridge", "same PCI switch")
_PCI_STEP = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA_GPUS = ("0x10de 0x0300", "0x10de 0x0302")


class PortAddress(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Of a port: an entry of its GID table, or its LID (`index` None). Less is better. `faults`:
    RoCE v1, link-local, IPv6."""

    faults: tuple[bool, bool, bool]
    index: int | None
    text: str

    @property
    def is_routable(self) -> bool:
        """Whether it leads beyond the own link."""
        return not any(self.faults[:2])


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device. `gids`: the entries that are not empty. Texts are as in sysfs."""

    name: str
    port: int
    place: Place
    gids: tuple[PortAddress, ...]
    driver: str
    state: str
    link_layer: str
    rate: str
    lid: str

    def __str__(self) -> str:
        return f"{self.name} port {self.port} ({self.link_layer}, {self.rate}, state {self.state})"


#: Ports to open, each with the address it is used by.
Nics = dict[Port, PortAddress]


class Topology:
    """The machine under `root`, a sysfs; a folder that is missing holds nothing.

    CPUs by NUMA node; GPUs by the name of their memory ("cuda:0"), in the order that CUDA has with
    CUDA_DEVICE_ORDER=PCI_BUS_ID and all GPUs visible; ports by place.
    """

    def __init__(self, root: Path = Path("/sys")) -> None:
        self.cpus: Mapping[str, Set[int]] = {
            node.name[4:]: {int(cpu.name[3:]) for cpu in node.glob("cpu[0-9]*")}
            for node in (root / "devices/system/node").glob("node[0-9]*")
        }
        gpus = [
            self._place(device)
            for device in sorted((root / "bus/pci/devices").glob("*"))
            if f"{_read(device / 'vendor')} {_read(device / 'class')}".startswith(_NVIDIA_GPUS)
        ]
        self.gpus = {f"cuda:{index}": place for index, place in enumerate(gpus)}
        ports = map(self._read_port, (root / "class/infiniband").glob("*/ports/*"))
        self.ports = sorted(ports, key=lambda port: (port.place, port.name, port.port))

    def _place(self, device: Path) -> Place:
        """Where a link leads. Some devices are a part of a PCI device; virtual ones are of none."""
        folder = device.resolve()
        pci = [part for part in folder.parts if _PCI_STEP.fullmatch(part)]
        node = next(filter(None, (_read(d / "numa_node") for d in (folder, *folder.parents))), "-1")
        if len(self.cpus) == 1:  # such a machine often does not say so of its devices
            (node,) = self.cpus
        return (f"unknown, {pci[:1]}" if node == "-1" else node, *pci)

    def _read_port(self, path: Path) -> Port:
        """Of `class/infiniband/NAME/ports/PORT`."""
        device = path.parents[1]
        table = sorted((int(entry.name), _read(entry)) for entry in (path / "gids").glob("*"))
        return Port(
            name=device.name,
            port=int(path.name),
            place=self._place(device / "device"),
            gids=tuple(_read_gid(path, index, gid) for index, gid in table if gid.strip("0:")),
            driver=(device / "device/driver").resolve().name,
            state=_read(path / "state").rpartition(" ")[2],
            **{file: _read(path / file) for file in ("link_layer", "rate", "lid")},
        )


def nearness(a: Place, b: Place) -> int:
    """How many steps the ways to two devices have in common; more is nearer.

    Below the same root port there must be a switch, for such a port has a single link.
    """
    return len(set(a) & set(b))


def choose_address(port: Port, wanted: int | None = None) -> PortAddress:
    """How to address a port: by the entry wanted, else by LID, else by its best GID.

    ValueError if RC queue pairs cannot use the port now, or not with this entry.
    """
    if port.driver == "efa":
        raise ValueError(f"{port}: EFA has no RC queue pairs; use another device or transport")
    if port.state != "ACTIVE":
        raise ValueError(f"{port}: expected ACTIVE; check cable, interface and subnet manager")
    if port.link_layer == "InfiniBand" and wanted is None:
        return PortAddress(faults=(False, False, False), index=None, text=f"LID {port.lid}")
    gids = [gid for gid in port.gids if wanted in (None, gid.index)]
    if not gids:
        entry = "GID" if wanted is None else f"GID {wanted} (empty, or beyond the table)"
        valid = "; ".join(gid.text for gid in port.gids) or "none, give its interface an address"
        raise ValueError(f"{port} has no {entry}; valid: {valid}")
    return min(gids)


def choose_nics(
    topology: Topology, devices: Sequence[str], flags: RdmaFlags
) -> tuple[dict[str, Nics], list[str]]:
    """The NICs of each of `devices` ("cpu", "cuda:0"...), and lines for a log: the choice and why.

    ValueError if no port can be used, or not as the flags ask.
    """
    pairs = [pair.partition("=") for pair in (flags.nic_map.split(";") if flags.nic_map else ())]
    mapped = {device.strip(): names for device, _, names in pairs}
    if unknown := mapped.keys() - {*devices}:
        raise ValueError(
            f"no memory {', '.join(unknown)} to map; there is {', '.join(devices)};"
            f" expected as in {devices[0]}=mlx5_0,mlx5_1, got {flags.nic_map!r}"
        )
    candidates, left_out = _pick(topology.ports, flags.rdma_device, flags.gid_index)
    lines = [f"left out: {why}" for why in left_out]
    nics: dict[str, Nics] = {}
    in_use: Nics = {}
    # The CPU comes last: where there are GPUs, its bytes take the NICs that are open anyway.
    for device in sorted(devices, key="cpu".__eq__):
        if device in mapped:
            nics[device], _ = _pick(topology.ports, mapped[device], flags.gid_index)
            why = "as mapped"
        elif device == "cpu":
            nics[device], why = dict(in_use or candidates), "all in use"
        else:
            nics[device], why = _share(topology, topology.gpus[device], candidates)
        in_use |= nics[device]
        lines += [
            f"{device} -> {port.name} port {port.port}, {address.text}: {why}"
            for port, address in nics[device].items()
        ]
    return nics, lines


def poll_cpus(
    topology: Topology, ports: Iterable[Port], available: Set[int], wanted: int | None
) -> tuple[Set[int], str]:
    """Where the polling thread may run, and why: on the NUMA node that most of its NICs are on.

    `available`: where the process may. ValueError if what is wanted is not among them.
    """
    if wanted is not None and wanted not in available:
        raise ValueError(f"--poll-cpu {wanted}: expected one of {sorted(available)}")
    if wanted is not None:
        return {wanted}, "as asked"
    node = mode(port.place[0] for port in ports)
    near = topology.cpus.get(node, frozenset()) & available
    return (near, f"NUMA node {node}, as its NICs") if near else (available, "none known as nearer")


def _pick(
    ports: Sequence[Port], names: str | None, gid_index: int | None
) -> tuple[Nics, list[str]]:
    """Ports of these names, or of all those with the best addresses and speed: by what address they
    are used, and why others are not.

    Pages are spread evenly, so a slower port would set the pace of all; and the peers of one
    fabric, or kind of address, are not reached from another.
    """
    nics: Nics = {}
    left_out = []
    wanted = set() if names is None else {name.strip() for name in names.split(",")}
    missing = set(wanted)
    for port in ports:
        called = {port.name, f"{port.name}:{port.port}"}
        if not wanted or called & wanted:
            try:
                nics[port] = choose_address(port, gid_index)
                missing -= called
            except ValueError as error:
                left_out.append(str(error))
    if missing or not nics:
        there = ", ".join(map(str, ports)) or "none, load the driver of one"
        unusable = [f"{name!r} cannot be used" for name in sorted(missing)]
        raise ValueError("; ".join([*unusable, *left_out, f"RDMA ports are: {there}"]))

    def merit(port: Port) -> tuple[bool, float, str]:
        return nics[port].is_routable, float((port.rate or "0").split()[0]), port.link_layer

    most = max(map(merit, nics))
    best = {port: nics[port] for port in nics if wanted or merit(port) == most}
    worse = sorted(f"{port} at {nics[port].text}" for port in nics.keys() - best)
    return best, [*left_out, *(f"{port}: {next(iter(best))} is better" for port in worse)]


def _share(topology: Topology, gpu: Place, nics: Nics) -> tuple[Nics, str]:
    """The nearest NICs to a GPU, dealt out among all GPUs to which just these are nearest."""

    def nearest(place: Place) -> list[Port]:
        most = max(nearness(place, port.place) for port in nics)
        return [port for port in nics if nearness(place, port.place) == most]

    near = nearest(gpu)
    rivals = sorted(other for other in topology.gpus.values() if nearest(other) == near)
    number = rivals.index(gpu)
    mine = near[number :: len(rivals)] or [near[number % len(near)]]
    return {port: nics[port] for port in mine}, _NEARNESS[min(nearness(gpu, near[0].place), 3)]


def _read_gid(port: Path, index: int, text: str) -> PortAddress:
    kind, netdev = (_read(port / f"gid_attrs/{folder}/{index}") for folder in ("types", "ndevs"))
    ip = IPv6Address(text).ipv4_mapped or IPv6Address(text)
    faults = kind != "RoCE v2", ip.is_link_local, ip.version != 4
    routable = "not routable" if any(faults[:2]) else "routable"
    text = f"GID {index} ({kind}, {ip}, {netdev}, {routable})"
    return PortAddress(faults=faults, index=index, text=text)


def _read(path: Path) -> str:
    """What a file holds; "" if there is none, or no value for it: an empty GID has no type."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
