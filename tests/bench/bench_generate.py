"""Decode and prefill speed beside transformers' eager `generate`, on the same weights and dtype.

    python -m tests.bench.bench_generate --dtype bfloat16 float32 --batches 1 4 16 --repeats 5

Both sides answer the same random prompts, in turn, greedily and without an end token. Decode is
what follows the first token: tokens of all requests / seconds between first and last step. The
prefill figure is prompt tokens / seconds to the first token of one long prompt, which runs in
chunks of `--chunk` tokens here and in one piece in transformers (which has no other way).
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from disagg.config import CacheConfig, SchedulerConfig
from disagg.engine.engine import Engine
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.ranks import Ranks
from disagg.engine.runner import make_runner
from disagg.engine.scheduler import Scheduler
from disagg.kv_layout import pages_for
from disagg.model.shape import read_config
from disagg.request import Request, SamplingParams
from disagg.serve.default_model import resolve_model

Prompts = list[tuple[int, ...]]


class Ours:
    """An undivided engine, stepped by hand."""

    def __init__(self, folder: Path, dtype: str, chunk: int, num_tokens: int, tp: int = 1) -> None:
        config = read_config(folder)
        cache = CacheConfig(num_pages=pages_for(num_tokens, 16) + 64, page_size=16, dtype=dtype)
        caches, counter = [KVCache(cache, [config], tp) for _ in range(tp)], LayerCounter()
        self.runner = Ranks(caches, counter) if tp > 1 else make_runner(caches[0], counter)
        self.engine = Engine(
            self.runner,
            Scheduler(SchedulerConfig(max_batch_tokens=chunk), cache, config),
        )
        self.times: list[float] = []

    def generate(self, prompts: Prompts, max_tokens: int) -> tuple[float, float]:
        """Seconds to the first token of all, and from there to the last."""
        self.times = []
        start = time.perf_counter()
        for prompt in prompts:
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            self.engine.submit(
                Request(prompt_token_ids=prompt, sampling=sampling),
                lambda output: self.times.append(time.perf_counter()),
            )
        while self.engine.step():
            pass
        # The first step that samples may come before others': count from the last first token.
        first = sorted(self.times)[len(prompts) - 1]
        return first - start, self.times[-1] - first


class Theirs(StoppingCriteria):
    """transformers' own loop; as a stopping criterion it is called after each token."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model.eval()
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def generate(self, prompts: Prompts, max_tokens: int) -> tuple[float, float]:
        """As `Ours.generate`."""
        self.times = []
        start = time.perf_counter()
        self.model.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            stopping_criteria=[self],
            pad_token_id=0,
        )
        return self.times[0] - start, self.times[-1] - self.times[0]


def prompts_of(batch: int, length: int, vocab_size: int) -> Prompts:
    """Random prompts of one length."""
    drawn = torch.randint(10, vocab_size, (batch, length), generator=torch.manual_seed(batch))
    return [tuple(row) for row in drawn.tolist()]


def compare(ours: Ours, theirs: Theirs, prompts: Prompts, max_tokens: int, repeats: int):
    """Prefill and decode seconds of both, medians; runs alternate, the first ones do not count."""
    return [
        ours.generate(prompts, max_tokens) + theirs.generate(prompts, max_tokens)
        for _ in range(repeats + 1)
    ][1:]


def row(name: str, mine: list[float], other: list[float]) -> str:
    """A line of the table; the ratio is the median of the pairs' ratios."""
    ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
    return (
        f"| {name} | {statistics.median(mine):.1f} | {statistics.median(other):.1f} | {ratio:.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    folder = resolve_model(flags.model)
    vocab_size = read_config(folder).vocab_size
    print(f"{flags.threads} threads, {torch.backends.cpu.get_cpu_capability()}")
    print("| | disagg tokens/s | transformers tokens/s | ratio |\n|---|---|---|---|")
    for dtype in flags.dtype:
        most = max(flags.batches, default=0) * (flags.prompt_tokens + flags.max_tokens)
        ours = Ours(folder, dtype, flags.chunk, max(most, flags.prefill_tokens + 1))
        theirs = Theirs(folder, dtype)
        for batch in flags.batches:
            prompts = prompts_of(batch, flags.prompt_tokens, vocab_size)
            runs = compare(ours, theirs, prompts, flags.max_tokens, flags.repeats)
            tokens = batch * (flags.max_tokens - 1)
            print(
                row(
                    f"{dtype}, decode, batch {batch}",
                    [tokens / run[1] for run in runs],
                    [tokens / run[3] for run in runs],
                ),
                flush=True,
            )
        if flags.prefill_tokens:
            prompts = prompts_of(1, flags.prefill_tokens, vocab_size)
            runs = compare(ours, theirs, prompts, 1, flags.repeats)
            tokens = flags.prefill_tokens
            print(
                row(
                    f"{dtype}, prefill of {tokens}",
                    [tokens / run[0] for run in runs],
                    [tokens / run[2] for run in runs],
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
