"""Machines of many kinds as sysfs shows them, each built under a folder that a test owns.

    devices/pci0000:17/0000:17:01.0/.../0000:1a:00.0/    vendor class numa_node
                                       '- infiniband/mlx5_0/ports/1/{state,gids/0,gid_attrs/...}
    bus/pci/devices/0000:1a:00.0 ---------> that folder
    class/infiniband/mlx5_0 --------------> its infiniband/mlx5_0, where device -> ../..

The names and texts are those of the drivers mlx5, rxe and efa.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: GID as in sysfs, type, network interface; None for an entry that is empty.
GidRow = tuple[str, str, str] | None

V1, V2 = "IB/RoCE v1", "RoCE v2"
LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
GLOBAL_IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"


def ipv4(address: str) -> str:
    """As a GID: mapped into IPv6."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def roce_gids(address: str, netdev: str) -> list[GidRow]:
    """The table that mlx5 makes of an interface with an IPv4 address: index 3 is the right one."""
    rows = [(gid, kind, netdev) for gid in (LINK_LOCAL, ipv4(address)) for kind in (V1, V2)]
    return [*rows, None, None]


@dataclass(frozen=True, kw_only=True)
class PortRow:
    """The files of a port."""

    gids: Sequence[GidRow]
    state: str = "4: ACTIVE"
    link_layer: str = "Ethernet"
    rate: str = "400 Gb/sec (4X NDR)"
    lid: str = "0x0"


INFINIBAND = PortRow(gids=[(LINK_LOCAL, V1, "")], link_layer="InfiniBand", lid="0x1f")


def roce(number: int, **files: str) -> PortRow:
    """Port of an interface eth<number> at 10.0.0.<number>."""
    return PortRow(gids=roce_gids(f"10.0.0.{number}", f"eth{number}"), **files)


class Tree:
    """A sysfs under `root`, empty at first."""

    def __init__(self, root: Path, *cpulists: str) -> None:
        self.root = root
        for node, cpulist in enumerate(cpulists):
            for first, _, last in (part.partition("-") for part in cpulist.split(",")):
                for cpu in range(int(first), int(last or first) + 1):
                    place = root / f"devices/system/cpu/cpu{cpu}"
                    link(root / f"devices/system/node/node{node}/cpu{cpu}", place)

    def pci(self, way: str, numa_node: int, **files: str) -> Path:
        """A PCI device at the end of `way`, "pci0000:17/0000:17:01.0/0000:18:00.0"."""
        folder = self.root / "devices" / way
        write(folder, numa_node=str(numa_node), **files)
        link(self.root / "bus/pci/devices" / folder.name, folder)
        return folder

    def gpu(self, way: str, numa_node: int, kind: str = "0x030200") -> None:
        self.pci(way, numa_node, vendor="0x10de", **{"class": kind})

    def nic(
        self, name: str, folder: Path | None, *ports: PortRow, driver: str = "mlx5_core"
    ) -> None:
        """An RDMA device of the device at `folder`, or a virtual one."""
        parent = folder or self.root / "devices/virtual"
        device = parent / "infiniband" / name
        for number, port in enumerate(ports, 1):
            at = device / f"ports/{number}"
            texts = {key: text for key, text in vars(port).items() if key != "gids"}
            write(at, **texts)
            for index, row in enumerate(port.gids):
                gid, kind, netdev = row or (":".join(["0000"] * 8), "", "")
                write(at / "gids", **{str(index): gid})
                for attribute, text in (("types", kind), ("ndevs", netdev)):
                    entry = at / "gid_attrs" / attribute / str(index)
                    # An empty entry has a file that cannot be read: here, a folder.
                    write(entry.parent, **{entry.name: text}) if text else entry.mkdir(parents=True)
        if folder:
            link(device / "device", folder)
            link(folder / "driver", self.root / "bus/pci/drivers" / driver)
        link(self.root / "class/infiniband" / name, device)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(target)


# --- Machines ---

#: Two host bridges on each of two NUMA nodes, below each one root port and one switch.
BUSES = ("17", "5d", "97", "df")


def switch_port(bus: str, number: int) -> str:
    """The way to what is plugged into one of the downstream ports of a switch."""
    up, inner, below = (f"{int(bus, 16) + step:02x}" for step in (1, 2, 3 + number))
    return (
        f"pci0000:{bus}/0000:{bus}:01.0/0000:{up}:00.0/0000:{inner}:0{number}.0/0000:{below}:00.0"
    )


