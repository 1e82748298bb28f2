"""The runner: what it plans, what it counts and when, which rows it samples."""

import pytest
import torch

from disagg.config import CacheConfig
from disagg.hooks import Span
from disagg.kv_layout import PageOrder
from disagg.request import SamplingParams
from tests.fake_model import FakeModel, fake_config, fake_greedy, fake_hidden, fake_runner

P = 4
PROMPT = (7, 3, 9, 1, 4, 4, 8, 2, 6, 5)


def span(first_token, token_ids, page_indices, *, samples=False, tail_slot=None) -> Span:
    return Span(
        number=1,
        first_token=first_token,
        token_ids=tuple(token_ids),
        page_indices=tuple(page_indices),
        sampling=SamplingParams() if samples else None,
        tail_slot=tail_slot,
    )


def make_runner(order=PageOrder.HND, dtype="float32"):
    cache = CacheConfig(num_pages=8, page_size=P, kv_layout=order, dtype=dtype, num_tail_slots=2)
    return fake_runner(cache, model=FakeModel(order=order))


def ids_of(sampled):
    return {i: result.tokens[0].token_id for i, result in enumerate(sampled) if result.tokens}


def test_a_batch_is_spans_one_after_another():
    runner, seen = make_runner(), []
    forward = runner.model.forward
    runner.model.forward = lambda *args: seen.append(args) or forward(*args)
    runner.run([span(0, [1, 2, 3], [7]), span(8, [4], [2, 5, 0]), span(2, [5, 6], [1])])
    ((token_ids, positions, *_),) = seen
    assert token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert positions.tolist() == [0, 1, 2, 8, 2, 3]
    assert token_ids.dtype == positions.dtype == torch.int64
    assert runner.attention.positions == [range(3), range(8, 9), range(2, 4)]
    assert [pages.tolist() for pages in runner.attention.page_lists] == [[7], [2, 5, 0], [1]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("chunk", [1, 3, P, 2 * P, len(PROMPT)])
def test_scattered_pages_and_any_chunks_give_the_oracles_token(order, dtype, chunk):
    runner = make_runner(order, dtype)
    pages = (6, 0, 3)
    for first in range(0, len(PROMPT), chunk):
        ids = PROMPT[first : first + chunk]
        end = first + len(ids)
        last = end == len(PROMPT)
        sampled = runner.run([span(first, ids, pages[: -(-end // P)], samples=last)])
    assert [*ids_of(sampled).values()] == fake_greedy(fake_config(), PROMPT, 1)


def test_only_spans_that_sample_get_tokens_and_logits():
    runner = make_runner()
    rows = []
    logits = runner.model.logits
    runner.model.logits = lambda hidden: rows.append(len(hidden)) or logits(hidden)
    (first,) = fake_greedy(fake_config(), PROMPT[:3], 1)
    (second,) = fake_greedy(fake_config(), PROMPT[:5], 1)
    sampled = runner.run(
        [
            span(0, PROMPT[:3], [0], samples=True),
            span(0, PROMPT[:4], [1]),
            span(0, PROMPT[:5], [2, 3], samples=True),
        ]
    )
    assert ids_of(sampled) == {0: first, 2: second}
    assert rows == [2]
    assert ids_of(runner.run([span(4, PROMPT[4:6], [1, 4], tail_slot=0)])) == {}
    assert rows == [2], "logits were computed that nobody samples from"


def test_every_step_adds_one_a_layer_and_one():
    runner = make_runner()
    assert runner.increments_per_step == 3
    runner.run([span(0, PROMPT[:3], [0])])
    assert runner.counter.read() == 3
    runner.run([span(0, PROMPT[:5], [1, 2], tail_slot=1), span(3, PROMPT[3:4], [0], samples=True)])
    assert runner.counter.read() == 6


def test_the_tail_is_written_before_the_last_increment_and_after_the_layers():
    runner = make_runner()
    tail = runner.kv_cache.tail_hidden[1]
    hidden = fake_hidden(fake_config(), PROMPT)[len(PROMPT) - 2]
    seen = []
    add = runner.counter.add
    runner.counter.add = lambda: (seen.append(torch.equal(tail, hidden)), add())
    runner.run(
        [
            span(0, (1, 2), [4], samples=True),
            span(0, PROMPT[:-1], [0, 1, 2], tail_slot=1),
            span(0, (3,), [5]),
        ]
    )
    assert seen == [False, False, True]
    assert not runner.kv_cache.tail_hidden[0].any()


def test_the_counter_follows_the_layers():
    runner = make_runner()
    seen = []
    runner.model.before_layer = lambda layer: seen.append((layer, runner.counter.read()))
    runner.run([span(0, PROMPT[:2], [0])])
    runner.run([span(2, PROMPT[2:3], [0])])
    assert seen == [(0, 0), (1, 1), (0, 3), (1, 4)]
