"""What tensor parallelism costs: decode steps of one rank with all threads beside several ranks.

    python -m tests.bench.bench_tp --tp 2 --batch 8 --repeats 7

The model is a random Llama of SmolLM2-135M's size, with 8 query and 4 KV heads. Both engines answer
the same random prompts, in turn. Then the ranks do nothing but sums, as large as those of a step:
through the memory that they have in common, and over gloo.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from disagg.config import CacheConfig
from disagg.engine import ranks
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.ranks import Ranks
from disagg.model.rank_group import RankGroup
from disagg.model.shape import read_config
from tests.bench.bench_generate import Ours, prompts_of
from tests.tiny_models import make_tiny_llama

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


class Sums(Ranks):
    """Ranks that only sum; `run((shape, times, over_gloo))` returns seconds for each sum."""

    program = (
        "import sys; from tests.bench.bench_tp import serve_sums; serve_sums(int(sys.argv[1]))"
    )


class _Sums:
    """In the place of a runner."""

    increments_per_step = 0

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def run(self, wish: tuple[tuple[int, ...], int, bool]) -> float:
        shape, times, over_gloo = wish
        part = torch.ones(shape)
        one = dist.all_reduce if over_gloo else self._group.sum
        one(part)
        start = time.perf_counter()
        for _ in range(times):
            one(part)
        return (time.perf_counter() - start) / times


def serve_sums(fd: int) -> None:
    """In a rank's process."""
    with mock.patch.object(ranks, "make_runner", lambda *a: _Sums(a[2])):
        ranks.serve(fd)


def decode_ratio(folder: Path, flags: argparse.Namespace) -> None:
    """Print tokens/s of both, and the ratio."""
    num_tokens = flags.batch * (flags.prompt_tokens + flags.max_tokens)
    prompts = prompts_of(flags.batch, flags.prompt_tokens, SHAPE["vocab_size"])
    one, several = (Ours(folder, flags.dtype, 512, num_tokens, tp) for tp in (1, flags.tp))
    with closing(several.runner):
        runs = [
            [engine.generate(prompts, flags.max_tokens) for engine in (one, several)]
            for _ in range(flags.repeats + 1)
        ][1:]
    print(f"| | 1 rank, {flags.threads} threads | {flags.tp} ranks | ratio |\n|---|---|---|---|")
    prefilled, decoded = len(prompts) * flags.prompt_tokens, len(prompts) * (flags.max_tokens - 1)
    for name, part, tokens in (("decode", 1, decoded), ("prefill", 0, prefilled)):
        pairs = [(tokens / a[part], tokens / b[part]) for a, b in runs]
        ratios = [b / a for a, b in pairs]
        rates = (f"{statistics.median(side):.1f} tokens/s" for side in zip(*pairs, strict=True))
        print(
            f"| {name} | {' | '.join(rates)} |"
            f" {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |"
        )


def sums(folder: Path, flags: argparse.Namespace) -> None:
    """Print what a sum takes, and all of a step."""
    config, cache = read_config(folder), CacheConfig(num_pages=1)
    caches = [KVCache(cache, [config], flags.tp) for _ in range(flags.tp)]
    print("| tokens a step | shared memory | gloo | all sums of a step |\n|---|---|---|---|")
    with Sums(caches, LayerCounter()) as ranks_that_sum:
        for tokens in (flags.batch, 512):
            times = 10_000 // (tokens + 10)
            shared, gloo = (
                statistics.median(
                    ranks_that_sum.run(((tokens, config.hidden_size), times, over_gloo))
                    for _ in range(flags.repeats)
                )
                for over_gloo in (False, True)
            )
            count = 2 * config.num_layers + 1
            print(
                f"| {tokens} | {1e6 * shared:.0f} us | {1e6 * gloo:.0f} us |"
                f" {count}: {1e3 * count * shared:.1f} or {1e3 * count * gloo:.1f} ms |"
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_llama(Path(name), dtype=torch.bfloat16, **SHAPE)
        decode_ratio(folder, flags)
        sums(folder, flags)


if __name__ == "__main__":
    main()
