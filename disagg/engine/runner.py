"""Runs one step: spans of tokens in, sampled tokens out, the layer counter on the way.

What to run was decided in `scheduler.py`; the mathematics is in `model/`.

    spans --build_batch()--> attention.plan(...)
    layer 0 | +1 | layer 1 | +1 | ... | final norm | tail copies | +1 | logits of some rows

The last increment releases the tails, so it comes after the copies. It is made in every step, also
in one without a tail: a step always adds `num_layers + 1`, which the messenger's arithmetic needs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.sampling import Sampled, sample
from disagg.engine.scheduler import Span
from disagg.kv_layout import pages_for
from disagg.model.attention import PagedAttention
from disagg.model.gqa import LlamaModel
from disagg.trace import Trace


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
        model: LlamaModel,
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
            batch.token_ids, batch.positions, self.kv_cache.layers, self.attention, self._count
        )  # [tokens, hidden_size]
        last_rows = (batch.qo_indptr[1:] - 1).tolist()
        for span, row in zip(spans, last_rows, strict=True):
            if span.tail_slot is not None:
                self.kv_cache.tail_hidden[span.tail_slot].copy_(hidden[row])
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
        who = {i: span.sampling for i, span in enumerate(spans) if span.sampling is not None}
        if not who:
            return [[] for _ in spans]
        rows = hidden[[last_rows[i] for i in who]]  # [len(who), hidden_size]
        indices = [spans[i].output_index for i in who]
        found = iter(sample(self.model.logits(rows), list(who.values()), indices))
        return [[next(found)] if i in who else [] for i in range(len(spans))]


def build_batch(spans: Sequence[Span], page_size: int) -> Batch:
    """The tensors of a step. No span may be empty."""
    kv_lens = [span.first_token + len(span.token_ids) for span in spans]
    for span, kv_len in zip(spans, kv_lens, strict=True):
        assert span.token_ids, f"empty span at position {span.first_token}"
        assert len(span.page_indices) == pages_for(kv_len, page_size), (
            f"{kv_len} tokens in {len(span.page_indices)} pages of {page_size}"
        )
    rows = [range(span.first_token, end) for span, end in zip(spans, kv_lens, strict=True)]
    int32 = partial(torch.tensor, dtype=torch.int32)
    return Batch(
        token_ids=torch.tensor([token for span in spans for token in span.token_ids]),
        positions=torch.tensor([position for span_rows in rows for position in span_rows]),
        qo_indptr=int32([0, *accumulate(map(len, rows))]),
        kv_indptr=int32([0, *accumulate(len(span.page_indices) for span in spans)]),
        kv_indices=int32([page for span in spans for page in span.page_indices]),
        kv_last_page_len=int32([(kv_len - 1) % page_size + 1 for kv_len in kv_lens]),
    )
