"""Attention over a paged KV cache, in plain torch.

A step is described once by `plan()`; then every layer appends its new K and V to that layer's pages
and attends over them.

    positions   [range(29, 32), range(4, 5)]   request 0 brings 3 tokens, request 1 brings 1
    page_lists  [[7, 2], [4]]                  of 16 tokens: request 0 fills its last page

A request's new tokens are its last ones; each sees itself and all before it. "K and V" is with MLA
the one latent of a token, and `mla.py` has the mathematics of that.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.kv_layout import KVLayout, PageOrder, pages_for
from disagg.model.layers import compute_dtype

Ints = npt.NDArray[np.int64]

#: Dense attention of requests with as many new tokens. `q` `[B, qo_len, num_qo_heads, any]` attends
#: over `kv` `[K or V, B, num_kv_heads, kv_len, head_dim]`; `mask` `[B, 1, qo_len * group_size,
#: kv_len]` is added to the scores. Returns `[B, qo_len, num_qo_heads, any]`.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Requests that are computed in one call: equal `qo_len`, similar numbers of pages.

    `shape` is `(B, qo_len)`; `tokens` int64 `[B * qo_len]` are their rows in the step; `rows` int64
    are the rows of the layer's pages that make up their padded K and V; `mask` is added to the
    scores.
    """

    shape: tuple[int, int]
    tokens: Tensor
    rows: Tensor
    mask: Tensor  # [B, 1, qo_len * group_size, padded kv_len]: 0 or -inf


