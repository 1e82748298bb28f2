"""Runs one step: spans of tokens in, sampled tokens out, the layer counter on the way.

What to run was decided in `scheduler.py`; the mathematics is in `model/`.

    spans --build_batch()--> attention.plan(...)
    layer 0 | +1 | layer 1 | +1 | ... | final norm | tail copies | +1 | logits of some rows

The last increment releases the tails, so it comes after the copies. It is made in every step, also
in one without a tail: a step always adds `num_layers + 1`, which the messenger's arithmetic needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from disagg.config import ModelConfig
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.sampling import Sampled, sample
from disagg.engine.scheduler import Span
from disagg.kv_layout import pages_for
from disagg.model.attention import PagedAttention
from disagg.trace import Trace


class Model(Protocol):
    """What the runner needs of a model."""

    config: ModelConfig

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_pages: Sequence[Tensor],
        attention: PagedAttention,
        on_layer: Callable[[], None],
    ) -> Tensor:
        """Hidden states `[tokens, hidden_size]` after the final norm; one `on_layer` a layer."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden_size]` -> float32 `[rows, vocab_size]`."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step as tensors, spans one after another. `[s]` counts spans, `[t]` tokens.

    `token_ids`, `positions`: int64 `[t]`. Span i has rows `qo_indptr[i]:qo_indptr[i + 1]` and its
    KV, with that of the rows themselves, in pages `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`, the
    last of which holds `kv_last_page_len[i]` tokens (1..page_size). These are int32.
    """

    token_ids: Tensor
    positions: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor


class Runner:
    """One model, its KV cache and its counter; used by the engine thread alone."""

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        kv_cache: KVCache,
        counter: LayerCounter,
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_cache = kv_cache
        self.counter = counter
        self._trace = trace or Trace()

    @property
    def increments_per_step(self) -> int:
        """What every step adds to the counter."""
        return self.model.config.num_layers + 1

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> list[list[Sampled]]:
        """Compute all spans; return the tokens sampled after each of them, if any."""
        self._trace.lap("forward")
        batch = build_batch(spans, self.kv_cache.layout.page_size)
        self.attention.plan(
            batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len
        )
        hidden = self.model.forward(
            batch.token_ids,
            batch.positions,
            self.kv_cache.layers,
            self.attention,
            self._count,
        )  # [tokens, hidden_size]
        last_rows = (batch.qo_indptr[1:] - 1).tolist()
        for span, row in zip(spans, last_rows, strict=True):
            if span.tail_slot is not None:
                self.kv_cache.tail_hidden(span.tail_slot).copy_(hidden[row])
                self.kv_cache.tail_forward_end_ns[span.tail_slot] = time.monotonic_ns()
        self._count()
        sampled = self._sample(spans, hidden, last_rows)
        self._trace.lap("forward", "sampling")
        return sampled

    def _count(self) -> None:
        """A layer, or the step, has ended. Traced first: whoever sees the count comes later."""
        if self._trace.on:
            layer = self.counter.read() % self.increments_per_step
            last = layer == self.model.config.num_layers
            self._trace.lap("forward", "norm, tails" if last else f"layer {layer}")
        self.counter.add()

    def _sample(
        self, spans: Sequence[Span], hidden: Tensor, last_rows: list[int]
    ) -> list[list[Sampled]]:
        """Logits are computed for the rows that are sampled from, and for no others."""
        sampled: list[list[Sampled]] = [[] for _ in spans]
        who = {i: span.sampling for i, span in enumerate(spans) if span.sampling is not None}
        if who:
            rows = hidden[[last_rows[i] for i in who]]  # [len(who), hidden_size]
            indices = [spans[i].output_index for i in who]
            found = sample(self.model.logits(rows), list(who.values()), indices)
            for i, token in zip(who, found, strict=True):
                sampled[i].append(token)
        return sampled


def build_batch(spans: Sequence[Span], page_size: int) -> Batch:
    """The tensors of a step. No span may be empty."""
    token_ids: list[int] = []
    positions: list[int] = []
    qo_indptr, kv_indptr = [0], [0]
    kv_indices: list[int] = []
    kv_last_page_len: list[int] = []
    for span in spans:
        kv_len = span.first_token + len(span.token_ids)
        assert span.token_ids, f"empty span at position {span.first_token}"
        assert len(span.page_indices) == pages_for(kv_len, page_size), (
            f"{kv_len} tokens in {len(span.page_indices)} pages of {page_size}"
        )
        token_ids.extend(span.token_ids)
        positions.extend(range(span.first_token, kv_len))
        qo_indptr.append(len(token_ids))
        kv_indices.extend(span.page_indices)
        kv_indptr.append(len(kv_indices))
        kv_last_page_len.append((kv_len - 1) % page_size + 1)
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        qo_indptr=torch.tensor(qo_indptr, dtype=torch.int32),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        kv_indices=torch.tensor(kv_indices, dtype=torch.int32),
        kv_last_page_len=torch.tensor(kv_last_page_len, dtype=torch.int32),
    )
