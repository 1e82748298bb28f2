"""What the messenger's thread costs the forward pass that it watches.

    python -m tests.bench.bench_messenger_cost --tokens 512 --pairs 5 --threads 2 1

A prefiller node with the default model in float32 computes one chunk again and again: by itself,
with its layers announced but no page copied ("looks"), and with its layers sent through shared
memory to another process ("sends"), which only counts. The three take turns, so that a machine that
changes its speed within minutes slows them alike. Printed are the medians, the ratios to the
forward pass alone, and what the messenger's thread took of the CPU in one step, in all and inside
the copy. On a machine of as many cores as torch has threads that CPU time is taken from the forward
pass; what a ratio shows beyond it is waiting for Python's lock.
"""

import argparse
import multiprocessing
import statistics
import time
from queue import SimpleQueue

import torch

from disagg.config import CacheConfig, MessengerConfig, SchedulerConfig
from disagg.engine.kv_cache import KVCache
from disagg.hooks import FetchKV, KVEnded, ReleasePrefill, StartPrefill
from disagg.messenger.decoder import DecoderMessenger
from disagg.messenger.messages import Hello, Role
from disagg.messenger.sharding import page_of
from disagg.model.shape import read_config
from disagg.serve.default_model import resolve_model
from disagg.serve.node import Node, NodeConfig, _identity
from disagg.transfer.auto import make_engine
from disagg.transfer.interface import Memory
from disagg.transfer.shm import copy_pages
from disagg.transfer.transfer_engine import TransferEngine
from tests.engines import shm_medium

MODES = ("alone", "looks", "sends")


def config_of(num_tokens, **where):
    """As a node is started by default, but in float32."""
    return NodeConfig(
        model=resolve_model(None),
        cache=CacheConfig(num_pages=1024, dtype="float32"),
        scheduler=SchedulerConfig(max_batch_tokens=num_tokens),
        **where,
    )


def count_only(pipe, num_tokens, address):
    """The other process: a decoder without a model. Fetches one prompt for each word it is told."""
    config = config_of(num_tokens, prefillers=(address,))
    model = read_config(config.model)
    page = page_of("HND", config.cache.page_size, model.num_kv_heads, 4 * model.head_dim)
    events, said = SimpleQueue(), SimpleQueue()
    with KVCache(config.cache, [model]) as cache:
        with make_engine("shm") as transfer:
            kv_region, tail_region = (
                transfer.register(Memory(address=m.address, nbytes=m.nbytes, fd=m.fd))
                for m in (cache.memory, cache.tail_memory)
            )
            messenger = DecoderMessenger(
                transfer=transfer,
                hello=Hello(
                    epoch=1,
                    role=Role.DECODER,
                    identity=_identity(config, [model]),
                    num_pages=cache.layouts[0].num_pages,
                    num_tail_slots=len(cache.tails),
                    kv_regions=(kv_region.descriptor,),
                    tail_region=tail_region.descriptor,
                ),
                kinds=[(cache.layouts[0], page)],
                tails=cache.tails,
                config=MessengerConfig(),
                clock=time.monotonic,
                post=events.put,
                addresses=[address],
                on_link=lambda _, ready, why: said.put(why),
            )
            pages = tuple(range(-(-num_tokens // config.cache.page_size)))
            for attempt in range(1, 1 << 30):
                while said.empty() or not pipe.poll():
                    messenger.poll(0.01)
                if (tokens := pipe.recv()) is None:
                    return
                messenger.on_fetch(
                    FetchKV(attempt=attempt, token_ids=tokens, page_indices=pages, tail_slot=0)
                )
                while events.empty():
                    messenger.poll(1.0)
                assert isinstance(event := events.get(), KVEnded), event
                pipe.send("ready")


class Meters:
    """Seconds of each forward pass, and of CPU in the copy; the copy can be left out."""

    def __init__(self):
        self.forwards = SimpleQueue()
        self.copy_cpu = 0.0
        self.copies = True
        self.num_threads = 1

    def copy(self, source, target, page_bytes, offsets):
        if self.copies or page_bytes < 8192:  # the tail goes always: it says whose it is
            start = time.thread_time()
            copy_pages(source, target, page_bytes, offsets)
            self.copy_cpu += time.thread_time() - start

    def timed(self, run):
        def run_timed(spans):
            torch.set_num_threads(self.num_threads)
            start = time.perf_counter()
            sampled = run(spans)
            self.forwards.put(time.perf_counter() - start)
            return sampled

        return run_timed


class BenchNode(Node):
    """A prefiller whose steps and copies are metered."""

    def __init__(self, config):
        self.meters = Meters()
        super().__init__(config)

    def _build_transfer(self):
        return TransferEngine([shm_medium(self.meters.copy)])

    def _build_engine(self):
        engine = super()._build_engine()
        engine._runner.run = self.meters.timed(engine._runner.run)
        return engine


class Silence:
    """Hooks of an engine that nobody listens to."""

    def on_step_scheduled(self, base, chunks):
        """Nothing."""


def measure(node, pipe, tokens, mode, job):
    """One forward pass: its seconds, CPU of the messenger's thread, and of that in the copy."""
    engine, meters = node._engine, node.meters
    (thread,) = [thread for thread in node._threads if thread.name == "messenger"]
    clock = time.pthread_getcpuclockid(thread.ident)
    meters.copies, meters.copy_cpu = mode == "sends", 0.0
    before = time.clock_gettime(clock)
    if mode == "alone":
        hooks, engine._prefill_hooks = engine._prefill_hooks, Silence()
        engine.post(StartPrefill(job=job, token_ids=tokens))
        seconds = meters.forwards.get()
        engine._prefill_hooks = hooks
        engine.post(ReleasePrefill(job=job))
    else:
        pipe.send(tokens)
        assert pipe.recv() == "ready"
        seconds = meters.forwards.get()
    return seconds, time.clock_gettime(clock) - before, meters.copy_cpu


def main():
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    arguments = parser.parse_args()
    tokens = tuple(range(100, 101 + arguments.tokens))
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with BenchNode(config_of(arguments.tokens, listen=("127.0.0.1", 0))) as node:
        child = context.Process(
            target=count_only, args=(theirs, arguments.tokens, node.address), daemon=True
        )
        child.start()
        print(f"{arguments.tokens} tokens a step, float32, medians of {arguments.pairs}")
        print("threads  mode   forward ms  ratio  messenger CPU ms  of it copy")
        job = 1 << 40  # beyond those of the messenger
        for node.meters.num_threads in arguments.threads:
            found = {mode: [] for mode in MODES}
            for turn in range(arguments.pairs + 1):
                for mode in MODES:
                    job += 1
                    found[mode] += [measure(node, pipe, tokens, mode, job)] if turn else []
                    if not turn:
                        measure(node, pipe, tokens, mode, job + (1 << 20))
            for mode in MODES:
                ratios = [
                    mine[0] / alone[0]
                    for mine, alone in zip(found[mode], found["alone"], strict=True)
                ]
                seconds, cpu, copy = (
                    statistics.median(column) for column in zip(*found[mode], strict=True)
                )
                print(
                    f"{node.meters.num_threads:7}  {mode:5}  {1e3 * seconds:10.1f}"
                    f"  {statistics.median(ratios):5.3f}  {1e3 * cpu:16.1f}  {1e3 * copy:10.1f}"
                )
        pipe.send(None)
        child.join(10)


if __name__ == "__main__":
    main()
