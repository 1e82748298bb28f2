"""The processes of a node with several ranks: each computes every step with its share of the model.

    node process                            rank 0                      rank 1
    Ranks.run(spans) --pipe: spans--------> Runner.run <--- sums ----> Runner.run <--- spans
          ^----------pipe: sampled tokens---'  |                           |
    memory of the node process:             counter, KV, tails          KV (tails: not sent)
    made here, mapped by descriptor there

To the engine all ranks together are one `Runner`. Rank 0 alone adds to the node's layer counter:
after the sum that ends a layer's attention, and each rank adds its part to that sum when its KV of
the layer is stored. A rank that fails sends the reason and ends; one that ends takes the node
down. Where the node's process dies, the pipes close, and the ranks end, whatever they are doing.
"""

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import cast

import torch

from disagg.engine.drafter import Result
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import make_runner
from disagg.hooks import Span
from disagg.model.rank_group import RankGroup, block_bytes
from disagg.resource import Resource
from disagg.shared_memory import SharedMemory
from disagg.trace import Span as TraceSpan
from disagg.trace import Trace

logger = logging.getLogger(__name__)


class Ranks(Resource):
    """A process for each of `caches`, which computes in that memory; once made, all have loaded.

    `counter` and `increments_per_step` are as those of a `Runner`. Rank 0's forward passes are in
    the `trace`. ValueError if the model cannot be loaded, RuntimeError if a rank fails or ends
    otherwise.
    """

    #: What a rank's process runs; its argument is the descriptor of its pipe. An interrupt ends
    #: it without a word.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
        "from disagg.engine.ranks import serve; serve(int(sys.argv[1]))"
    )

    def __init__(
        self,
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
                work = cache, counter, self._trace.on
                self._pipes[rank].send((place, work))
            self.increments_per_step = cast("int", self._hear(self._pipes))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(meeting)

    def run(self, spans: Sequence[Span]) -> list[Result]:
        """As `Runner.run`. RuntimeError if a rank has failed or ended."""
        data = ForkingPickler.dumps(spans)
        with suppress(BrokenPipeError):  # its end is heard of below
            for pipe in self._pipes:
                pipe.send_bytes(data)
        heard = self._hear(self._pipes[:1])
        sampled, traced = cast("tuple[list[Result], list[TraceSpan]]", heard)
        self._trace.add(traced)
        return sampled

    def watch(self) -> None:
        """Wait until a rank ends. RuntimeError if it was killed and not by `close`: so that is
        noticed between two steps, too."""
        ends = [os.pidfd_open(process.pid) for process in self._processes]
        wait(ends)
        for fd in ends:
            os.close(fd)
        if self._pipes:
            self._raise_if_killed()  # one that fails says why where `run` hears it

    def close(self) -> None:
        """Kill all processes, whatever they are doing. May be called twice."""
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
            # An interrupt from the terminal is the node's to handle. Not a session of its own: one
            # that is stopped gets a SIGHUP from the kernel when its node is killed.
            process_group=0,
        )
        self._processes.append(process)
        theirs.close()

    def _hear(self, speakers: Collection[Connection]) -> object:
        """Wait for a message of each of the `speakers`, and return rank 0's; a rank that is none of
        them sends only why it fails. Raises that, and RuntimeError if a rank has ended."""
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
                    self._raise_if_killed()  # the others fail with it
                    raise error
        return words[self._pipes[0]]

    def _raise_if_killed(self) -> None:
        for process in self._processes:
            if (process.poll() or 0) < 0:
                raise RuntimeError(self._end_of(process))

    def _end_of(self, process: subprocess.Popen[bytes]) -> str:
        code, rank = process.wait(), self._processes.index(process)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {rank} of {len(self._processes)} {how}"


# --- In a rank's process ---


def serve(fd: int) -> None:
    """Load, then compute the spans that come through the pipe `fd`, until the node closes it."""
    threading.Thread(target=_end_with_node, args=(fd,), daemon=True).start()
    with Connection(fd) as pipe, suppress(EOFError, BrokenPipeError):
        try:
            _serve(pipe)
        except Exception as error:  # whatever it is, the node ends with it
            logger.info("this rank failed", exc_info=True)
            # Not all errors can be pickled.
            known = isinstance(error, ValueError | OSError)
            pipe.send(ValueError(str(error)) if known else RuntimeError(f"a rank: {error!r}"))


def _end_with_node(fd: int) -> None:
    """Without a node, others may not come to a meeting or a sum."""
    pipe = select.poll()
    pipe.register(fd, 0)  # hears of its end alone
    pipe.poll()
    os._exit(0)


def _serve(pipe: Connection) -> None:
    (rank, tp, block, meeting), (cache, counter, traced) = pipe.recv()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // tp))
    group = RankGroup(rank, tp, block)
    group.meet(meeting)
    trace = Trace(on=traced and rank == 0)
    # Nobody reads what the other ranks count.
    runner = make_runner(cache, counter if rank == 0 else LayerCounter(), group, trace)
    pipe.send(runner.increments_per_step)
    while True:
        sampled = runner.run(pipe.recv())
        if rank == 0:
            pipe.send((sampled, trace.take()))
