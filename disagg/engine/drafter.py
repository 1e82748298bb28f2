"""Speculation: guesses of the next tokens, made by the model's draft layer or by another model.

    known    t_0 ... t_{n-1}              h: hidden states of what the step has computed
    rows     (h_i, t_{i+1}) for each computed i up to n-2  --draft layer--> KV of row i, h'_i
    guesses  h'_{n-2} -> d_1;  (h'_{n-2}, d_1) -> d_2;  (..., d_2) -> d_3 ...
    next     a step computes t_{n-1} d_1 d_2 d_3 at once; the runner keeps those that are right

So the draft layer has seen all rows of a request but the last when its next step begins, in pages
like any layer's. After a fetch, the KV of rows up to N-2 has come, and h_{N-2} in the tail: that
row is computed again for its guess. Rows of wrong guesses are overwritten by those of the tokens.

A draft model is given the same tokens in the same calls. It needs no h, and the KV of t_{i+1} lies
in its row i+1: beside the rows above it has row 0, and a prefiller leaves t_{N-1} to the decoder.

Each step adds one to the layer counter for each layer here: in the first pass of `follow`, whose
rows count. Further passes, and those of `after_fetch`, write nothing that leaves this node.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from disagg.engine.sampling import Sampled, greedy
from disagg.hooks import Span
from disagg.model.attention import TorchPagedAttention
from disagg.model.layers import compute_dtype
from disagg.model.mtp import MTPLayer
from disagg.model.transformer import Transformer


class Result(msgspec.Struct, kw_only=True):
    """What came of a span: `tokens` chosen after it, which begin with the guesses of its
    `num_drafts` that were right, and `drafts`, the guesses of what follows these."""

    tokens: list[Sampled] = msgspec.field(default_factory=list)
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0


class Draft(msgspec.Struct):
    """Rows of one request from `first` on, each with the token after it, then `count` guesses."""

    page_indices: tuple[int, ...]
    first: int
    after: tuple[int, ...]
    count: int
    guesses: tuple[int, ...] = ()


class Drafter:
    """Computes in `layers` of the KV cache; `attention` is for them, perhaps the runner's."""

    def __init__(
        self,
        source: MTPLayer | Transformer,
        attention: TorchPagedAttention,
        layers: Sequence[Tensor],
        tail_hidden: Tensor,
    ) -> None:
        self._source, self._attention = source, attention
        self._layers, self._tail_hidden = layers, tail_hidden
        #: A draft layer has a token's KV in the row before it, a draft model at its own place.
        self._shift = -int(isinstance(source, MTPLayer))

    def after_fetch(self, spans: Sequence[Span]) -> list[Span]:
        """The spans, those that begin after a fetch with guesses."""
        drafts = {
            i: self._draft(span, span.first_token, span.token_ids)
            for i, span in enumerate(spans)
            if span.drafts_from is not None
        }
        if drafts:
            # Tails come to rank 0 alone; those of the others hold zeros.
            here = self._tail_hidden[[spans[i].drafts_from for i in drafts]]
            hidden = self._source.group.sum(here.to(compute_dtype(here.dtype)))
            self.guess(list(drafts.values()), hidden, _nothing)
        return [
            replace(span, drafts=drafts[i].guesses) if i in drafts else span
            for i, span in enumerate(spans)
        ]

    def follow(
        self,
        spans: Sequence[Span],
        hidden: Sequence[Tensor],
        results: Sequence[Result],
        on_layer: Callable[[], None],
    ) -> None:
        """Let the draft layer see what a step computed (`hidden`, of each span) and what was then
        chosen (`results`), and put its guesses there. `on_layer()` is called when a layer's KV of
        the rows is there."""
        drafts: dict[int, Draft] = {}
        for i, (span, result) in enumerate(zip(spans, results, strict=True)):
            tokens = [token.token_id for token in result.tokens]
            if span.next_token is not None and (self._shift or span.tail_slot is None):
                tokens.append(span.next_token)
            place, after = span.first_token + 1, (*span.token_ids[1:], *tokens)
            if not self._shift and span.first_token == 0:
                place, after = 0, (span.token_ids[0], *after)
            draft = self._draft(span, place, after, len(result.tokens))
            # Rows of a prompt are never left out; those of an answer only if nothing follows.
            if after and (draft.count or not result.tokens):
                drafts[i] = draft
        rows = [hidden[i][: len(draft.after)] for i, draft in drafts.items()]
        self.guess(list(drafts.values()), torch.cat(rows) if rows else hidden[0], on_layer)
        for i, draft in drafts.items():
            results[i].drafts = draft.guesses

    def _draft(self, span: Span, place: int, tokens: tuple[int, ...], num_chosen: int = 0) -> Draft:
        """Of the `tokens` from position `place` on: a draft layer's rows are one before them."""
        return Draft(span.page_indices, place + self._shift, tokens, span.num_wanted(num_chosen))

    def guess(self, drafts: list[Draft], hidden: Tensor, on_layer: Callable[[], None]) -> None:
        """Compute the rows, whose states are `hidden` `[all rows, hidden_size]`, and the guesses
        after them. `on_layer` as in `follow`."""
        if not drafts:
            for _ in self._layers:
                on_layer()
        while drafts:
            rows = [range(draft.first, draft.first + len(draft.after)) for draft in drafts]
            self._attention.plan(rows, [draft.page_indices for draft in drafts])
            tokens = torch.tensor([token for draft in drafts for token in draft.after])
            positions = torch.tensor([row for of_draft in rows for row in of_draft])
            step = tokens, positions, self._layers, self._attention, on_layer
            if isinstance(self._source, MTPLayer):
                hidden = self._source.draft(hidden, *step)
            else:
                hidden = self._source.forward(*step)
            on_layer = _nothing
            ends = list(accumulate(map(len, rows)))
            wanting = [i for i, draft in enumerate(drafts) if len(draft.guesses) < draft.count]
            hidden, drafts = hidden[[ends[i] - 1 for i in wanting]], [drafts[i] for i in wanting]
            if drafts:
                places = greedy(self._source.logits(hidden))
                for draft, place in zip(drafts, places, strict=True):
                    token = self._source.tokens[place]
                    draft.first += len(draft.after)
                    draft.after, draft.guesses = (token,), (*draft.guesses, token)
            if all(len(draft.guesses) == draft.count for draft in drafts):
                return


def _nothing() -> None:
    """For rows that do not count."""
