"""Boot one or two emulated machines and run a job in each; their consoles come back line by line.

run --> qemu 1 --serial console--> lines, the last one "ended with CODE"
    '-> qemu 2 --serial console--> lines
         '== virtual cable, a pair of sockets ==' (only if there are two)
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.rdma_vm.kernel import HERE, CannotBootError, cached_kernel, make_initrd, missing

ROOT = HERE.parents[1]
QEMU = (
    # It must not outlive whoever runs this, however that ends.
    *("setpriv", "--pdeathsig", "KILL"),
    # For a later model of CPU, torch picks code that emulation makes many times slower.
    *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-smp", "2"),
    # Enough for a node with torch, and for what is written in the machine.
    *("-m", "4096", "-no-reboot", "-display", "none", "-monitor", "none", "-serial", "stdio"),
    # remap: folders of the host's root may be file systems of their own.
    "-virtfs",
    "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
)
#: A kernel whose CPUs have to wait for the host's takes its timer for broken, which ends it, or a
#: CPU for stuck, which it prints into the middle of a line.
KERNEL = "console=ttyS0 panic=-1 quiet no_timer_check nowatchdog"
#: How long the other machine may take to end by itself when one has failed.
GRACE_SECONDS = 10.0
#: Many times what a job takes: it bounds what hangs, on a slow or loaded host too.
MOST_SECONDS = 3600.0


class JobFailedError(Exception):
    """A job did not end with 0; what it printed was shown. `code` is for the shell."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


def run(
    command: Sequence[str],
    *,
    machines: int = 1,
    seconds: float = MOST_SECONDS,
    show: Callable[[str], None] = print,
) -> list[str]:
    """Run a command in the root of the checkout on 1 or 2 machines, $NODE being 1 or 2.

    `python` is there the Python that runs this. Returns what each machine printed, standard error
    included; `show` gets each line at once. CannotBootError, or JobFailedError if a command ended
    with another code than 0, a machine died, or `seconds` are over.
    """
    if lack := missing():
        raise CannotBootError(lack)
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as name, contextlib.ExitStack() as stack:
        work = Path(name)
        kernel = cached_kernel()
        initrd = make_initrd(kernel, work)
        (work / "job.sh").write_text(f"exec {shlex.join(command)}\n")
        paths = {"GUEST": HERE / "guest.sh", "JOB": work / "job.sh", "ROOT": ROOT}
        paths["BIN"] = Path(sys.executable).parent
        environment = " ".join(f'{name}="{path}"' for name, path in paths.items())
        boot = [*QEMU, "-kernel", str(kernel / "vmlinuz"), "-initrd", str(initrd)]
        cable = [stack.enter_context(end) for end in socket.socketpair()]
        started = []
        for node in range(1, machines + 1):
            words = f"{KERNEL} {environment} MACHINES={machines} NODE={node}"
            link = cable[node - 1].fileno() if machines == 2 else None
            machine = Machine(node, [*boot, "-append", words], link, show)
            started.append(stack.enter_context(contextlib.closing(machine)))
        _wait(started, time.monotonic() + seconds)
    codes = [machine.code for machine in started]
    if any(code != 0 for code in codes):
        told = ", ".join("no result" if code is None else f"exit code {code}" for code in codes)
        code = next((code for code in codes if code), 1)
        raise JobFailedError(f"{shlex.join(command)}: {told} (limit {seconds:.0f} s)", code)
    return ["\n".join(machine.lines) for machine in started]


class Machine:
    """A qemu whose console is read by a thread. `code`: how its job ended; None if unknown."""

    def __init__(
        self, node: int, command: list[str], link: int | None, show: Callable[[str], None]
    ) -> None:
        self.code: int | None = None
        self.lines: list[str] = []
        if link is None:
            prefix, network, pass_fds = "", ["-nic", "none"], ()
        else:
            card = f"virtio-net-pci,netdev=cable,mac=52:54:00:00:00:{node:02}"
            network = ["-netdev", f"socket,id=cable,fd={link}", "-device", card]
            prefix, pass_fds = f"{node}| ", (link,)
        self._process = subprocess.Popen(
            [*command, *network],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=pass_fds,
        )
        self._reader = threading.Thread(target=self._read, args=(prefix, show))
        self._reader.start()

    @property
    def runs(self) -> bool:
        """Whether its job may still end by itself."""
        return self._reader.is_alive()

    def close(self) -> None:
        """Pull the plug. May be called twice."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self, prefix: str, show: Callable[[str], None]) -> None:
        """Until the job has ended or the machine died."""
        assert self._process.stdout is not None, "qemu was started with a pipe"
        with self._process.stdout:
            for line in self._process.stdout:
                if ended := re.fullmatch(r"ended with (\d+)\s*", line):
                    self.code = int(ended[1])
                    return
                self.lines.append(line.rstrip())
                show(prefix + self.lines[-1])


def _wait(machines: Sequence[Machine], end: float) -> None:
    """Until all have ended, `end` has come, or one failed some seconds ago."""
    while any(machine.runs for machine in machines) and time.monotonic() < end:
        if any(not machine.runs and machine.code != 0 for machine in machines):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.1)
