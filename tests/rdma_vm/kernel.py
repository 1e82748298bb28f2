"""What qemu boots: a Debian kernel that has soft-RoCE, and an initial RAM disk with its modules.

apt's index --> name, version, sha256
apt-get download --> .deb --(sha256)--> unpacked --> vmlinuz, modules/   kept in the cache
                                  busybox, init, modules/ --> initrd     made for each run
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

#: Needed in the machine, each after what it stands on. Without crc32_generic, rxe refuses devices.
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_net", "veth"),
    *("crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
)
#: The file that shows that a package is there, searched for as a program unless it is a path.
PACKAGES = {
    "qemu-system-x86": "qemu-system-x86_64",
    "busybox-static": "/usr/share/doc/busybox-static",  # a busybox without libraries
    "cpio": "cpio",
    "kmod": "modprobe",
    "iproute2": "rdma",
    "ibverbs-providers": "/etc/libibverbs.d/rxe.driver",
    "ibverbs-utils": "ibv_devinfo",
    "python3-pyverbs": "/usr/lib/python3/dist-packages/pyverbs",
    "perftest": "ib_write_bw",
}
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class CannotBootError(Exception):
    """No machine can be booted here: one line, and what to do."""


class WrongKernelError(Exception):
    """What was fetched is not what apt's signed index says."""


def missing() -> str:
    """One line: what this host lacks to boot machines and how to get it. Empty: nothing."""
    if not sys.platform.startswith("linux") or shutil.which("apt-get") is None:
        return "emulated RDMA machines need a Debian host (its kernel package, and apt-get)"
    lacking = [
        package
        for package, file in PACKAGES.items()
        if shutil.which(file, path=PATH) is None and not Path(file).exists()
    ]
    if lacking:
        return (
            f"not installed: {', '.join(lacking)};"
            f" apt-get install --no-install-recommends {' '.join(lacking)}"
        )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not list(Path(PACKAGES["python3-pyverbs"]).glob(f"device{suffix}")):
        return f"Debian's pyverbs is not built for this Python ({suffix}); run with its python3"
    return ""


def cached_kernel() -> Path:
    """A folder with `vmlinuz` and `modules/`, whose names are in the order to load them.

    Fetched (70 MB) if apt has a newer one than the cache. CannotBootError says why it cannot be,
    WrongKernelError that it must not be booted.
    """
    depends = _output("apt-cache", "depends", "linux-image-amd64")
    names = re.findall(r"Depends: (linux-image-\d\S+)", depends)
    if not names:
        raise CannotBootError("apt knows no linux-image-amd64; run apt-get update on Debian")
    shown = _output("apt-cache", "show", "--no-all-versions", names[0])
    index = dict(re.findall(r"^(\w+): (\S+)$", shown, re.M))
    package = f"{names[0]}={index['Version']}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "disagg/rdma_vm"
    key = hashlib.sha256(" ".join((index["SHA256"], *MODULES)).encode()).hexdigest()
    folder = cache / f"{names[0]}-{key[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as name:
            _fetch(Path(name), package, index["SHA256"])
            # Seen under its name only when complete; somebody else's is as good.
            try:
                (Path(name) / "kernel").rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder


def make_initrd(kernel: Path, work: Path) -> Path:
    """The initial RAM disk: loads all modules, mounts the host's root, goes on there."""
    root = work / "initrd"
    for name in ("bin", "proc", "sys", "dev", "mnt", "newroot"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox", path=PATH) or "busybox", root / "bin/busybox")
    shutil.copytree(kernel / "modules", root / "modules")
    shutil.copy(HERE / "init", root / "init")
    (root / "init").chmod(0o755)
    archive = work / "initrd.cpio"
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with archive.open("wb") as file:
        command = ["cpio", "--quiet", "-o", "-H", "newc"]
        subprocess.run(command, input=names.encode(), stdout=file, cwd=root, check=True)
    return archive


def _fetch(work: Path, package: str, sha256: str) -> None:
    """Download, verify and unpack a kernel package; leaves `kernel/` in `work`."""
    # apt's own user must be able to write here, or apt warns.
    work.chmod(0o755)
    print(f"fetching {package} (70 MB)", flush=True)
    _output("apt-get", "download", "-qq", package, cwd=work)
    (deb,) = work.glob("*.deb")
    got = hashlib.sha256(deb.read_bytes()).hexdigest()
    if got != sha256:
        raise WrongKernelError(f"{deb.name}: sha256 expected {sha256}, got {got}; do not boot it")
    _output("dpkg", "-x", str(deb), str(work))
    (release,) = (path.name for path in (work / "lib/modules").iterdir())
    _output("depmod", "-b", str(work), release)
    files: dict[str, None] = {}
    for module in MODULES:
        show = ("modprobe", "-d", str(work), "-S", release, "--show-depends", module)
        files |= dict.fromkeys(re.findall(r"^insmod (\S+)", _output(*show), re.M))
    (work / "kernel/modules").mkdir(parents=True)
    for index, file in enumerate(files):
        shutil.copy(file, work / f"kernel/modules/{index:02}-{Path(file).name}")
    shutil.copy(work / f"boot/vmlinuz-{release}", work / "kernel/vmlinuz")


def _output(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | {"PATH": PATH, "LC_ALL": "C"},
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise CannotBootError(f"{' '.join(command)}: {reason}")
    return done.stdout
