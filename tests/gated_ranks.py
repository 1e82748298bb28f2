"""Rank processes that a test can hold in the middle of a step.

    test   <-- file "held" ---    rank RANK: before it stores its KV of layer LAYER
           --- file "go" ----->

After `gated(monkeypatch, folder, rank, layer)`, every rank of that number that is started stops
there, until the gate is opened.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from disagg.engine import ranks
from disagg.engine.ranks import Ranks
from disagg.model.attention import TorchPagedAttention
from tests.nodes import DEADLINE_SECONDS, wait_until

GATE = "DISAGG_TEST_GATE"


class Gate:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self._held, self._go = folder / "held", folder / "go"

    def wait_until_held(self) -> None:
        wait_until(self._held.exists, "no rank has come to the gate")

    def open(self) -> None:
        self._go.touch()


def gated(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, layer: int) -> Gate:
    monkeypatch.setenv(GATE, f"{rank} {layer} {folder}")
    program = Ranks.program.replace("disagg.engine.ranks", "tests.gated_ranks")
    monkeypatch.setattr(Ranks, "program", program)
    return Gate(folder)


def serve(fd: int) -> None:
    """In a rank's process."""
    rank, layer, folder = os.environ[GATE].split(maxsplit=2)
    make_runner = ranks.make_runner

    def make_gated(cache, counter, group, trace):
        runner = make_runner(cache, counter, group, trace)
        if group.rank == int(rank):
            runner.attention = _Gated(runner.attention, cache.layers[int(layer)], Path(folder))
        return runner

    ranks.make_runner = make_gated
    ranks.serve(fd)


class _Gated:
    def __init__(self, inner: TorchPagedAttention, pages, folder: Path) -> None:
        self.plan, self.run, self._append = inner.plan, inner.run, inner.append
        self._pages, self._folder = pages, folder

    def append(self, kv, pages) -> None:
        if pages.data_ptr() == self._pages.data_ptr():
            (self._folder / "held").touch()
            end = time.monotonic() + DEADLINE_SECONDS
            while not (self._folder / "go").exists() and time.monotonic() < end:
                time.sleep(0.001)
        self._append(kv, pages)
