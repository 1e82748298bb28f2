"""A toy model for tests of everything around the model: no weights, no rounding, and quick.

Every number it stores or passes on is an integer below 251, so float32 and bfloat16 hold it and no
chunking, batching or page order can change a token. Every next token depends on every element of
every KV page before it, in order: a page that is stale, swapped, shifted or half filled shows.

    state 0 = f(token, position)      per layer: cells = g(state), stored in the page;
    state l+1 = h(weighted sum of all cells at positions <= own)     token = last state, hashed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from disagg.config import CacheConfig, ModelConfig, SchedulerConfig
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import Runner
from disagg.engine.scheduler import Scheduler
from disagg.kv_layout import PageOrder

PRIME = 251


def fake_config(**overrides) -> ModelConfig:
    """The toy's shape: 2 layers, 2 heads of 4, 97 tokens, 64 positions, no end token."""
    shape = {
        "vocab_size": 97,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 2,
        "num_qo_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_positions": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_frequencies": (1.0, 0.01),
    }
    return ModelConfig(**(shape | overrides))


class FakeAttention:
    """Remembers the plan; `FakeModel` does the rest itself."""

    def plan(self, positions, page_lists) -> None:
        self.positions = positions
        self.page_lists = [torch.tensor(pages) for pages in page_lists]


class FakeModel:
    """`before_layer(layer)` is called before a layer's KV is stored; tests look or raise there."""

    def __init__(self, config: ModelConfig | None = None, order: PageOrder = PageOrder.HND) -> None:
        self.config = config or fake_config()
        self.order = order
        self.before_layer: Callable[[int], None] = lambda layer: None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_pages: Sequence[Tensor],
        attention: FakeAttention,
        on_layer: Callable[[], None],
    ) -> Tensor:
        assert token_ids.dtype == positions.dtype == torch.int64
        state = _embed(token_ids, positions)
        for layer, pages in enumerate(kv_pages):
            self.before_layer(layer)
            cells = _cells(state, layer, self.config)
            axes = (0, 3, 1, 2, 4) if self.order is PageOrder.HND else (0, 2, 3, 1, 4)
            by_token = pages.permute(axes)  # a view [num_pages, page_size, heads, 2, head_dim]
            page_size = by_token.shape[1]
            states = []
            ends = [0, *accumulate(map(len, attention.positions))]
            for i, mine in enumerate(attention.page_lists):
                rows = slice(ends[i], ends[i + 1])
                kv_len = attention.positions[i].stop
                where = positions[rows]
                assert where.tolist() == list(attention.positions[i]), "plan and positions disagree"
                by_token[mine[where // page_size], where % page_size] = cells[rows].to(pages.dtype)
                stored = by_token[mine].flatten(0, 1)[:kv_len].to(torch.int64)
                states.append(_attend(stored)[where])
            state = torch.cat(states)
            on_layer()
        return _hidden(state, self.config)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), self.config.vocab_size)
        tokens = (hidden[:, 0].to(torch.int64) * 7 + 3) % self.config.vocab_size
        logits[torch.arange(len(hidden)), tokens] = 1.0
        return logits


def fake_greedy(config: ModelConfig, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The oracle: the same arithmetic over the whole sequence at every token, without any page."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        hidden = fake_hidden(config, tokens)[-1:]
        tokens.append(int(FakeModel(config).logits(hidden).argmax()))
        if tokens[-1] in config.eos_token_ids:
            break
    return tokens[len(prompt) :]


def fake_hidden(config: ModelConfig, tokens: Sequence[int]) -> Tensor:
    """Hidden states of all positions, float32 `[len(tokens), hidden_size]`; touches no page."""
    state = _embed(torch.tensor(list(tokens)), torch.arange(len(tokens)))
    for layer in range(config.num_layers):
        state = _attend(_cells(state, layer, config))
    return _hidden(state, config)


def fake_runner(
    cache: CacheConfig, config: ModelConfig | None = None, *, model: FakeModel | None = None
) -> Runner:
    """A runner of the toy with a cache and a counter of its own."""
    model = model or FakeModel(config, cache.kv_layout)
    return Runner(model, FakeAttention(), KVCache(cache, [model.config]), LayerCounter())


def fake_scheduler(
    cache: CacheConfig, config: ModelConfig | None = None, **limits: int
) -> Scheduler:
    """A scheduler for the toy; `limits` are those of SchedulerConfig."""
    return Scheduler(SchedulerConfig(**limits), cache, config or fake_config())


def _embed(token_ids: Tensor, positions: Tensor) -> Tensor:
    return (token_ids * 31 + positions * 17 + 5) % PRIME


def _cells(state: Tensor, layer: int, config: ModelConfig) -> Tensor:
    """What a token stores: `[tokens, heads, 2, head_dim]`, every element different."""
    shape = (config.num_kv_heads, 2, config.head_dim)
    index = torch.arange(config.num_kv_heads * 2 * config.head_dim).view(shape)
    return (state[:, None, None, None] * (index + 2) + index * index + layer * 13 + 1) % PRIME


def _attend(cells: Tensor) -> Tensor:
    """`[kv_len, heads, 2, head_dim]` -> for each position, a hash of all cells up to it."""
    flat = cells.flatten(1)
    weights = torch.arange(1, flat.shape[1] + 1)
    per_token = (flat * weights).sum(1) * torch.arange(3, len(flat) + 3)
    return per_token.cumsum(0) % PRIME


def _hidden(state: Tensor, config: ModelConfig) -> Tensor:
    return ((state[:, None] + torch.arange(config.hidden_size)) % PRIME).to(torch.float32)
