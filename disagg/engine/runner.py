"""Runs one step: spans of tokens in, sampled tokens out, the layer counter on the way.

What to run was decided in `scheduler.py`; the mathematics is in `model/`.

    spans -> token ids, positions -> attention.plan(...)
    layer 0 | +1 | layer 1 | +1 | ... | final norm | logits of some rows -> tokens
    [draft's layers, each | +1 | -> guesses] | tail copies | +1

The last increment releases the tails, so it comes after the copies. It is made in every step, also
in one without a tail: a step always adds one more than there are layers, those that guess included,
which the messenger's arithmetic needs.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.engine.drafter import Drafter, Result
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.sampling import sample
from disagg.hooks import Span
from disagg.model.attention import TorchPagedAttention
from disagg.model.rank_group import RankGroup
from disagg.model.transformer import Transformer
from disagg.model.weights import load_model
from disagg.trace import Trace


def make_runner(
    kv_cache: KVCache,
    counter: LayerCounter,
    group: RankGroup | None = None,
    trace: Trace | None = None,
) -> "Runner":
    """The models that the cache has pages for, loaded in its dtype, to compute in that memory; with
    a `group`, this rank's share of them. ValueError as `load_model`."""
    dtype = getattr(torch, kv_cache.dtype)
    models, attentions = [], []
    for config, layout in zip(kv_cache.models, kv_cache.layouts, strict=True):
        model, mtp = load_model(config, kv_cache.dtype, group)
        models.append(model)
        attentions.append(TorchPagedAttention(layout, group_size=model.group_size, dtype=dtype))
    source = models[1] if models[1:] else mtp
    layers, tails = kv_cache.layers[models[0].config.num_layers :], kv_cache.tail_hidden
    drafter = None if source is None else Drafter(source, attentions[-1], layers, tails)
    return Runner(models[0], attentions[0], kv_cache, counter, drafter, trace)


class Runner:
    """One model, its KV cache and its counter; used by one thread alone, the engine's or, where the
    model is one rank's share, that of the rank's process."""

    def __init__(
        self,
        model: Transformer,
        attention: TorchPagedAttention,
        kv_cache: KVCache,
        counter: LayerCounter,
        drafter: Drafter | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_cache = kv_cache
        self.counter = counter
        self._trace = trace or Trace()
        self._drafter = drafter

    @property
    def increments_per_step(self) -> int:
        """What every step adds to the counter."""
        return len(self.kv_cache.layers) + 1

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> list[Result]:
        """Compute all spans; return what came of each."""
        self._trace.lap("forward")
        if self._drafter is not None:
            spans = self._drafter.after_fetch(spans)
        rows = [span.positions for span in spans]
        self.attention.plan(rows, [span.page_indices for span in spans])
        hidden = self.model.forward(
            torch.tensor([token for span in spans for token in (*span.token_ids, *span.drafts)]),
            torch.tensor([position for of_span in rows for position in of_span]),
            self.kv_cache.layers[: self.model.config.num_layers],
            self.attention,
            self._count,
        )  # [tokens, hidden_size]
        by_span = torch.split(hidden, list(map(len, rows)))
        results = self._choose(spans, by_span)
        if self._drafter is not None:
            self._drafter.follow(spans, by_span, results, self._count)
        for span, states in zip(spans, by_span, strict=True):
            if span.tail_slot is not None:
                self.kv_cache.tail_hidden[span.tail_slot].copy_(states[-1])
                self.kv_cache.tail_forward_end_ns[span.tail_slot] = time.monotonic_ns()
        self._count()
        return results

    def _count(self) -> None:
        """A layer, or the step, has ended. Traced first: whoever sees the count comes later."""
        if self._trace.on:
            layer = self.counter.read() % self.increments_per_step
            last = layer == len(self.kv_cache.layers)
            self._trace.lap("forward", "norm, tails" if last else f"layer {layer}")
        self.counter.add()

    def _choose(self, spans: Sequence[Span], hidden: Sequence[Tensor]) -> list[Result]:
        """The tokens after the spans that are sampled from: the one after the last known token and,
        as long as it is what was guessed, the next one.

        That keeps a guess as often as the model gives it (with guesses that are certain of
        themselves, the test of speculative sampling), and chooses what it would without guesses.
        """
        places = [
            (i, place, span.sampling, span.output_index + place)
            for i, span in enumerate(spans)
            if span.sampling is not None
            for place in range(1 + len(span.drafts))
        ]
        results = [Result(num_drafts=len(span.drafts)) for span in spans]
        if places:
            self._trace.lap("forward", "norm")
            rows = torch.stack(
                [hidden[i][len(spans[i].token_ids) - 1 + n] for i, n, _, _ in places]
            )
            _, _, params, indices = zip(*places, strict=True)
            found = sample(self.model.logits(rows), params, indices)
            for (i, place, _, _), token in zip(places, found, strict=True):
                kept = [each.token_id for each in results[i].tokens]
                if kept == list(spans[i].drafts[:place]):
                    results[i].tokens.append(token)
            self._trace.lap("forward", "sampling")
        return results
