"""Answers of the default model with and without guesses of its draft layer, one prompt at a time.

    python -m tests.bench.bench_speculate --speculate 1 2 --prompts 8

The same chat prompts, on which the draft layer was not trained, are answered greedily by undivided
nodes in turns; the ratio of tokens a second is to the node that guesses nothing. `kept` is the
share of guesses that are right; the answers are compared, too.
"""

import argparse
import statistics
import time
from contextlib import ExitStack

import torch

from disagg.config import CacheConfig, SchedulerConfig
from disagg.request import Request, SamplingParams
from disagg.serve.default_model import resolve_model
from disagg.serve.node import Node, NodeConfig
from disagg.serve.tokenizer import Tokenizer
from tests.draft_prompts import HELD_OUT


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--speculate", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=len(HELD_OUT))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", help="default: the scripts' default")
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    folder = resolve_model(given.model)
    draft_model = given.draft_model and resolve_model(given.draft_model)
    tokenizer = Tokenizer(folder)
    sampling = SamplingParams(max_tokens=given.max_tokens, temperature=0.0)
    counts = [0, *given.speculate]
    rates = {count: [] for count in counts}
    made, kept = dict.fromkeys(counts, 0), dict.fromkeys(counts, 0)
    with ExitStack() as stack:
        nodes = {}
        for count in counts:
            config = NodeConfig(
                model=folder,
                draft_model=draft_model if count else None,
                cache=CacheConfig(num_pages=256, dtype=given.dtype),
                scheduler=SchedulerConfig(speculate=count),
            )
            nodes[count] = stack.enter_context(Node(config))
        for prompt in ["Hello", *HELD_OUT[: given.prompts]]:
            token_ids = tuple(tokenizer.encode(prompt, chat=True))
            request = Request(prompt_token_ids=token_ids, sampling=sampling)
            answers = set()
            for count, node in nodes.items():
                start = time.perf_counter()
                done = node.submit(request).result(600)
                rate = len(done.token_ids) / (time.perf_counter() - start)
                answers.add(done.token_ids)
                if prompt != "Hello":  # which warms up
                    rates[count].append(rate)
                    made[count] += done.num_drafts
                    kept[count] += done.num_accepted
            if len(answers) > 1:
                print(f"another answer with guesses: {prompt!r}")
    print(
        f"{folder.name}, {given.dtype}, {len(rates[0])} prompts, up to {given.max_tokens} tokens,"
        f" {given.threads} threads; median of the prompts' rates and ratios"
    )
    print(f"{'guesses':>8} {'tokens/s':>9} {'ratio':>6} {'kept':>6}")
    for count in counts:
        ratio = statistics.median(b / a for a, b in zip(rates[0], rates[count], strict=True))
        share = kept[count] / made[count] if made[count] else 0.0
        print(f"{count:>8} {statistics.median(rates[count]):>9.1f} {ratio:>6.2f} {share:>6.2f}")


if __name__ == "__main__":
    main()
