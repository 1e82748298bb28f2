"""The processes of a node with several ranks: each computes every step with its share of the model.

    node process                            rank 0                      rank 1
    Ranks.run(spans) --pipe: spans--------> Runner.run <--- sums ----> Runner.run <--- spans
          ^----------pipe: sampled tokens---'  |                           |
    memory of the node process:             counter, KV, tails          KV
    made here, mapped by descriptor there

To the engine all ranks together are one `Runner`. Rank 0 alone adds to the node's layer counter:
after a layer's first sum, in which each rank takes part once its KV of that layer is stored. A rank
that fails says why and ends; one that ends takes the node down. Without a node, ranks end by
themselves.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import cast

import torch

from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import make_runner
from disagg.engine.sampling import Sampled
from disagg.engine.scheduler import Span
from disagg.model.rank_group import RankGroup, block_bytes
from disagg.resource import Resource
from disagg.shared_memory import SharedMemory
from disagg.trace import Span as TraceSpan
from disagg.trace import Trace

logger = logging.getLogger(__name__)


class Ranks(Resource):
    """Starts a process for each of `caches` and gives it that memory; `run` once all have loaded.

    `folder` is the model's. What a rank raises while it loads is raised here. Rank 0's forward
    passes are in the `trace`.
    """

    #: What a rank's process runs; it gets the number of its pipe's descriptor.
    program = "import sys; from disagg.engine.ranks import serve; serve(int(sys.argv[1]))"

    def __init__(
        self,
        folder: Path,
        caches: Sequence[KVCache],
        counter: LayerCounter,
        trace: Trace | None = None,
    ) -> None:
        self.counter = counter
        self._trace = trace or Trace()
        self._block = SharedMemory(block_bytes(len(caches)), name="disagg-sums")
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        meeting = os.memfd_create("disagg-ranks")
        try:
            for cache in caches:
                self._start(cache, meeting)
            for rank, cache in enumerate(caches):
                place = rank, len(caches), self._block, meeting
                work = folder.resolve(), cache, counter, self._trace.on
                self._pipes[rank].send((place, work))
            self.increments_per_step = cast("int", self._hear(self._pipes))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(meeting)

    def run(self, spans: Sequence[Span]) -> dict[int, Sampled]:
        """As `Runner.run`. RuntimeError if a rank has ended."""
        data = ForkingPickler.dumps(spans)
        with suppress(BrokenPipeError):  # its end is heard of below
            for pipe in self._pipes:
                pipe.send_bytes(data)
        heard = self._hear(self._pipes[:1])
        sampled, traced = cast("tuple[dict[int, Sampled], list[TraceSpan]]", heard)
        self._trace.add(traced)
        return sampled

    def watch(self) -> None:
        """Until `close`; RuntimeError if a rank is killed before, also while there is no step."""
        ends = [os.pidfd_open(process.pid) for process in self._processes]
        wait(ends)
        for fd in ends:
            os.close(fd)
        for process in self._processes:
            # One that fails says why where `run` hears it.
            if self._pipes and (process.poll() or 0) < 0:
                raise RuntimeError(self._end_of(process))

    def close(self) -> None:
        """End all processes, whatever they do. May be called twice."""
        while self._pipes:
            self._pipes.pop().close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._block.close()

    def _start(self, cache: KVCache, meeting: int) -> None:
        ours, theirs = Pipe()
        self._pipes.append(ours)
        shared = (cache.memory, cache.tail_memory, self.counter, self._block)
        process = subprocess.Popen(
            [sys.executable, "-c", self.program, str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), meeting, *(memory.fd for memory in shared)],
            start_new_session=True,  # an interrupt from the terminal is the node's to handle
        )
        self._processes.append(process)
        theirs.close()

    def _hear(self, speakers: Collection[Connection]) -> object:
        """Wait for a word of each of them, and return rank 0's. Others speak when they fail."""
        words: dict[Connection, object] = {}
        while len(words) < len(speakers):
            for pipe in wait(self._pipes):
                assert isinstance(pipe, Connection), f"what else is waited for? {pipe}"
                try:
                    words[pipe] = pipe.recv()
                except (EOFError, ConnectionError):
                    process = self._processes[self._pipes.index(pipe)]
                    raise RuntimeError(self._end_of(process)) from None
                if isinstance(error := words[pipe], Exception):
                    raise error
        return words[self._pipes[0]]

    def _end_of(self, process: subprocess.Popen[bytes]) -> str:
        code, rank = process.wait(), self._processes.index(process)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {rank} of {len(self._processes)} {how}"


# --- In a rank's process ---


def serve(fd: int) -> None:
    """Load, then compute what comes through the pipe `fd`, until it ends."""
    with Connection(fd) as pipe, suppress(EOFError, BrokenPipeError):
        try:
            _serve(pipe)
        except Exception as error:  # whatever it is, the node ends with it
            logger.info("this rank failed", exc_info=True)
            pipe.send(error)


def _serve(pipe: Connection) -> None:
    (rank, tp, block, meeting), (folder, cache, counter, traced) = pipe.recv()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // tp))
    group = RankGroup(rank, tp, block)
    group.meet(meeting)
    trace = Trace(on=traced and rank == 0)
    # Who follows counts for nobody.
    runner = make_runner(folder, cache, counter if rank == 0 else LayerCounter(), group, trace)
    pipe.send(runner.increments_per_step)
    while True:
        sampled = runner.run(pipe.recv())
        if rank == 0:
            pipe.send((sampled, trace.take()))
