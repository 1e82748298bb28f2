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
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from disagg.config import ITEMSIZE, RdmaFlags
from disagg.kv_layout import heads_of_rank
from disagg.messenger import messages
from disagg.messenger.decoder import Address
from disagg.messenger.messages import MAX_PROBE_PAGES, PrefillStopped, ProtocolError, Role
from disagg.serve.exits import EXIT_DONE, EXIT_FAILED
from disagg.serve.options import given
from disagg.shared_memory import SharedMemory
from disagg.transfer.auto import make_engine, open_nics
from disagg.transfer.interface import ImmReached, Memory, MessageReceived, PeerLost
from disagg.transfer.transfer_engine import TransferEngine

MOST_BYTES = 32 << 20
#: Memory behind what a write may touch: it must stay as it is.
GUARD_BYTES = 1 << 20
UNTOUCHED = 0xEE
#: Bytes of a write that costs nothing but being posted and counted.
SMALL = 64
#: Seconds to wait for an answer or for writes, and that writes must take to be measured.
PATIENCE, MEASURING = 5.0, 0.1
#: Writes for the times of the first one.
REPEATS = 100


def check(arguments: argparse.Namespace) -> int:
    """Check the path to the prefiller `arguments.check` and print what was found; the exit code."""
    if arguments.prompts or arguments.prompts_file:
        raise ValueError("--check answers nothing; leave out the prompts")
    nbytes = MOST_BYTES + GUARD_BYTES
    nics, cpus = open_nics(arguments.transport, given(RdmaFlags, arguments))
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
    """The table, row by row as it is found out: what, and what was found. ProtocolError ends it."""
    hello, model = probe.hello, probe.hello.identity
    if model is None or hello.role != Role.PREFILLER:
        raise ProtocolError(f"expected a prefiller, got {hello!s:.80}; check the port")
    num_heads = len(heads_of_rank(model.num_kv_heads, hello.tp, 0))
    vectors = num_heads * model.num_kv_vectors * model.page_size
    page_bytes = vectors * model.head_dim * ITEMSIZE.get(model.dtype, 1)
    yield "prefiller", f"greeted, writes by {probe.transport}"
    yield "model", f"{model.model_fingerprint}, {model.dtype}, {model.num_layers} layers"
    yield "pages", f"{model.page_size} tokens, {model.kv_layout}, {page_bytes} bytes"
    probe.write(messages.PROBE_BYTES, MOST_BYTES // messages.PROBE_BYTES + 1, PrefillStopped)
    probe.write(messages.PROBE_BYTES + 1, 1, PrefillStopped)
    probe.write(1, MAX_PROBE_PAGES + 1, PrefillStopped)
    yield "refuses", "writes beyond our memory, beyond its own, too many at once"
    median, p99 = 1e3 * np.percentile([probe.write(SMALL, 1) for _ in range(REPEATS)], (50, 99))
    yield "first write", f"{median:.2f} ms after asking (median), {p99:.2f} ms (p99)"
    sizes = {SMALL, 4 << 10, 16 << 10, 64 << 10, min(max(1, page_bytes), messages.PROBE_BYTES)}
    for nbytes in sorted(sizes):
        rate = _write_rate(probe, nbytes)
        yield f"{nbytes} bytes", f"{nbytes * rate / 1e9:5.2f} GB/s {rate:11,.0f} writes/s"
    yield "counts", f"{probe.count(1000)} writes asked for, as many counted and none more"
    yield "contents", f"{probe.num_compared / 1e6:.0f} MB, all as they should be, none beside them"


def _write_rate(probe: _Probe, nbytes: int) -> float:
    """Writes a second, of the last of rounds that grow until one takes long enough to measure."""
    num_pages, seconds = 1, probe.write(nbytes, 1)
    while seconds < MEASURING and 4 * num_pages <= min(MAX_PROBE_PAGES, MOST_BYTES // nbytes):
        num_pages *= 4
        seconds = probe.write(nbytes, num_pages)
    return num_pages / seconds


Kind = TypeVar("Kind")


class _Probe:
    """One connection: asks, waits at most `PATIENCE` seconds, compares. ProtocolError, one line."""

    def __init__(self, engine: TransferEngine, memory: SharedMemory, where: Address) -> None:
        self._engine, self._landed, self._pattern = engine, memory.bytes, messages.probe_pattern()
        self._imm, self.num_compared = 0, 0
        self._heard: deque[object] = deque()
        region = Memory(address=memory.address, nbytes=memory.nbytes, fd=memory.fd)
        descriptor = engine.register(region).descriptor
        ours = messages.Hello(epoch=secrets.randbits(64), role=Role.PROBE, tail_region=descriptor)
        self._peer = engine.connect(*where)
        engine.send(self._peer, messages.encode(ours))
        self.hello = self._wait(messages.Hello, "a prefiller")
        self.transport = engine.transport_to(self._peer)

    def write(self, page_bytes: int, num_pages: int, end: type = ImmReached) -> float:
        """Seconds from asking for writes until `end`: all are counted, or they are refused. Then
        every byte must be as it was sent, and none beside them touched."""
        what = f"{num_pages} writes of {page_bytes} bytes"
        nbytes = page_bytes * num_pages
        if end is not ImmReached:
            what, nbytes = f"a refusal of {what}", 0
        wanted = np.resize(self._pattern[: len(self._pattern) // page_bytes * page_bytes], nbytes)
        landed, guard = np.split(self._landed[: nbytes + GUARD_BYTES], [nbytes])
        np.invert(wanted, out=landed)  # no byte is right before it is written
        guard[:] = UNTOUCHED
        start = time.perf_counter()
        self._ask(page_bytes, num_pages, num_pages)
        self._wait(end, what)
        seconds = time.perf_counter() - start
        num_wrong = np.count_nonzero(landed != wanted) + np.count_nonzero(guard != UNTOUCHED)
        if num_wrong:
            wrong = f"{num_wrong} bytes are wrong although {what} came"
            raise ProtocolError(f"{wrong}; do not use this path, try another --transport")
        self.num_compared += nbytes
        return seconds

    def count(self, num_writes: int) -> int:
        """Ask for so many writes and wait for one more, which must not come while as many again
        are asked for and arrive. Then wait for so many: all are there. Returns `num_writes`."""
        watched = self._ask(SMALL, num_writes, num_writes + 1)
        imm = self._ask(SMALL, num_writes, num_writes)
        if self._wait(ImmReached, f"{num_writes} writes").imm != imm or self._heard:
            raise ProtocolError(f"of {num_writes} writes, more were counted; do not use this path")
        self._engine.lower(watched, num_writes)
        self._wait(ImmReached, f"{num_writes} writes")
        return num_writes

    def _ask(self, page_bytes: int, num_pages: int, count: int) -> int:
        """Ask for writes and expect `count` of them; returns the imm they carry."""
        self._imm += 1
        self._engine.expect(self._peer, self._imm, count)
        wish = messages.ProbeRequest(page_bytes=page_bytes, num_pages=num_pages, imm=self._imm)
        self._engine.send(self._peer, messages.encode(wish))
        return self._imm

    def _wait(self, kind: type[Kind], what: str) -> Kind:
        """The next message or event, which must be of this kind; `what` names it in errors.
        Heartbeats are left out."""
        end = time.monotonic() + PATIENCE
        while not self._heard:
            left = end - time.monotonic()
            if left <= 0:
                raise ProtocolError(f"waited {PATIENCE:g} s for {what}; is that node stopped?")
            for event in self._engine.poll(left):
                heard = messages.decode(event.data) if isinstance(event, MessageReceived) else event
                self._heard += [] if isinstance(heard, messages.Heartbeat) else [heard]
        found = self._heard.popleft()
        if isinstance(found, PeerLost):
            raise ProtocolError(found.why)
        if not isinstance(found, kind):
            raise ProtocolError(f"expected {what}, got {found!s:.80}; is it of this release?")
        return found
