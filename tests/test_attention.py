"""Paged attention against a direct computation, and what a plan or a page tensor must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from disagg.kv_layout import KVLayout, PageOrder
from disagg.model.attention import TorchPagedAttention
from disagg.model.layers import compute_dtype

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 6, 2, 8, 4, 24
ORDERS = list(PageOrder)


def layout(order: PageOrder) -> KVLayout:
    return KVLayout(
        order=order,
        num_layers=1,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        itemsize=4,
    )


def attention_for(order: PageOrder, dtype: torch.dtype = torch.float32) -> TorchPagedAttention:
    return TorchPagedAttention(layout(order), num_qo_heads=NUM_QO_HEADS, dtype=dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def token_kv(pages: Tensor, order: PageOrder, page: int, offset: int) -> Tensor:
    """View of one token's K and V in a layer's pages: `[2, num_kv_heads, head_dim]`."""
    if order is PageOrder.HND:
        return pages[page, :, :, offset].transpose(0, 1)
    return pages[page, :, offset]


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One request: all its K and V `[kv_len, heads, dim]`, its queries `[qo_len, ...]`, pages."""

    k: Tensor
    v: Tensor
    q: Tensor
    page_indices: list[int]

    @property
    def num_cached(self) -> int:
        return len(self.k) - len(self.q)

    def expected(self) -> Tensor:
        """Attention by its definition, one query and one head at a time."""
        rows = []
        for index, query in enumerate(self.q):
            visible = self.num_cached + index + 1
            for head in range(NUM_QO_HEADS):
                kv_head = head // (NUM_QO_HEADS // NUM_KV_HEADS)
                scores = self.k[:visible, kv_head] @ query[head] / math.sqrt(HEAD_DIM)
                rows.append(scores.softmax(0) @ self.v[:visible, kv_head])
        return torch.stack(rows).view(-1, NUM_QO_HEADS, HEAD_DIM)


