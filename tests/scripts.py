"""The launch scripts as processes of their own, for tests.

`start` starts a new Python, as a user does. Importing torch takes seconds of that, so most tests
take `fork`: one process has imported it and forks for each script, which then runs from its top.
What they print goes to files, so that no test has to read along.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.nodes import wait_until

ROOT = Path(__file__).parents[1]

#: Two of them may import torch one after the other, on a machine with other things to do.
DEADLINE_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a script ended; `code` is minus the signal's number if one ended it."""

    code: int
    stdout: str
    stderr: str

    @property
    def stderr_line(self) -> str:
        """The one line on standard error; AssertionError if there are more, or none."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, f"expected one line on stderr, got {self}"
        return lines[0]


@dataclass
class Script:
    """A script that was started. `poll` gives its exit code, or None while it runs."""

    pid: int
    poll: Callable[[], int | None]
    stdout: Path
    stderr: Path

    def wait(self, seconds: float = DEADLINE_SECONDS) -> Outcome:
        """Its end, which must come within `seconds`."""
        wait_until(lambda: self.poll() is not None, self._tell, seconds)
        code = self.poll()
        assert code is not None, "it has ended"
        return Outcome(code=code, stdout=self.stdout.read_text(), stderr=self.stderr.read_text())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """A match in what it prints on stdout, which must come."""
        wait_until(
            lambda: (
                re.search(pattern, self.stdout.read_text()) is not None or self.poll() is not None
            ),
            self._tell,
            DEADLINE_SECONDS,
        )
        found = re.search(pattern, self.stdout.read_text())
        assert found is not None, f"it ended without {pattern}: {self._tell()}"
        return found

    def address(self) -> str:
        """Where a prefiller listens."""
        return self.wait_for(r"listening on (\S+)\n")[1]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it if it still runs, stopped or not, and wait until it is gone."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            wait_until(lambda: self.poll() is not None)

    def _tell(self) -> str:
        return f"{self.poll()} {self.stdout.read_text()} {self.stderr.read_text()}"


@dataclass
class Scripts:
    """Starts scripts whose output lies in `folder`, and ends those that are left at `close`."""

    folder: Path
    started: list[Script] = field(default_factory=list)

    def start(self, name: str, *arguments: str, within: Sequence[str] = ()) -> Script:
        """A new Python runs `name`, started by the command `within` (which becomes it), if any."""
        stdout, stderr = self._files()
        with stdout.open("w") as out, stderr.open("w") as err:
            process = subprocess.Popen(
                [*within, sys.executable, str(ROOT / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
            )
        return self._keep(Script(process.pid, process.poll, stdout, stderr))

    def fork(self, name: str, *arguments: str) -> Script:
        """`name` runs in a fork of a process that has imported torch."""
        stdout, stderr = self._files()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["disagg.serve.commands", "tests.nodes"])
        process = context.Process(target=_run, args=(name, arguments, stdout, stderr))
        process.start()
        assert process.pid is not None, "it was started"
        return self._keep(Script(process.pid, lambda: process.exitcode, stdout, stderr))

    def close(self) -> None:
        """Kill whatever still runs."""
        for script in self.started:
            script.kill()

    def _files(self) -> tuple[Path, Path]:
        count = len(self.started)
        paths = self.folder / f"{count}.stdout", self.folder / f"{count}.stderr"
        for path in paths:
            path.touch()
        return paths

    def _keep(self, script: Script) -> Script:
        self.started.append(script)
        return script


@contextmanager
def scripts(folder: Path) -> Iterator[Scripts]:
    """`Scripts` that are closed at the end."""
    starter = Scripts(folder)
    try:
        yield starter
    finally:
        starter.close()


def _run(name: str, arguments: tuple[str, ...], stdout: Path, stderr: Path) -> None:
    """In the fork: become the script."""
    for path, number in ((stdout, 1), (stderr, 2)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = [name, *arguments]
    runpy.run_path(str(ROOT / name), run_name="__main__")
