"""Attention over a paged KV cache: the interface, and the plain torch implementation of it.

A step is described once by `plan()`, in FlashInfer's words; then every layer appends its new K and
V to that layer's pages and attends over them.

    qo_indptr         [0, 3, 4]        request 0 brings 3 tokens, request 1 brings 1
    kv_indptr         [0, 2, 5]        request 0 has 2 pages, request 1 has 3
    kv_indices        [7, 2, 4, 0, 9]  page indices of all requests, one after another
    kv_last_page_len  [1, 16]          tokens in each request's last page, INCLUDING this step's

A request's `qo_len` tokens are the last ones of its `kv_len`; each sees itself and all before it.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.kv_layout import KVLayout, PageOrder
from disagg.model.layers import compute_dtype

Ints = npt.NDArray[np.int64]


class PagedAttention(Protocol):
    """What a model needs to attend over pages. One object serves all layers of a step."""

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
    ) -> None:
        """Describe a step: int32 CPU tensors, `[B+1]`, `[B+1]`, `[num_page_indices]`, `[B]`.

        ValueError, before anything is computed, if they cannot describe a step.
        """

    def append(self, kv: Tensor, pages: Tensor) -> None:
        """Write the step's new K and V into a layer's pages.

        `kv` is `[T, 2 * num_kv_heads, head_dim]`, the heads of K, then those of V; `pages` is the
        layer's `[num_pages, *page_shape]`. ValueError if they are not.
        """

    def run(self, q: Tensor, pages: Tensor) -> Tensor:
        """Attend with `q` `[T, num_qo_heads, head_dim]`; returns a tensor of the same shape."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Requests that are computed in one call: equal `qo_len`, similar numbers of pages.

    `split` is the shape of their queries, `[B, qo_len, num_kv_heads, group_size, head_dim]`;
    `tokens` int64 `[B * qo_len]` are their rows in the step; `rows` int64 are the rows of the
    layer's pages that make up their padded K and V; `mask` is added to the scores.
    """

    split: tuple[int, ...]
    tokens: Tensor
    rows: Tensor
    mask: Tensor  # [B, 1, qo_len * group_size, padded kv_len]: 0 or -inf


class TorchPagedAttention:
    """PagedAttention in plain torch on the CPU, in either page order.

    It gathers each request's pages into a padded tensor and leaves the rest to torch's own
    attention. Requests with the same `qo_len` (all decodes, above all) are computed together.
    """

    def __init__(self, layout: KVLayout, *, num_qo_heads: int, dtype: torch.dtype) -> None:
        """`layout` says how pages look; `dtype` is that of pages. q, k and v are in the dtype that
        such a model is computed in (`layers.compute_dtype`)."""
        if num_qo_heads % layout.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads; got {num_qo_heads} and"
                f" {layout.num_kv_heads}"
            )
        self._layout = layout
        self._dtype = dtype
        self._compute_dtype = compute_dtype(dtype)
        self._group_size = num_qo_heads // layout.num_kv_heads
        self._pages_shape = (layout.num_pages, *layout.page_shape)
        tokens_per_row = layout.page_size if layout.order == PageOrder.HND else 1
        self._row_elements = tokens_per_row * layout.head_dim
        self._new_rows = torch.empty(0, dtype=torch.int64)
        self._partial_pages = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Group] = []
        self._order = torch.empty(0, dtype=torch.int64)

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
    ) -> None:
        """See `PagedAttention.plan`."""
        page_size = self._layout.page_size
        qo_starts = _array("qo_indptr", qo_indptr)
        kv_starts = _array("kv_indptr", kv_indptr)
        indices = _array("kv_indices", kv_indices)
        last_page_len = _array("kv_last_page_len", kv_last_page_len)
        self._check_plan(qo_starts, kv_starts, indices, last_page_len)
        qo_lens, page_counts = np.diff(qo_starts), np.diff(kv_starts)
        kv_lens = (page_counts - 1) * page_size + last_page_len

        # Every new token: its request, its position there, hence its page and its place in it.
        request = np.repeat(np.arange(len(qo_lens)), qo_lens)
        position = np.arange(qo_starts[-1]) + np.repeat(kv_lens - qo_starts[1:], qo_lens)
        page = indices[kv_starts[request] + position // page_size]
        offset = position % page_size
        heads = np.arange(self._layout.num_kv_heads)
        rows = [self._token_rows(page[:, None], kv, heads, offset[:, None]) for kv in (0, 1)]
        self._new_rows = torch.from_numpy(np.concatenate(rows, axis=1).ravel())
        started, filled = page[offset == 0], page[offset == page_size - 1]
        self._partial_pages = torch.from_numpy(np.setdiff1d(started, filled))

        # Padding to a common length wastes at most half if page counts agree in their top bit.
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (qo_len, count) in enumerate(zip(qo_lens, page_counts, strict=True)):
            members[int(qo_len), int(count).bit_length()].append(index)
        self._groups = [
            self._plan_group(
                qo_len,
                qo_starts[chosen],
                [indices[kv_starts[i] : kv_starts[i + 1]] for i in chosen],
                kv_lens[chosen],
            )
            for (qo_len, _), chosen in members.items()
        ]
        # Row i of the groups' joined outputs belongs to token order[i]; argsort turns that round.
        self._order = torch.cat([group.tokens for group in self._groups]).argsort()

    def append(self, kv: Tensor, pages: Tensor) -> None:
        """See `PagedAttention.append`."""
        self._check_pages(pages)
        self._check_heads("kv", kv, 2 * self._layout.num_kv_heads)
        if self._partial_pages.shape[0]:
            # A padded gather multiplies what lies behind the last token by zero, and zero times
            # a NaN that an earlier owner of the page left there is NaN.
            pages.index_fill_(0, self._partial_pages, 0)
        new = kv.to(self._dtype).reshape(-1, self._layout.head_dim)
        pages.view(-1, self._layout.head_dim).index_copy_(0, self._new_rows, new)

    def run(self, q: Tensor, pages: Tensor) -> Tensor:
        """See `PagedAttention.run`."""
        self._check_pages(pages)
        self._check_heads("q", q, self._layout.num_kv_heads * self._group_size)
        if len(self._groups) == 1:
            return self._run_group(self._groups[0], q, pages)
        outputs = [self._run_group(group, q[group.tokens], pages) for group in self._groups]
        return torch.cat(outputs)[self._order]

    def _run_group(self, group: _Group, q: Tensor, pages: Tensor) -> Tensor:
        """Attention of one group: q `[B * qo_len, num_qo_heads, head_dim]`, output likewise."""
        kv = pages.view(-1, self._row_elements).index_select(0, group.rows).to(q.dtype)
        batch, qo_len, num_kv_heads, group_size, head_dim = group.split
        k, v = kv.view(2, batch, num_kv_heads, -1, head_dim)
        # The query heads of a KV head become further queries of that head: no copies of K and V.
        if qo_len == 1:
            folded = q.reshape(batch, num_kv_heads, group_size, head_dim)
        else:
            folded = q.reshape(group.split).transpose(1, 2).flatten(2, 3)
        output = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask)
        if qo_len > 1:
            output = output.view(batch, num_kv_heads, qo_len, group_size, head_dim).transpose(1, 2)
        return output.reshape(q.shape)

    def _plan_group(
        self, qo_len: int, first_tokens: Ints, page_lists: list[Ints], kv_lens: Ints
    ) -> _Group:
        num_kv_heads, head_dim = self._layout.num_kv_heads, self._layout.head_dim
        # Pad with a page of the same request: it holds nothing but the request's own numbers.
        padded = max(len(pages) for pages in page_lists)
        table = np.empty((len(page_lists), padded), dtype=np.int64)
        for row, pages in zip(table, page_lists, strict=True):
            row[: len(pages)], row[len(pages) :] = pages, pages[-1]
        rows = [self._gather_rows(table, kv) for kv in (0, 1)]
        query = kv_lens[:, None] - qo_len + np.arange(qo_len)  # positions [B, qo_len]
        keys = np.arange(padded * self._layout.page_size)
        visible = keys <= query[:, :, None]  # [B, qo_len, padded kv_len]
        visible = visible.repeat(self._group_size, axis=1)[:, None]
        mask = torch.zeros(visible.shape, dtype=self._compute_dtype)
        mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        tokens = (first_tokens[:, None] + np.arange(qo_len)).ravel()
        return _Group(
            split=(len(page_lists), qo_len, num_kv_heads, self._group_size, head_dim),
            tokens=torch.from_numpy(tokens),
            rows=torch.from_numpy(np.stack(rows).ravel()),
            mask=mask,
        )

    def _token_rows(self, page: Ints, kv: int, head: Ints, offset: Ints) -> Ints:
        """Where a head's K (kv 0) or V (kv 1) of a token is, in rows of `head_dim` elements."""
        page_size, num_kv_heads = self._layout.page_size, self._layout.num_kv_heads
        if self._layout.order == PageOrder.HND:
            return ((page * num_kv_heads + head) * 2 + kv) * page_size + offset
        return ((page * 2 + kv) * page_size + offset) * num_kv_heads + head

    def _gather_rows(self, table: Ints, kv: int) -> Ints:
        """Rows of `_row_elements` elements that make up K or V of `[B, num_pages]` page lists."""
        heads, offsets = np.arange(self._layout.num_kv_heads), np.arange(self._layout.page_size)
        if self._layout.order == PageOrder.HND:
            # A head's K of a page is one run of bytes: [B, num_kv_heads, num_pages] of them.
            starts = self._token_rows(table[:, None, :], kv, heads[:, None], offsets[:1])
            return starts // self._layout.page_size
        return self._token_rows(table[:, None, :, None], kv, heads[:, None, None], offsets)

    def _check_plan(self, qo_starts: Ints, kv_starts: Ints, indices: Ints, last: Ints) -> None:
        num_pages, page_size = self._layout.num_pages, self._layout.page_size
        for name, starts in (("qo_indptr", qo_starts), ("kv_indptr", kv_starts)):
            if len(starts) < 2 or starts[0] != 0 or np.any(np.diff(starts) < 1):
                raise ValueError(
                    f"{name} must start at 0 and grow with every request (each brings at least one"
                    f" token and one page), got {starts.tolist()}"
                )
        if not len(qo_starts) == len(kv_starts) == len(last) + 1:
            raise ValueError(
                "qo_indptr and kv_indptr must have one entry more than kv_last_page_len, got"
                f" {len(qo_starts)}, {len(kv_starts)} and {len(last)}"
            )
        if kv_starts[-1] != len(indices):
            raise ValueError(
                f"kv_indptr must end at the number of kv_indices, {len(indices)}, got"
                f" {kv_starts[-1]}"
            )
        _check_range("kv_indices", indices, 0, num_pages - 1)
        _check_range("kv_last_page_len", last, 1, page_size)
        kv_lens = (np.diff(kv_starts) - 1) * page_size + last
        too_long = np.flatnonzero(np.diff(qo_starts) > kv_lens)
        if len(too_long):
            first = too_long[0]
            raise ValueError(
                f"request {first} of the batch has more new tokens ({np.diff(qo_starts)[first]})"
                f" than tokens in its pages ({kv_lens[first]}); kv lengths include this step's"
            )

    def _check_pages(self, pages: Tensor) -> None:
        right = pages.shape == self._pages_shape and pages.dtype == self._dtype
        if not right or not pages.is_contiguous():
            raise ValueError(
                f"pages of a layer must be contiguous {self._dtype} {list(self._pages_shape)}"
                f" ({self._layout.order}), got {pages.dtype} {list(pages.shape)} with strides"
                f" {list(pages.stride())}"
            )

    def _check_heads(self, name: str, tensor: Tensor, num_heads: int) -> None:
        shape = (self._order.shape[0], num_heads, self._layout.head_dim)
        if tensor.shape != shape or tensor.dtype != self._compute_dtype:
            raise ValueError(
                f"{name} must be {self._compute_dtype} {list(shape)} (the first axis: tokens"
                f" planned), got {tensor.dtype} {list(tensor.shape)}"
            )


def _array(name: str, tensor: Tensor) -> Ints:
    if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be a 1-D int32 tensor on the CPU, got {tensor.dtype}"
            f" {list(tensor.shape)} on {tensor.device}"
        )
    return tensor.numpy().astype(np.int64)


def _check_range(name: str, values: Ints, low: int, high: int) -> None:
    wrong = values[(values < low) | (values > high)]
    if len(wrong):
        raise ValueError(f"{name} must lie in {low}..{high}, got {wrong.tolist()}")
