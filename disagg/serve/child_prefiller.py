"""A prefiller as a child process that cannot outlive its parent.

parent --spawn--> run_prefill.py --listen 127.0.0.1:0
       <--stdout-- "listening on 127.0.0.1:PORT"
       dies (in any way) --kernel--> SIGKILL, which also ends a stopped child
"""

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from disagg.resource import Resource
from disagg.serve.options import address

SCRIPT = Path(__file__).parents[2] / "run_prefill.py"

#: From linux/prctl.h: the signal this process gets when its parent dies.
PR_SET_PDEATHSIG = 1

LISTENING = "listening on "


class ChildPrefiller(Resource):
    """Starts `run_prefill.py` at once; `address()` waits until it listens. Use it from the main
    thread: the kernel ends the child when the thread that started it ends. `patience` is how many
    seconds it has to end by itself when it is closed."""

    def __init__(self, flags: Sequence[str], *, patience: float = 0.0) -> None:
        self._patience = patience
        prctl = ctypes.CDLL(None).prctl
        # An interrupt is the parent's to handle, so the child holds it back for ever. The parent
        # does until the child is there: one that comes while Python forks would be swallowed.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), "--listen=127.0.0.1:0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                # Of a parent that died before, it hears when nobody reads where it listens.
                preexec_fn=partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def address(self) -> tuple[str, int]:
        """Where it listens. ValueError if it ended instead."""
        assert self._process.stdout is not None, "started with a pipe"
        for line in self._process.stdout:
            if line.startswith(LISTENING):
                return address(line.removeprefix(LISTENING).strip())
        code = self._process.wait()
        # Else it has said why, on our stderr.
        killed = f"the prefiller that was started here was ended by signal {-code}"
        raise ValueError(killed if code < 0 else "")

    def close(self) -> None:
        """End it, stopped or not, and wait until it is gone. May be called twice."""
        with self._process:  # which closes the pipe, too
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience)
            self._process.kill()
