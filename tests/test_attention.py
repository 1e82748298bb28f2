"""Paged attention against a direct computation, and what no plan or tensor may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest.mock import Mock

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
    return TorchPagedAttention(layout(order), group_size=NUM_QO_HEADS // NUM_KV_HEADS, dtype=dtype)


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
    attention.plan([range(s.num_cached, len(s.k)) for s in batch], [s.page_indices for s in batch])


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


BAD_PLANS = {
    "no new token": (range(5, 5), [7, 2]),
    "page missing": (range(3, 5), [7]),
    "no page": (range(1), []),
}


@pytest.mark.parametrize(("positions", "pages"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_a_plan_that_describes_no_step_is_refused(positions: range, pages: list[int]) -> None:
    attention = attention_for(PageOrder.HND)
    with pytest.raises(ValueError, match=r"\d pages of 4 for positions range\(.*\) of a request"):
        attention.plan([range(3), positions], [[0], pages])


def test_pages_behind_the_last_position_are_not_looked_at() -> None:
    """Nor need they exist."""
    (sequence,) = make_batch([(6, 2)])
    pages = dirty_pages(PageOrder.HND, [sequence])
    more = replace(sequence, page_indices=[*sequence.page_indices, NUM_PAGES + 7])
    found = [step(attention_for(PageOrder.HND), [each], pages.clone()) for each in (sequence, more)]
    assert found[0].equal(found[1])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page", [-1, NUM_PAGES])
def test_a_page_that_does_not_exist_is_an_error(order: PageOrder, page: int) -> None:
    (sequence,) = make_batch([(9, 1)])
    for place in (0, 2):  # read from, written to
        page_indices = [page if i == place else index for i, index in enumerate((3, 4, 5))]
        spoilt = Sequence(k=sequence.k, v=sequence.v, q=sequence.q, page_indices=page_indices)
        with pytest.raises(ValueError, match=f"pages .*{page}.* of {NUM_PAGES}"):
            plan(attention_for(order), [spoilt])


@pytest.mark.parametrize("order", ORDERS)
def test_tensors_that_do_not_fit_the_plan_are_an_error(order: PageOrder) -> None:
    attention, batch = attention_for(order), make_batch([(5, 5)])
    plan(attention, batch)
    pages = torch.zeros(NUM_PAGES, *layout(order).page_shape)
    kv, q = torch.cat((batch[0].k, batch[0].v), dim=1), batch[0].q
    for wrong in (kv[:4], batch[0].k):
        with pytest.raises((IndexError, RuntimeError)):
            attention.append(wrong, pages)
    other = replace(layout(order), order=next(each for each in ORDERS if each != order))
    wrong_order = torch.zeros(NUM_PAGES, *other.page_shape)
    for wrong in (pages.bfloat16(), pages[1:], wrong_order, pages.repeat(2, 1, 1, 1, 1)[::2]):
        with pytest.raises(ValueError, match=r"expected contiguous \["):
            attention.append(kv, wrong)
    with pytest.raises((IndexError, RuntimeError)):
        attention.run(q[:, :4], pages)
    assert not pages.any()


@pytest.mark.parametrize(("num_pages", "calls"), [((1, 2), 2), ((2, 3), 1), ((2, 9), 2)])
def test_requests_of_like_lengths_alone_are_padded_to_one(
    num_pages: tuple[int, int], calls: int
) -> None:
    attention = attention_for(PageOrder.HND)
    ends = [count * PAGE_SIZE for count in num_pages]
    attention.plan([range(end - 1, end) for end in ends], [list(range(n)) for n in num_pages])
    attend = Mock(side_effect=lambda q, kv, mask: q)
    attention.run(
        torch.ones(2, 1, 1), torch.zeros(NUM_PAGES, *layout(PageOrder.HND).page_shape), attend
    )
    assert attend.call_count == calls


def test_pages_of_latents() -> None:
    """One vector a token, without heads: where it is stored, what is gathered, what is refused."""
    latents = replace(layout(PageOrder.HND), num_kv_heads=1, num_vectors=1)
    nhd = replace(latents, order=PageOrder.NHD)
    assert latents.page_shape == nhd.page_shape == (PAGE_SIZE, HEAD_DIM)
    assert latents.page_bytes == PAGE_SIZE * HEAD_DIM * 4
    stored = torch.rand(9, HEAD_DIM)
    pages = torch.full((NUM_PAGES, PAGE_SIZE, HEAD_DIM), float("nan"))
    pages[7], pages[2] = stored[:4], stored[4:8]
    for each in (latents, nhd):
        attention = TorchPagedAttention(each, group_size=1, dtype=torch.float32)
        attention.plan([range(8, 9)], [[7, 2, 5]])
        attention.append(stored[8:].unsqueeze(1), pages)
        attend = Mock(return_value=torch.zeros(1, 1, 3, 6))
        attention.run(torch.ones(1, 3, 6), pages, attend)
        q, kv, mask = attend.call_args.args
        assert q.shape == (1, 1, 3, 6)
        assert kv.shape == (1, 1, 1, 12, HEAD_DIM)
        assert kv[0, 0, 0, :9].equal(stored)
        assert mask.flatten().tolist() == [0.0] * 9 + [float("-inf")] * 3
        with pytest.raises(ValueError, match=r"expected contiguous \["):
            attention.append(stored[8:].unsqueeze(1), pages.view(NUM_PAGES, 1, PAGE_SIZE, -1))
        with pytest.raises(ValueError, match=f"pages 2 to {NUM_PAGES} of {NUM_PAGES}"):
            attention.plan([range(8, 9)], [[7, 2, NUM_PAGES]])
