"""A prefiller in a process of its own that a test can hold, stop and kill at a chosen moment.

test   --"balance"-->           child: a HeldNode
       <--stats--
       <--"held"--              at the chosen layer of the chosen step, where it then waits
       <--"held"--              or in the middle of the chosen copy, where it stops itself
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.engines import in_halves, shm_engine
from tests.nodes import DEADLINE_SECONDS, HeldNode, balance_of, node_config, wait_until


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When to hold, counted from 0: before `layer` of `step`, or in the middle of `copy`."""

    step: int = -1
    layer: int = -1
    copy: int = -1


def main(pipe: Connection, folder: Path, settings: dict[str, Any], moment: Moment) -> None:
    """The child: serves until the pipe ends."""
    calls = [0, 0]  # steps, layers of this step

    def before_layer(layer):
        if (calls[0], layer) == (moment.step, moment.layer):
            pipe.send("held")
            threading.Event().wait()
        if layer == node._models[0].num_layers:
            calls[0] += 1

    copies = itertools.count()

    def inside():  # a copy that holds the peer's lease
        if next(copies) == moment.copy:
            pipe.send("held")
            signal.raise_signal(signal.SIGSTOP)  # sent to this very thread, so it goes no further

    transfer = shm_engine(in_halves(inside))
    node = HeldNode(
        node_config(folder, **settings), before_layer=before_layer, make_transfer=lambda: transfer
    )
    pipe.send(node.address)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            break
        assert asked == "balance", asked
        pipe.send(balance_of(node))
    node.close()


class PrefillerProcess:
    """See the module. `address` is where it listens."""

    def __init__(
        self, folder: Path, moment: Moment, address: tuple[str, int], settings: dict[str, Any]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["disagg.serve.commands", "tests.nodes"])
        self._pipe, theirs = context.Pipe()
        settings = settings | {"listen": address}
        self._process = context.Process(
            target=main, args=(theirs, folder, settings, moment), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        self.address = self._receive()
        self.at_start = self.balance()

    def balance(self) -> Any:
        """What is free and open there, as `nodes.balance_of`."""
        self._pipe.send("balance")
        return self._receive()

    def wait_for_balance(self) -> None:
        """Everything is free there again, soon."""
        wait_until(lambda: self.balance() == self.at_start, lambda: f"{self.balance()}")

    def wait_until_held(self) -> None:
        """It has come to its moment."""
        assert self._receive() == "held"

    def wait_until_stopped(self) -> None:
        """It has stopped itself in the middle of a copy."""
        self.wait_until_held()
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def wake(self) -> None:
        """Let a stopped one go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, stopped or not; waits until it is gone. May be called twice."""
        self._process.kill()
        self._process.join(DEADLINE_SECONDS)

    def _receive(self) -> Any:
        assert self._pipe.poll(DEADLINE_SECONDS), "the prefiller's process says nothing"
        return self._pipe.recv()


@contextmanager
def prefiller_process(
    folder: Path,
    *,
    moment: Moment | None = None,
    address: tuple[str, int] = ("127.0.0.1", 0),
    **settings: Any,
) -> Iterator[PrefillerProcess]:
    """A prefiller that is killed at the end."""
    process = PrefillerProcess(folder, moment or Moment(), address, settings)
    try:
        yield process
    finally:
        process.kill()