def attend_heads(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """`Attend` for heads that have K and V (grouped-query attention)."""
    batch, qo_len, num_qo_heads, head_dim = q.shape
    k, v = kv
    num_kv_heads = k.shape[1]
    group_size = num_qo_heads // num_kv_heads
    # The query heads of a KV head become further queries of that head: no copies of K and V.
    if qo_len == 1:
        folded = q.reshape(batch, num_kv_heads, group_size, head_dim)
    else:
        split = q.reshape(batch, qo_len, num_kv_heads, group_size, head_dim)
        folded = split.transpose(1, 2).flatten(2, 3)
    output = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
    if qo_len > 1:
        output = output.view(batch, num_kv_heads, qo_len, group_size, head_dim).transpose(1, 2)
    return output.reshape(q.shape)


class TorchPagedAttention:
    """Attention over pages of either order, on the CPU. One object serves all layers of a step.

    It gathers each request's pages into a padded tensor and leaves the rest to dense attention.
    Requests with as many new tokens (all decodes, above all) are computed together.
    """

    def __init__(self, layout: KVLayout, *, group_size: int, dtype: torch.dtype) -> None:
        """`layout` says how pages look; `dtype` is that of pages. q, k and v are in the dtype that
        such a model is computed in (`layers.compute_dtype`). `group_size` is how many query heads
        share a KV head: 1 with MLA, where each makes its own of the latent."""
        self._layout = layout
        self._dtype = dtype
        self._compute_dtype = compute_dtype(dtype)
        self._group_size = group_size
        # In HND a head's K of a page is one run of bytes.
        self._tokens_per_row = layout.page_size if layout.order == PageOrder.HND else 1

    def plan(self, positions: Sequence[range], page_lists: Sequence[Sequence[int]]) -> None:
        """Describe a step: of each request the positions it computes, and its pages, of which there
        may be more. ValueError, before anything is computed, if those are not such pages."""
        page_size = self._layout.page_size
        counts = [pages_for(new.stop, page_size) for new in positions]
        page_lists = [pages[:count] for pages, count in zip(page_lists, counts, strict=True)]
        step = list(zip(positions, page_lists, strict=True))
        for (new, pages), count in zip(step, counts, strict=True):
            if not new or len(pages) < count:
                raise ValueError(
                    f"{len(pages)} pages of {page_size} for positions {new} of a request; expected"
                    f" {count}, and at least one position"
                )
        page = np.array([pages[place // page_size] for new, pages in step for place in new])
        offset = np.array([place % page_size for new in positions for place in new])
        heads = np.arange(self._layout.num_kv_heads)
        kv = np.arange(self._layout.num_vectors)[:, None]
        new_rows = self._token_rows(page[:, None, None], kv, heads, offset[:, None, None])
        self._new_rows = torch.from_numpy(new_rows.ravel())
        started, filled = page[offset == 0], page[offset == page_size - 1]
        self._partial_pages = torch.from_numpy(np.setdiff1d(started, filled))

        # Padding to a common length wastes at most half if page counts agree in their top bit.
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (new, pages) in enumerate(step):
            members[len(new), len(pages).bit_length()].append(index)
        tokens = [range(*ends) for ends in pairwise([0, *accumulate(map(len, positions))])]
        self._groups = [
            self._plan_group(
                np.array([tokens[i] for i in chosen]),
                np.array([positions[i] for i in chosen]),
                [page_lists[i] for i in chosen],
            )
            for chosen in members.values()
        ]
        # Row i of the groups' joined outputs belongs to token order[i]; argsort turns that round.
        self._order = torch.cat([group.tokens for group in self._groups]).argsort()

    def append(self, kv: Tensor, pages: Tensor) -> None:
        """Write the step's new K and V into a layer's pages.

        `kv` is `[T, 2 * num_kv_heads, head_dim]`, the heads of K, then those of V, or latents `[T,
        1, head_dim]`; `pages` is the layer's `[num_pages, *page_shape]`, ValueError if not.
        """
        shape = (self._layout.num_pages, *self._layout.page_shape)
        if pages.shape != shape or pages.dtype != self._dtype or not pages.is_contiguous():
            raise ValueError(
                f"pages {list(pages.shape)} in {pages.dtype}, strides {pages.stride()}; expected"
                f" contiguous {list(shape)} in {self._dtype}"
            )
        if self._partial_pages.shape[0]:
            # A padded gather multiplies what lies behind the last token by zero, and zero times
            # a NaN that an earlier owner of the page left there is NaN.
            pages.index_fill_(0, self._partial_pages, 0)
        new = kv.to(self._dtype).reshape(-1, self._layout.head_dim)
        pages.view(-1, self._layout.head_dim).index_copy_(0, self._new_rows, new)

    def run(self, q: Tensor, pages: Tensor, attend: Attend = attend_heads) -> Tensor:
        """Attend with `q` `[T, num_qo_heads, head_dim]`; returns `[T, num_qo_heads, head_dim]`, or
        what `attend` makes of such a `q`."""
        if len(self._groups) == 1:
            return self._run_group(self._groups[0], q, pages, attend)
        outputs = [self._run_group(group, q[group.tokens], pages, attend) for group in self._groups]
        return torch.cat(outputs)[self._order]

    def _run_group(self, group: _Group, q: Tensor, pages: Tensor, attend: Attend) -> Tensor:
        """Attention of one group: q `[B * qo_len, num_qo_heads, head_dim]`, output likewise."""
        layout = self._layout
        runs = pages.view(-1, self._tokens_per_row * layout.head_dim)
        kv = runs.index_select(0, group.rows).to(q.dtype)
        kv = kv.view(layout.num_vectors, group.shape[0], layout.num_kv_heads, -1, layout.head_dim)
        return attend(q.view(*group.shape, *q.shape[1:]), kv, group.mask).flatten(0, 1)

    def _plan_group(self, tokens: Ints, positions: Ints, page_lists: list[Sequence[int]]) -> _Group:
        """`tokens` and `positions` are `[B, qo_len]`: of each query in the step and its request."""
        # Pad with a page of the same request: it holds nothing but the request's own numbers.
        padded = max(len(pages) for pages in page_lists)
        table = np.array([[*p, *[p[-1]] * (padded - len(p))] for p in page_lists])
        if table.min() < 0 or table.max() >= self._layout.num_pages:
            raise ValueError(f"pages {table.min()} to {table.max()} of {self._layout.num_pages}")
        keys = np.arange(padded * self._layout.page_size)
        visible = keys <= positions[:, :, None]  # [B, qo_len, padded kv_len]
        visible = visible.repeat(self._group_size, axis=1)[:, None]
        mask = torch.zeros(visible.shape, dtype=self._compute_dtype)
        mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return _Group(
            shape=positions.shape,
            tokens=torch.from_numpy(tokens.ravel()),
            rows=torch.from_numpy(self._gather_rows(table).ravel()),
            mask=mask,
        )

    def _token_rows(self, page: Ints, kv: Ints, head: Ints, offset: Ints) -> Ints:
        """Where a head's K (kv 0) or V (kv 1) of a token is, in rows of `head_dim` elements."""
        layout = self._layout
        if layout.order == PageOrder.HND:
            vector = (page * layout.num_kv_heads + head) * layout.num_vectors + kv
            return vector * layout.page_size + offset
        token = (page * layout.num_vectors + kv) * layout.page_size + offset
        return token * layout.num_kv_heads + head

    def _gather_rows(self, table: Ints) -> Ints:
        """Runs of `_tokens_per_row` tokens that make up K, then V, of `[B, num_pages]` page lists:
        `[num_vectors, B, num_kv_heads, num_pages, runs in a page]`."""
        vectors, heads = self._layout.num_vectors, self._layout.num_kv_heads
        kv, _, head, _, offset = np.ogrid[
            :vectors, :1, :heads, :1, : self._layout.page_size : self._tokens_per_row
        ]
        rows = self._token_rows(table[:, None, :, None], kv, head, offset)
        return rows // self._tokens_per_row
