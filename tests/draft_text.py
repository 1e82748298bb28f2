"""Text that a model writes itself, with its hidden states: what a draft layer is trained on.

    written prompts --------.
    user turns it draws ----'--> engine, in batches --> tokens, hidden states --> file

See `train_draft_layer.py`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.config import CacheConfig, SchedulerConfig
from disagg.engine.engine import Engine
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import make_runner
from disagg.engine.scheduler import Scheduler
from disagg.hooks import Span
from disagg.kv_layout import pages_for
from disagg.model.shape import read_config
from disagg.request import Request, SamplingParams
from disagg.serve.tokenizer import Tokenizer
from tests.draft_prompts import other_prompts, subject_prompts

#: Requests that are answered at once, and the most tokens of one with its prompt.
BATCH, LONGEST = 64, 512
USER_TURN_TOKENS = 80


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt of `num_prompt` tokens and its answer, `tokens` `[N]` in all, and the target's
    hidden states after the final norm, float16 `[N - 1, hidden_size]`: the last token's is none."""

    tokens: Tensor
    hidden: Tensor
    num_prompt: int


class Writer:
    """The model in `folder` in an engine, whose hidden states are kept."""

    def __init__(self, folder: Path, dtype: str) -> None:
        config = read_config(folder)
        pages = BATCH * pages_for(LONGEST, 16)
        cache = CacheConfig(num_pages=pages, page_size=16, dtype=dtype)
        runner = make_runner(KVCache(cache, [config]), LayerCounter())
        limits = SchedulerConfig(max_batch_size=BATCH)
        self._engine = Engine(runner, Scheduler(limits, cache, config))
        self._step: Tensor = torch.empty(0)
        self._hidden: dict[int, Tensor] = {}
        self._hidden_size = config.hidden_size
        self._forward, runner.model.forward = runner.model.forward, self._keep_step
        self._run, runner.run = runner.run, self._keep_spans

    def answer(self, prompts: Sequence[Sequence[int]], how: Sequence[SamplingParams]) -> list[Text]:
        """Answer all prompts, each as it is said how."""
        tokens: dict[int, list[int]] = {}
        for prompt, sampling in zip(prompts, how, strict=True):
            known = list(prompt)
            request = Request(prompt_token_ids=tuple(prompt), sampling=sampling)
            number = self._engine.submit(
                request, lambda output, known=known: known.extend(output.token_ids)
            )
            tokens[number] = known
            longest = len(prompt) + sampling.max_tokens
            self._hidden[number] = torch.empty(longest, self._hidden_size, dtype=torch.float16)
        while self._engine.step():
            pass
        return [
            Text(
                tokens=torch.tensor(tokens[number], dtype=torch.int32),
                hidden=self._hidden.pop(number)[: len(tokens[number]) - 1].clone(),
                num_prompt=len(prompt),
            )
            for number, prompt in zip(tokens, prompts, strict=True)
        ]

    def _keep_step(self, *arguments: object) -> Tensor:
        self._step = self._forward(*arguments)
        return self._step

    def _keep_spans(self, spans: Sequence[Span]) -> object:
        sampled = self._run(spans)
        rows = self._step.split([len(span.token_ids) for span in spans])
        for span, hidden in zip(spans, rows, strict=True):
            self._hidden[span.number][span.first_token :][: len(hidden)] = hidden
        return sampled


def user_turns(writer: Writer, tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Chat prompts that the model makes up itself: it goes on where a user's message begins."""
    inner = tokenizer._inner
    mark = "0"
    begin, end = (
        inner.encode(part, add_special_tokens=False)
        for part in inner.decode(tokenizer.encode(mark, chat=True)).rsplit(mark, 1)
    )
    how = [
        SamplingParams(max_tokens=USER_TURN_TOKENS, temperature=1.0, top_p=0.95, seed=seed + i)
        for i in range(count)
    ]
    drawn = [text.tokens.tolist() for text in writer.answer([begin] * count, how)]
    # One that did not come to its end, or says nothing, is no prompt.
    return [t[:-1] + end for t in drawn if t[-1] == end[0] and len(t) > len(begin) + 4]


def write_part(
    writer: Writer, tokenizer: Tokenizer, part: int, num_prompts: int, max_tokens: int
) -> list[Text]:
    """A third of the prompts are the model's own, the others written ones, of which each part takes
    the next; a fifth of the answers are drawn with some temperature, the others are greedy."""
    third = num_prompts // 3
    prompts = []
    for written in subject_prompts(seed=0), other_prompts(seed=0):
        some = islice(cycle(written), part * third, (part + 1) * third)
        prompts += [tokenizer.encode(prompt, chat=True) for prompt in some]
    prompts += user_turns(writer, tokenizer, num_prompts - len(prompts), seed=part * 10000)
    random.Random(part).shuffle(prompts)
    how = [
        SamplingParams(max_tokens=max_tokens, temperature=0.0 if i % 5 else 0.7, seed=i)
        for i in range(len(prompts))
    ]
    return writer.answer(prompts, how)


def save_texts(texts: Sequence[Text], path: Path) -> None:
    """As one file, which is complete as soon as it is there."""
    lengths = torch.tensor([[len(text.tokens), text.num_prompt] for text in texts])
    tokens = torch.cat([text.tokens for text in texts])
    hidden = torch.cat([text.hidden for text in texts])
    partial = path.with_suffix(".partial")
    save_file({"lengths": lengths, "tokens": tokens, "hidden": hidden}, partial)
    partial.rename(path)


def load_texts(paths: Sequence[Path]) -> list[Text]:
    """What `save_texts` wrote."""
    texts = []
    for path in paths:
        stored = load_file(path)
        lengths, num_prompts = stored["lengths"].T.tolist()
        tokens = stored["tokens"].split(lengths)
        hidden = stored["hidden"].split([length - 1 for length in lengths])
        texts += [
            Text(tokens=t, hidden=h, num_prompt=n)
            for t, h, n in zip(tokens, hidden, num_prompts, strict=True)
        ]
    return texts
