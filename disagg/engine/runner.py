"""Runs one step: spans of tokens in, sampled tokens out, the layer counter on the way.

What to run was decided in `scheduler.py`; the mathematics is in `model/`.

    spans -> token ids, positions -> attention.plan(...)
    layer 0 | +1 | layer 1 | +1 | ... | final norm | tail copies | +1 | logits of some rows

The last increment releases the tails, so it comes after the copies. It is made in every step, also
in one without a tail: a step always adds `num_layers + 1`, which the messenger's arithmetic needs.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.sampling import Sampled, sample
from disagg.hooks import Span
from disagg.model.attention import TorchPagedAttention
from disagg.model.rank_group import RankGroup
from disagg.model.transformer import Transformer
from disagg.model.weights import load_model
from disagg.trace import Trace


def make_runner(
    folder: Path,
    kv_cache: KVCache,
    counter: LayerCounter,
    group: RankGroup | None = None,
    trace: Trace | None = None,
) -> "Runner":
    """The model in `folder`, loaded in the dtype of the cache, to compute in that memory; with a
    `group`, this rank's share of the model. ValueError as `load_model`."""
    model = load_model(folder, kv_cache.model, kv_cache.dtype, group)
    layout, dtype = kv_cache.layout, getattr(torch, kv_cache.dtype)
    attention = TorchPagedAttention(layout, group_size=model.group_size, dtype=dtype)
    return Runner(model, attention, kv_cache, counter, trace)


class Runner:
    """One model, its KV cache and its counter; used by one thread alone, the engine's or, where the
    model is one rank's share, that of the rank's process."""

    def __init__(
        self,
        model: Transformer,
        attention: TorchPagedAttention,
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
    def run(self, spans: Sequence[Span]) -> dict[int, Sampled]:
        """Compute all spans; return the tokens sampled after some, by the span's index."""
        self._trace.lap("forward")
        rows = [range(s.first_token, s.first_token + len(s.token_ids)) for s in spans]
        self.attention.plan(rows, [span.page_indices for span in spans])
        token_ids = torch.tensor([token for span in spans for token in span.token_ids])
        positions = torch.tensor([position for span_rows in rows for position in span_rows])
        hidden = self.model.forward(
            token_ids, positions, self.kv_cache.layers, self.attention, self._count
        )  # [tokens, hidden_size]
        last_rows = [end - 1 for end in accumulate(map(len, rows))]
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
    ) -> dict[int, Sampled]:
        """Logits are computed for the rows that are sampled from, and for no others."""
        who = {i: span.sampling for i, span in enumerate(spans) if span.sampling is not None}
        if not who:
            return {}
        rows = hidden[[last_rows[i] for i in who]]  # [len(who), hidden_size]
        indices = [spans[i].output_index for i in who]
        found = sample(self.model.logits(rows), list(who.values()), indices)
        return dict(zip(who, found, strict=True))
