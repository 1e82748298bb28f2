"""`--check`: the path to a prefiller, proved and measured without a model.

    probe                                    prefiller
      Hello(PROBE) ------------------------->
      <-------------------------------- Hello         the transport, and whom we met
      what must be refused ----------------->
      <---------------- PrefillStopped, why           and nothing has landed
      ProbeRequest(bytes, pages, imm) ------>
      <== its pattern, page by page, imm ====         each byte compared, each write counted

The prefiller goes on serving decoders: at most `MOST_BYTES` are asked for at once.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from disagg.config import ITEMSIZE
from disagg.messenger import messages
from disagg.messenger.admission import MAX_PROBE_PAGES
from disagg.messenger.messages import Message, ProtocolError, Role
from disagg.messenger.node_memory import PROBE_BYTES, probe_pattern
from disagg.messenger.prefillers import Address
from disagg.serve.exits import EXIT_DONE, EXIT_FAILED
from disagg.serve.options import given
from disagg.shared_memory import SharedMemory
from disagg.transfer.auto import make_engine, open_nics
from disagg.transfer.interface import ImmReached, Memory, MessageReceived, PeerLost, TransferEngine
from disagg.transfer.topology import RdmaFlags

MOST_BYTES = 32 << 20
#: Memory behind what a write may touch: it must stay as it is.
GUARD_BYTES = 1 << 20
UNTOUCHED = 0xEE
#: Bytes of a write that costs nothing but being posted and counted.
SMALL = 64
#: Seconds to wait for an answer or for writes, and to repeat one measurement.
PATIENCE, MEASURING = 5.0, 0.3


def check(arguments: argparse.Namespace) -> int:
    """Check the path to the prefiller `arguments.check` and print what was found; the exit code."""
    if arguments.prompts or arguments.prompts_file:
        raise ValueError("--check answers nothing; leave out the prompts")
    nbytes = MOST_BYTES + GUARD_BYTES
    nics, cpus = open_nics(arguments.transport, RdmaFlags(**given(RdmaFlags, arguments)))
    os.sched_setaffinity(0, cpus)
    with SharedMemory(nbytes) as memory, make_engine(arguments.transport, nics) as engine:
        try:
            for what, found in _rows(_Probe(engine, memory, arguments.check)):
                print(f"{what:<14}{found}", flush=True)
        except ProtocolError as error:
            print("error: prefiller {}:{}: {}".format(*arguments.check, error), file=sys.stderr)
            return EXIT_FAILED
    return EXIT_DONE


def _rows(probe: _Probe) -> Iterator[tuple[str, str]]:
    """The table, row by row as it is found out. ProtocolError ends it."""
    start = time.perf_counter()
    model, transport = probe.greet()
    seconds = time.perf_counter() - start
    yield "prefiller", f"greeted in {1e3 * seconds:.1f} ms, writes by {transport}"
    page_bytes = 2 * model.num_kv_heads * model.page_size * model.head_dim
    page_bytes = min(max(1, page_bytes * ITEMSIZE.get(model.dtype, 1)), PROBE_BYTES)
    yield "model", f"{model.model_fingerprint}, {model.dtype}, {model.num_layers} layers"
    yield "pages", f"{model.page_size} tokens, {model.kv_layout}, {page_bytes} bytes"
    yield "refuses", probe.refusals()
    for what, once in (("answer", probe.refused), ("write", lambda: probe.write(SMALL, 1))):
        median, p99 = 1e3 * np.percentile(_repeat(once), (50, 99))
        yield f"first {what}", f"{median:.2f} ms after asking (median), {p99:.2f} ms (p99)"
    for nbytes in sorted({SMALL, 4 << 10, 16 << 10, 64 << 10, page_bytes}):
        rate = _write_rate(probe, nbytes)
        yield f"{nbytes} bytes", f"{nbytes * rate / 1e9:5.2f} GB/s {rate:11,.0f} writes/s"
    yield "counts", f"{probe.count(1000)} writes asked for, as many counted and none more"
    yield "contents", f"{probe.num_compared / 1e6:.0f} MB, all as they should be, none beside them"


def _repeat(once: Callable[[], float]) -> list[float]:
    found, end = [once()], time.monotonic() + MEASURING
    while time.monotonic() < end:
        found.append(once())
    return found


def _write_rate(probe: _Probe, nbytes: int) -> float:
    """Writes a second, of the last of rounds that grow until one takes long enough to measure."""
    num_pages, seconds = 1, probe.write(nbytes, 1)
    while seconds < MEASURING / 3 and 4 * num_pages <= min(MAX_PROBE_PAGES, MOST_BYTES // nbytes):
        num_pages *= 4
        seconds = probe.write(nbytes, num_pages)
    return num_pages / seconds


class _Probe:
    """One connection: asks, waits at most `PATIENCE` seconds, compares. ProtocolError, one line."""

    def __init__(self, engine: TransferEngine, memory: SharedMemory, where: Address) -> None:
        self._engine, self._where = engine, where
        self._landed, self._pattern = memory.bytes, probe_pattern()
        region = Memory(address=memory.address, nbytes=memory.nbytes, fd=memory.fd)
        self._descriptor = engine.register(region).descriptor
        self._peer, self._imm, self.num_compared = 0, 0, 0
        self._reached: set[int] = set()
        self._heard: deque[Message] = deque()

    def greet(self) -> tuple[messages.Identity, str]:
        """Connect; which model the prefiller says it holds, and what writes will travel by."""
        self._peer = self._engine.connect(*self._where)
        hello = messages.Hello(
            epoch=secrets.randbits(64),
            role=Role.PROBE,
            identity=None,
            num_pages=0,
            num_tail_slots=0,
            tp=1,
            kv_regions=(),
            tail_region=self._descriptor,
        )
        self._engine.send(self._peer, messages.encode(hello))
        match self._wait():
            case messages.Hello(role=Role.PREFILLER, identity=messages.Identity() as model):
                return model, self._engine.transport_to(self._peer)
            case answer:
                raise ProtocolError(f"expected a prefiller, got {answer!s:.80}; check the port")

    def refusals(self) -> str:
        """What it refused, as it must. Nothing of it may have landed."""
        self._landed[:] = UNTOUCHED
        self.refused(4096, len(self._landed) // 4096 + 1)
        self.refused(PROBE_BYTES + 1)
        self.refused(1, MAX_PROBE_PAGES + 1)
        _demand(self._landed == UNTOUCHED, "all writes were refused")
        return "writes beyond our memory, beyond its own, too many at once"

    def refused(self, page_bytes: int = 0, num_pages: int = 1) -> float:
        """Seconds from asking for what must be refused until it is."""
        start = time.perf_counter()
        self._ask(page_bytes, num_pages, 1)
        answer = self._wait()
        if not isinstance(answer, messages.PrefillStopped):
            asked = f"{num_pages} writes of {page_bytes} bytes"
            raise ProtocolError(f"{asked} should be refused, got {answer!s:.80}; update that node")
        return time.perf_counter() - start

    def write(self, page_bytes: int, num_pages: int) -> float:
        """Seconds from asking until all is counted. Then every byte must be as it was sent."""
        period = len(self._pattern) // page_bytes * page_bytes
        wanted = np.resize(self._pattern[:period], page_bytes * num_pages)
        landed, guard = np.split(self._landed[: len(wanted) + GUARD_BYTES], [len(wanted)])
        np.invert(wanted, out=landed)  # no byte is right before it is written
        guard[:] = UNTOUCHED
        start = time.perf_counter()
        self._wait(self._ask(page_bytes, num_pages, num_pages))
        seconds = time.perf_counter() - start
        for right in (landed == wanted, guard == UNTOUCHED):
            _demand(right, f"all {num_pages} writes of {page_bytes} bytes were counted")
        self.num_compared += len(wanted)
        return seconds

    def count(self, num_writes: int) -> int:
        """Wait for one write too many: it must not come, and without it all are there."""
        watched = self._ask(SMALL, num_writes, num_writes + 1)
        self._wait(self._ask(SMALL, num_writes, num_writes))
        if watched in self._reached:
            raise ProtocolError(f"of {num_writes} writes, more were counted; do not use this path")
        self._engine.lower(watched, num_writes)
        self._wait(watched)
        return num_writes

    def _ask(self, page_bytes: int, num_pages: int, count: int) -> int:
        """Ask for writes and expect `count`; the imm they carry."""
        self._imm += 1
        self._engine.expect(self._peer, self._imm, count)
        asked = messages.ProbeRequest(
            attempt_id=0, page_bytes=page_bytes, num_pages=num_pages, imm=self._imm
        )
        self._engine.send(self._peer, messages.encode(asked))
        return self._imm

    def _wait(self, imm: int | None = None) -> Message | None:
        """Until `imm` is reached; without one, the next message."""
        end = time.monotonic() + PATIENCE
        while imm not in self._reached and not self._heard:
            left = end - time.monotonic()
            if left <= 0:
                missing = "no answer" if imm is None else "not all writes came"
                raise ProtocolError(f"{missing} in {PATIENCE:g} s; is that node stopped?")
            for event in self._engine.poll(left):
                match event:
                    case ImmReached():
                        self._reached.add(event.imm)
                    case PeerLost():
                        raise ProtocolError(event.why)
                    case MessageReceived():
                        message = messages.decode(event.data)
                        self._heard += [] if isinstance(message, messages.Heartbeat) else [message]
        if imm is not None and self._heard:
            raise ProtocolError(f"expected writes, got {self._heard[0]}; see what it printed")
        return None if imm is not None else self._heard.popleft()


def _demand(right: npt.NDArray[np.bool_], after: str) -> None:
    if not right.all():
        wrong = f"{right.size - np.count_nonzero(right)} bytes are wrong although {after}"
        raise ProtocolError(f"{wrong}; do not use this path, try another --transport")