def switched(root: Path, nics_a_switch: int) -> Tree:
    """8 GPUs, two at each of four switches, and beside them one or two NICs."""
    tree = Tree(root, "0-3,8-11", "4-7,12-15")
    for index, bus in enumerate(BUSES):
        for number in range(2):
            tree.gpu(switch_port(bus, number), index // 2)
        for number in range(nics_a_switch):
            nic = index * nics_a_switch + number
            folder = tree.pci(switch_port(bus, 2 + number), index // 2)
            tree.nic(f"mlx5_{nic}", folder, roce(nic))
    return tree


def eight_to_eight(root: Path) -> Tree:
    """As a DGX; one more port is slower, one is down."""
    tree = switched(root, 2)
    slow = tree.pci("pci0000:17/0000:17:05.0/0000:30:00.0", 0)
    tree.nic("mlx5_8", slow, roce(8, rate="25 Gb/sec (1X EDR)"))
    unplugged = tree.pci("pci0000:17/0000:17:07.0/0000:31:00.0", 0)
    tree.nic("mlx5_9", unplugged, roce(9, state="1: DOWN"))
    return tree


def eight_to_four(root: Path) -> Tree:
    return switched(root, 1)


def cascade(root: Path) -> Tree:
    """One root port, behind it a switch of switches: a GPU and a NIC at each of the inner ones."""
    tree = Tree(root, "0-7")
    for number in range(2):
        inner = (
            f"pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:0{number}.0/0000:{number + 3:02x}:00.0"
        )
        # The GPUs in the other order than the NICs.
        tree.gpu(f"{inner}/0000:0{number + 5}:00.0/0000:{8 - number:02x}:00.0", -1)
        folder = tree.pci(f"{inner}/0000:0{number + 5}:01.0/0000:{number + 16:02x}:00.0", -1)
        tree.nic(f"mlx5_{number}", folder, roce(number))
    return tree


def four_to_one(root: Path) -> Tree:
    """Every device at a root port of its own, two of the GPUs below the host bridge of the NIC."""
    tree = Tree(root, "0-3", "4-7")
    for number, bus in enumerate(("17", "5d", "97", "97")):
        tree.gpu(
            f"pci0000:{bus}/0000:{bus}:0{number}.0/0000:{number + 32:02x}:00.0",
            number // 2,
            "0x030000",
        )
    tree.nic("mlx5_0", tree.pci("pci0000:97/0000:97:08.0/0000:99:00.0", 1), roce(0))
    return tree


def four_to_eight(root: Path) -> Tree:
    """A virtual machine: two GPUs and four NICs at each of two bridges, NUMA nodes unknown."""
    tree = Tree(root, "0-3", "4-7")
    for bridge, bus in enumerate(("00", "80")):
        for number in range(2):
            tree.gpu(f"pci0000:{bus}/0000:{bus}:0{number}.0", -1)
        for number in range(4):
            nic = 4 * bridge + number
            tree.nic(
                f"mlx5_{nic}", tree.pci(f"pci0000:{bus}/0000:{bus}:1{number}.0", -1), roce(nic)
            )
    return tree


def no_gpu(root: Path) -> Tree:
    """Two NICs on node 1, one on node 0; a display adapter of another vendor."""
    tree = Tree(root, "0-3", "4-7")
    tree.pci("pci0000:00/0000:00:02.0", 0, vendor="0x1a03", **{"class": "0x030000"})
    for number, bus in enumerate(("17", "97", "98")):
        folder = tree.pci(f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus[0]}a:00.0", int(number > 0))
        tree.nic(f"mlx5_{number}", folder, roce(number))
    return tree


def infiniband(root: Path) -> Tree:
    """A card with two ports, the second without subnet manager; and one of Ethernet, as fast."""
    tree = Tree(root, "0-7")
    folder = tree.pci("pci0000:17/0000:17:01.0/0000:18:00.0", -1)
    waiting = PortRow(gids=[], state="2: INIT", link_layer="InfiniBand")
    tree.nic("mlx5_0", folder, INFINIBAND, waiting)
    tree.nic("mlx5_1", tree.pci("pci0000:17/0000:17:02.0/0000:1a:00.0", -1), roce(1))
    return tree


def bonded(root: Path) -> Tree:
    """A card whose two ports are one device, at the bond's addresses; its rate cannot be read."""
    tree = Tree(root, "0-3", "4-7")
    folder = tree.pci("pci0000:97/0000:97:01.0/0000:98:00.0", 1)
    tree.nic("mlx5_bond_0", folder, PortRow(gids=roce_gids("10.0.0.9", "bond0"), rate=""))
    return tree


def bonded_by_kernel(root: Path) -> Tree:
    """Two devices below a bond that the card knows nothing of: one of them has no address."""
    tree = Tree(root, "0-7")
    for number, gids in enumerate((roce_gids("10.0.0.9", "bond0"), [(LINK_LOCAL, V2, "eth1")])):
        folder = tree.pci(f"pci0000:97/0000:97:01.0/0000:98:00.{number}", 0)
        tree.nic(f"mlx5_{number}", folder, PortRow(gids=gids))
    return tree


def soft_roce(root: Path) -> Tree:
    """rxe on a dummy interface, and (as older kernels have it) as a child of a virtio device."""
    tree = Tree(root, "0-1", "2-3")
    tree.nic("rxe0", None, roce(0, rate="2.5 Gb/sec (1X SDR)"))
    virtio = tree.pci("pci0000:00/0000:00:03.0", 1) / "virtio0"
    tree.nic("rxe1", virtio, roce(1, rate="2.5 Gb/sec (1X SDR)"), driver="virtio_net")
    return tree


def efa(root: Path) -> Tree:
    """A cloud machine whose NICs have no RC queue pairs."""
    tree = Tree(root, "0-7")
    tree.gpu("pci0000:10/0000:10:1c.0", 0)
    port = PortRow(gids=[(LINK_LOCAL, "", "")], link_layer="Unknown", rate="100 Gb/sec (4X EDR)")
    tree.nic("rdmap16s27", tree.pci("pci0000:10/0000:10:1b.0", 0), port, driver="efa")
    return tree


def nothing(root: Path) -> Tree:
    """A laptop: no class/infiniband at all."""
    return Tree(root, "0-7")


Machine = Callable[[Path], Tree]
