"""Why prefill and decode are split: how long a step takes over its qo_len and its kv_len.

    python -m tests.bench.phases --picture tests/pictures/phases.svg
    python -m tests.bench.phases --prompt-tokens 1024 --output-tokens 128 --batch 16

A step of the real runner computes `qo_len` new tokens of a sequence that then has `kv_len`: a chunk
of a prompt has many, a decode step one for each sequence. The table and the picture show that time
follows qo_len far more than kv_len. So a chunk of somebody's prompt in a decode step makes every
decoding request wait for it.

How many decoders one prefiller can feed follows from two measured times. A prompt takes the
prefiller `prefill_seconds`, so it gives `1 / prefill_seconds` prompts a second. A decoder with b
sequences in each step of `step_seconds` ends b requests in `output_tokens * step_seconds`, and
needs as many new ones:

    needed by a decoder = b / (output_tokens * step_seconds)                      prompts a second
    decoders = (1 / prefill_seconds) / needed by a decoder
             = output_tokens * step_seconds / (b * prefill_seconds)

Below 1, several prefillers feed one decoder. Transfer is not in it: it is hidden behind compute.
Everything is measured once in each of several rounds, and medians are taken over the rounds, since
machines change their speed within minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from disagg.config import ITEMSIZE, CacheConfig
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import make_runner
from disagg.hooks import Span
from disagg.kv_layout import pages_for
from disagg.model.shape import read_config
from disagg.request import SamplingParams
from disagg.serve.default_model import resolve_model

PAGE_SIZE = 16


def decoders_per_prefiller(
    *, prefill_seconds: float, step_seconds: float, output_tokens: int, batch: int
) -> float:
    """See the module; `step_seconds` is a decode step of `batch` sequences."""
    prompts_given = 1 / prefill_seconds
    prompts_needed = batch / (output_tokens * step_seconds)
    return prompts_given / prompts_needed


@dataclass(frozen=True)
class Step:
    """Each of `batch` sequences computes the last `qo_len` of its `kv_len` tokens."""

    qo_len: int
    kv_len: int
    batch: int = 1


Times = dict[Step, float]


def prefill_steps(prompt_tokens: int, chunk: int) -> list[Step]:
    """The chunks of a prompt of N tokens as a prefiller computes them: positions 0..N-2."""
    last = prompt_tokens - 1
    starts = range(0, last, chunk)
    return [Step(min(chunk, last - first), min(first + chunk, last)) for first in starts]


def grid_of(qo_lens: Sequence[int], kv_lens: Sequence[int]) -> list[Step]:
    """Every pair in which the context can hold the new tokens."""
    return [Step(q, k) for k in kv_lens for q in qo_lens if q <= k]


class Steps:
    """Runs single steps of a model over scattered pages; what they hold changes no time."""

    def __init__(self, folder: Path, dtype: str, steps: Iterable[Step]) -> None:
        self._vocab_size = read_config(folder).vocab_size
        self._steps = list(dict.fromkeys(steps))
        most = max(step.batch * pages_for(step.kv_len, PAGE_SIZE) for step in self._steps)
        with ExitStack() as stack:
            kv_cache = stack.enter_context(
                KVCache(CacheConfig(num_pages=most, dtype=dtype), [read_config(folder)])
            )
            counter = stack.enter_context(LayerCounter())
            self._runner = make_runner(kv_cache, counter)
            self.close = stack.pop_all().close
        self._random = torch.Generator().manual_seed(0)

    def measure(self, num_rounds: int) -> Times:
        """Seconds of each step, the median of so many rounds after one to warm up."""
        taken: dict[Step, list[float]] = {step: [] for step in self._steps}
        for _ in range(num_rounds + 1):
            for step, seconds in taken.items():
                seconds.append(self._run(step))
        return {step: statistics.median(seconds[1:]) for step, seconds in taken.items()}

    def _run(self, step: Step) -> float:
        num_pages = pages_for(step.kv_len, PAGE_SIZE)
        pages = torch.randperm(self._runner.kv_cache.layouts[0].num_pages, generator=self._random)
        spans = [
            Span(
                number=i,
                first_token=step.kv_len - step.qo_len,
                token_ids=tuple(i % self._vocab_size for i in range(step.qo_len)),
                page_indices=tuple(pages[i * num_pages : (i + 1) * num_pages].tolist()),
                sampling=SamplingParams() if step.qo_len == 1 else None,
                tail_slot=None,
            )
            for i in range(step.batch)
        ]
        start = time.perf_counter()
        self._runner.run(spans)
        return time.perf_counter() - start


def table(times: Times, grid: Sequence[Step]) -> list[str]:
    """Rows: kv_len; columns: qo_len; milliseconds."""
    qo_lens = sorted({step.qo_len for step in grid})
    lines = ["kv_len " + "".join(f"{f'qo_len {qo_len}':>13}" for qo_len in qo_lens)]
    for kv_len in sorted({step.kv_len for step in grid}):
        cells = [times.get(Step(qo_len, kv_len)) for qo_len in qo_lens]
        shown = ("" if cell is None else f"{1e3 * cell:.1f} ms" for cell in cells)
        lines.append(f"{kv_len:>6} " + "".join(f"{cell:>13}" for cell in shown))
    return lines


def draw(times: Times, grid: Sequence[Step], path: Path, title: str) -> None:
    """Both dependencies side by side on the same scales, as a picture file."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, along, fixed in ((left, "qo_len", "kv_len"), (right, "kv_len", "qo_len")):
        for value in sorted({getattr(step, fixed) for step in grid}):
            line = [step for step in grid if getattr(step, fixed) == value]
            x = [getattr(step, along) for step in line]
            y = [1e3 * times[step] for step in line]
            axes.plot(x, y, marker="o", markersize=3, label=f"{fixed} {value}")
        axes.set(xlabel=f"{along} (tokens)", yscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    left.set_ylabel("one step (ms)")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub name; default as for run_decode.py")
    parser.add_argument("--dtype", choices=[*ITEMSIZE], default="bfloat16")
    parser.add_argument("--qo-lens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--kv-lens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5, help="the median of so many is shown")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences a decode step")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens a prefill step")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=".svg or .png")
    options = parser.parse_args(arguments)
    folder = resolve_model(options.model)
    dtype = options.dtype
    grid = grid_of(options.qo_lens, options.kv_lens)
    chunks = prefill_steps(options.prompt_tokens, options.chunk)
    # A decoder's sequences are, on average, half way through their output.
    decode = Step(1, options.prompt_tokens + options.output_tokens // 2, options.batch)
    with closing(Steps(folder, dtype, [*grid, *chunks, decode])) as steps:
        times = steps.measure(options.rounds)
    title = f"{folder.name}, {dtype}, {torch.get_num_threads()} threads"
    print(f"{title}: one step, median of {options.rounds} rounds")
    print("\n".join(table(times, grid)))
    if options.picture is not None:
        draw(times, grid, options.picture, title)
    prefill_seconds = sum(times[chunk] for chunk in chunks)
    decoders = decoders_per_prefiller(
        prefill_seconds=prefill_seconds,
        step_seconds=times[decode],
        output_tokens=options.output_tokens,
        batch=options.batch,
    )
    print(f"prefill of {options.prompt_tokens} tokens: {prefill_seconds:.3f} s")
    print(f"decode step, batch {options.batch}: {1e3 * times[decode]:.1f} ms")
    print(f"outputs of {options.output_tokens} tokens: one prefiller feeds {decoders:.2f} decoders")


if __name__ == "__main__":
    main()