def make_batch(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sequence]:
    """Sequences of the given `(kv_len, qo_len)` on scattered pages."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    batch = []
    for kv_len, qo_len in lengths:
        count = -(-kv_len // PAGE_SIZE)
        batch.append(
            Sequence(
                k=torch.randn(kv_len, NUM_KV_HEADS, HEAD_DIM, generator=generator),
                v=torch.randn(kv_len, NUM_KV_HEADS, HEAD_DIM, generator=generator),
                q=torch.randn(qo_len, NUM_QO_HEADS, HEAD_DIM, generator=generator),
                page_indices=[free.pop() for _ in range(count)],
            )
        )
    return batch


def plan(attention: TorchPagedAttention, batch: list[Sequence]) -> None:
    qo_lens = torch.tensor([0, *(len(s.q) for s in batch)])
    page_counts = torch.tensor([0, *(len(s.page_indices) for s in batch)])
    attention.plan(
        qo_lens.cumsum(0).int(),
        page_counts.cumsum(0).int(),
        int32(*(page for s in batch for page in s.page_indices)),
        int32(*((len(s.k) - 1) % PAGE_SIZE + 1 for s in batch)),
    )


def dirty_pages(order: PageOrder, batch: list[Sequence]) -> Tensor:
    """Pages that hold the batch's cached tokens, and NaN wherever nothing was written yet.

    A page that holds a cached token was cleaned when its first token came.
    """
    pages = torch.full((NUM_PAGES, *layout(order).page_shape), float("nan"))
    for sequence in batch:
        for position in range(sequence.num_cached):
            page = sequence.page_indices[position // PAGE_SIZE]
            if position % PAGE_SIZE == 0:
                pages[page] = 0
            token = token_kv(pages, order, page, position % PAGE_SIZE)
            token[0], token[1] = sequence.k[position], sequence.v[position]
    return pages


def step(attention: TorchPagedAttention, batch: list[Sequence], pages: Tensor) -> Tensor:
    plan(attention, batch)
    new_k = torch.cat([s.k[s.num_cached :] for s in batch])
    new_v = torch.cat([s.v[s.num_cached :] for s in batch])
    dtype = compute_dtype(pages.dtype)
    attention.append(torch.cat((new_k, new_v), dim=1).to(dtype), pages)
    return attention.run(torch.cat([s.q for s in batch]).to(dtype), pages)


BATCHES = {
    "one token": [(1, 1)],
    "prefill": [(11, 11)],
    "prefill of whole pages": [(8, 8)],
    "later chunk": [(13, 6)],
    "chunk that ends a page": [(12, 6)],
    "decode": [(9, 1)],
    "decode that starts a page": [(9, 1), (5, 1)],
    "decodes of all lengths": [(1, 1), (2, 1), (4, 1), (5, 1), (17, 1), (20, 1), (3, 1)],
    "mixed": [(7, 1), (10, 10), (13, 5), (1, 1), (20, 1), (6, 2), (5, 2)],
    "equal chunks": [(6, 3), (19, 3), (3, 3)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_equals_the_definition(lengths: list[tuple[int, int]], order: PageOrder) -> None:
    batch = make_batch(lengths)
    output = step(attention_for(order), batch, dirty_pages(order, batch))
    torch.testing.assert_close(output, torch.cat([s.expected() for s in batch]))


@pytest.mark.parametrize("order", ORDERS)
def test_one_object_serves_many_steps(order: PageOrder) -> None:
    attention = attention_for(order)
    for seed, lengths in enumerate(BATCHES.values()):
        batch = make_batch(lengths, seed)
        output = step(attention, batch, dirty_pages(order, batch))
        torch.testing.assert_close(output, torch.cat([s.expected() for s in batch]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_pages(order: PageOrder, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    batch = make_batch(BATCHES["mixed"])
    pages = dirty_pages(order, batch).bfloat16()
    output = step(attention_for(order, torch.bfloat16), batch, pages)
    assert output.dtype == (torch.bfloat16 if native else torch.float32)
    expected = torch.cat([s.expected() for s in batch])
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("order", ORDERS)
def test_which_pages_hold_a_sequence_does_not_matter(order: PageOrder) -> None:
    outputs = []
    for page_indices in ([0, 1, 2], [7, 2, 5], [2, 7, 5]):
        (sequence,) = make_batch([(11, 4)])
        moved = Sequence(k=sequence.k, v=sequence.v, q=sequence.q, page_indices=list(page_indices))
        outputs.append(step(attention_for(order), [moved], dirty_pages(order, [moved])))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("order", ORDERS)
def test_append_writes_the_new_tokens_and_touches_no_other_page(order: PageOrder) -> None:
    batch = make_batch([(7, 3), (5, 1), (4, 4), (6, 1)])
    before = dirty_pages(order, batch)
    pages = before.clone()
    step(attention_for(order), batch, pages)
    written = set()
    for sequence in batch:
        for position in range(len(sequence.k)):
            page = sequence.page_indices[position // PAGE_SIZE]
            token = token_kv(pages, order, page, position % PAGE_SIZE)
            assert torch.equal(token, torch.stack([sequence.k[position], sequence.v[position]]))
            if position >= sequence.num_cached:
                written.add(page)
    others = [page for page in range(NUM_PAGES) if page not in written]
    assert torch.equal(pages[others].view(torch.int32), before[others].view(torch.int32))


GOOD_PLAN = {
    "qo_indptr": (0, 3, 4),
    "kv_indptr": (0, 2, 5),
    "kv_indices": (7, 2, 4, 0, 9),
    "kv_last_page_len": (1, 4),
}
BAD_PLANS = {
    "last page empty": ({"kv_last_page_len": (0, 4)}, r"kv_last_page_len must lie in 1..4"),
    "last page too long": ({"kv_last_page_len": (1, 5)}, r"kv_last_page_len .* got \[5\]"),
    "page id too large": ({"kv_indices": (7, 2, 4, 0, 24)}, r"kv_indices must lie in 0..23"),
    "page id negative": ({"kv_indices": (7, -2, 4, 0, 9)}, r"kv_indices .* got \[-2\]"),
    "qo_indptr starts late": ({"qo_indptr": (1, 3, 4)}, r"qo_indptr must start at 0"),
    "kv_indptr starts late": ({"kv_indptr": (1, 2, 5)}, r"kv_indptr must start at 0"),
    "qo_indptr falls": ({"qo_indptr": (0, 3, 2)}, r"qo_indptr .* grow"),
    "kv_indptr falls": ({"kv_indptr": (0, 6, 5)}, r"kv_indptr .* grow"),
    "request without token": ({"qo_indptr": (0, 3, 3)}, r"qo_indptr .* at least one"),
    "no request": ({"qo_indptr": (0,), "kv_indptr": (0,)}, r"qo_indptr .* at least one"),
    "lengths differ": ({"qo_indptr": (0, 3)}, r"one entry more .* 2, 3 and 2"),
    "last page lengths missing": ({"kv_last_page_len": (1,)}, r"one entry more .* 3, 3 and 1"),
    "kv_indices too few": ({"kv_indices": (7, 2, 4, 0)}, r"kv_indptr must end at .* 4, got 5"),
    "more new tokens than tokens": ({"qo_indptr": (0, 6, 7)}, r"request 0 .* \(6\) .* \(5\)"),
}


@pytest.mark.parametrize(("change", "text"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_a_plan_that_describes_no_step_is_refused(
    change: dict[str, tuple[int, ...]], text: str
) -> None:
    attention = attention_for(PageOrder.HND)
    attention.plan(**{name: int32(*values) for name, values in GOOD_PLAN.items()})
    with pytest.raises(ValueError, match=text):
        attention.plan(**{name: int32(*values) for name, values in (GOOD_PLAN | change).items()})


@pytest.mark.parametrize("name", GOOD_PLAN)
def test_plan_arrays_are_int32(name: str) -> None:
    arrays = {key: int32(*values) for key, values in GOOD_PLAN.items()}
    arrays[name] = arrays[name].long()
    with pytest.raises(ValueError, match=rf"{name} must be a 1-D int32 tensor .* torch.int64"):
        attention_for(PageOrder.HND).plan(**arrays)


BAD_PAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "other page order": lambda pages: pages.permute(0, 2, 3, 1, 4).contiguous(),
    "fewer pages": lambda pages: pages[1:],
    "other dtype": lambda pages: pages.bfloat16(),
    "not contiguous": lambda pages: torch.cat([pages, pages], dim=-1)[..., :HEAD_DIM],
}


@pytest.mark.parametrize("spoil", BAD_PAGES.values(), ids=BAD_PAGES.keys())
def test_pages_of_another_form_are_refused_unwritten(spoil: Callable[[Tensor], Tensor]) -> None:
    attention, batch = attention_for(PageOrder.HND), make_batch([(5, 5)])
    plan(attention, batch)
    bad = spoil(torch.zeros(NUM_PAGES, *layout(PageOrder.HND).page_shape))
    with pytest.raises(ValueError, match=r"pages of a layer must be contiguous .*\(HND\), got"):
        attention.append(torch.cat((batch[0].k, batch[0].v), dim=1), bad)
    with pytest.raises(ValueError, match=r"pages of a layer must be contiguous"):
        attention.run(batch[0].q, bad)
    assert not bad.any()


def test_tensors_that_do_not_fit_the_plan_are_refused() -> None:
    attention, batch = attention_for(PageOrder.HND), make_batch([(5, 5)])
    plan(attention, batch)
    pages = torch.zeros(NUM_PAGES, *layout(PageOrder.HND).page_shape)
    kv, q = torch.cat((batch[0].k, batch[0].v), dim=1), batch[0].q
    with pytest.raises(ValueError, match=r"kv must be torch.float32 \[5, 4, 8\]"):
        attention.append(kv[:4], pages)
    with pytest.raises(ValueError, match=r"kv must be torch.float32 \[5, 4, 8\]"):
        attention.append(batch[0].k, pages)
    with pytest.raises(ValueError, match=r"kv must be torch.float32 \[5, 4, 8\]"):
        attention.append(kv.bfloat16(), pages)
    with pytest.raises(ValueError, match=r"q must be torch.float32 \[5, 6, 8\] .* got"):
        attention.run(q[:, :4], pages)
    assert not pages.any()


def test_query_heads_must_be_a_multiple_of_kv_heads() -> None:
    with pytest.raises(ValueError, match=r"num_qo_heads must be a multiple .* 5 and 2"):
        TorchPagedAttention(layout(PageOrder.HND), num_qo_heads=5, dtype=torch.float32)
