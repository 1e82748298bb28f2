"""Sampling: distribution, cuts, repeatability, log-probabilities; from tensors up to two nodes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.sampling import cut, greedy, sample, uniform
from disagg.request import MAX_LOGPROBS, Request, SamplingParams
from disagg.serve.node import Node
from tests.nodes import DEADLINE_SECONDS, node_config, pair, prompt_of
from tests.test_engine import Messenger, Replica
from tests.tiny_models import make_tiny_llama, reference_logits


def ids(sampled):
    return [token.token_id for token in sampled]


def kept(weights, **wish):
    """Which tokens of one row stay."""
    left = cut(np.array(weights), SamplingParams(temperature=1.0, **wish))
    assert all(left[i] in (0, weight) for i, weight in enumerate(weights))
    return left.nonzero()[0].tolist()


# --- The likeliest ---


def test_each_row_gives_its_likeliest_token():
    logits = torch.tensor([[0.0, 2.0, 1.0], [-1.0, -3.0, -2.0], [5.0, 5.0, 4.0]])
    assert greedy(logits) == [1, 0, 0]
    assert greedy(logits.to(torch.bfloat16)) == [1, 0, 0]
    assert ids(sample(logits, [SamplingParams()] * 3, [0, 0, 0])) == [1, 0, 0]


def test_no_rows_give_no_tokens():
    assert greedy(torch.empty(0, 7)) == []


def test_greedy_rows_compute_no_probabilities(monkeypatch):
    """They cost what they did before there was anything else."""
    monkeypatch.setattr("disagg.engine.sampling.draw", None)
    monkeypatch.setattr(torch.Tensor, "log_softmax", None)
    wish = SamplingParams(top_k=3, top_p=0.5, seed=1)
    assert ids(sample(torch.tensor([[0.0, 2.0, 1.0]]), [wish], [0])) == [1]


# --- The distribution ---


def chi_square(counts, probabilities, num_draws):
    return sum(
        (counts[token] - num_draws * p) ** 2 / (num_draws * p)
        for token, p in enumerate(probabilities)
        if p > 0
    )


@pytest.mark.parametrize(
    ("wish", "is_kept"),
    [
        ({"temperature": 1.0}, range(8)),
        ({"temperature": 0.5}, range(8)),
        ({"temperature": 1.0, "top_k": 3}, (2, 5, 7)),
        ({"temperature": 2.0, "top_p": 0.7}, (0, 2, 5, 7)),
    ],
)
def test_draws_follow_the_probabilities(wish, is_kept):
    """Chi-square of 20,000 draws: seven degrees of freedom exceed 29.9 once in 10,000 times."""
    logits = torch.tensor([[0.3, -1.0, 1.2, -0.5, 0.0, 0.9, -2.0, 2.0]])
    num_draws = 20_000
    params = SamplingParams(seed=11, **wish)
    tokens = ids(sample(logits.expand(num_draws, -1), [params] * num_draws, range(num_draws)))
    weights = [math.exp(x / params.temperature) for x in logits[0].tolist()]
    weights = [w if token in is_kept else 0.0 for token, w in enumerate(weights)]
    counts = Counter(tokens)
    assert set(counts) == set(is_kept)
    expected = [w / sum(weights) for w in weights]
    assert chi_square(counts, expected, num_draws) < 29.9
    assert chi_square(counts, [1 / 8] * 8, num_draws) > 100, "the test can tell"


def test_other_seeds_and_other_indices_are_independent_draws():
    """Neighbouring (seed, index) pairs: 20,000 each, uniform over 16 parts of [0, 1)."""
    for pairs in ([(5, i) for i in range(20_000)], [(s, 5) for s in range(20_000)]):
        draws = [uniform(seed, index) for seed, index in pairs]
        assert all(0 <= draw < 1 for draw in draws)
        # 15 degrees of freedom exceed 44.3 once in 10,000 times; pairs of neighbours: 255, 345.
        parts = [int(draw * 16) for draw in draws]
        assert chi_square(Counter(parts), [1 / 16] * 16, len(parts)) < 44.3
        neighbours = Counter(16 * a + b for a, b in zip(parts[::2], parts[1::2], strict=True))
        assert chi_square(neighbours, [1 / 256] * 256, len(parts) // 2) < 345
    assert len({uniform(s, i) for s in (0, 1, 2**64) for i in range(100)}) == 300


def test_a_falling_temperature_ends_at_the_likeliest_token():
    logits = torch.tensor([[1.0, 1.5, 0.0, 1.49]]).expand(500, -1)
    for temperature in (1e-3, 1e-30, 5e-324):
        wishes = [SamplingParams(temperature=temperature, seed=seed) for seed in range(500)]
        assert set(ids(sample(logits, wishes, [0] * 500))) == {1}
    wishes = [SamplingParams(temperature=1e30, seed=seed) for seed in range(500)]
    assert set(ids(sample(logits, wishes, [0] * 500))) == {0, 1, 2, 3}


def test_tokens_that_cannot_be_are_never_drawn(monkeypatch):
    """At both ends of what a draw can be."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    wish = SamplingParams(temperature=1.0, seed=0)
    for draw, token in ((0.0, 1), (0.5, 3), (1 - 2**-53, 3)):
        monkeypatch.setattr("disagg.engine.sampling.uniform", lambda *_, draw=draw: draw)
        assert ids(sample(logits, [wish], [0])) == [token]


# --- The cuts ---


def test_top_k_keeps_exactly_k_and_the_first_of_equals():
    weights = [0.5, 1.0, 0.5, 0.25, 0.5, 0.125]
    assert [kept(weights, top_k=k) for k in range(1, 8)] == [
        [1],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 4],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert kept(weights, top_k=10**30) == [0, 1, 2, 3, 4, 5]


def test_top_p_keeps_the_fewest_that_reach_it():
    weights = [0.25, 1.0, 0.25, 0.5]  # shares 1/8, 4/8, 1/8, 2/8
    for top_p, expected in (
        (1e-9, [1]),
        (0.5, [1]),
        (0.5001, [1, 3]),
        (0.75, [1, 3]),
        (0.7501, [0, 1, 3]),
        (0.875, [0, 1, 3]),
        (0.8751, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ):
        assert kept(weights, top_p=top_p) == expected, top_p


def test_top_p_is_a_share_of_what_top_k_left():
    weights = [0.25, 1.0, 0.25, 0.5]
    assert kept(weights, top_k=2, top_p=0.66) == [1]
    assert kept(weights, top_k=2, top_p=0.67) == [1, 3]


@settings(deadline=None, max_examples=200)
@given(
    weights=st.lists(st.integers(0, 12), min_size=20, max_size=20).filter(any),
    top_k=st.none() | st.integers(1, 25),
    top_p=st.sampled_from([0.1, 0.3, 0.5, 0.9, 0.999, 1.0]),
)
def test_cuts_are_those_of_a_list_in_order_of_weight(weights, top_k, top_p):
    order = sorted(range(20), key=lambda token: -weights[token])[:top_k]
    total = sum(weights[token] for token in order)
    expected, before = [], 0
    for token in order:
        if top_p == 1.0 or before < top_p * total:
            expected.append(token)
        before += weights[token]
    expected = sorted(token for token in expected if weights[token])
    assert kept([float(w) for w in weights], top_k=top_k, top_p=top_p) == expected


# --- Nobody else matters ---


def test_a_row_draws_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(24, 50, generator=generator)
    kinds = ({}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}, {"logprobs": 2})
    wishes = [
        SamplingParams(temperature=(i % 4) * 0.4, seed=i, **kinds[i % len(kinds)])
        for i in range(24)
    ]
    together = sample(logits, wishes, range(24))
    alone = [sample(logits[i : i + 1], [wishes[i]], [i])[0] for i in range(24)]
    assert together == alone
    order = torch.randperm(24, generator=generator).tolist()
    shuffled = sample(logits[order], [wishes[i] for i in order], order)
    assert shuffled == [together[i] for i in order]


def toy(replica, runner=None, *, order=1, num_prompts=6):
    """Draws of the toy model: its logits are 1 for one token and 0 for the others."""
    wishes = [
        SamplingParams(max_tokens=12, temperature=0.3, seed=7 + i) for i in range(num_prompts)
    ]
    numbers = {}
    for i in range(num_prompts)[::order]:
        prompt = tuple((3 * i + j * j) % 97 for j in range(1 + 3 * i))
        numbers[i] = replica.ask(Request(prompt_token_ids=prompt, sampling=wishes[i]))
    (runner or replica).run()
    return [replica.tokens[numbers[i]] for i in range(num_prompts)]


def test_a_seed_gives_the_same_tokens_alone_in_chunks_in_any_order_and_split():
    expected = toy(Replica(num_pages=100))
    assert len(set(map(tuple, expected))) == 6
    assert toy(Replica(num_pages=100, max_batch_tokens=3)) == expected
    assert toy(Replica(num_pages=100, max_batch_size=1)) == expected
    assert toy(Replica(num_pages=9)) == expected, "one after another"
    assert toy(Replica(num_pages=100), order=-1) == expected
    messenger = Messenger(num_pages=100, budget=5)
    assert toy(messenger.decoder, messenger) == expected


def test_another_seed_gives_other_tokens_and_so_does_none():
    prompt = (1, 2, 3)
    replica = Replica(num_pages=100)
    wish = SamplingParams(max_tokens=30, temperature=1.0)
    requests = [replace(wish, seed=0), replace(wish, seed=1), wish, wish, replace(wish, seed=0)]
    numbers = [
        replica.ask(Request(prompt_token_ids=prompt, sampling=request)) for request in requests
    ]
    replica.run()
    answers = [tuple(replica.tokens[number]) for number in numbers]
    assert answers[0] == answers[4]
    assert len(set(answers)) == 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def test_split_and_undivided_nodes_draw_the_same_tokens(model):
    wishes = [
        SamplingParams(max_tokens=12, temperature=0.8, seed=1),
        SamplingParams(max_tokens=12, temperature=1.5, seed=2, top_k=20),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, top_p=0.9),
        SamplingParams(max_tokens=12),
    ]
    requests = [
        Request(prompt_token_ids=prompt_of(5 + 9 * i), sampling=wish)
        for i, wish in enumerate(wishes)
    ]

    def ask(node, requests):
        handles = [node.submit(request) for request in requests]
        return [handle.result(DEADLINE_SECONDS).token_ids for handle in handles]

    with Node(node_config(model)) as undivided:
        expected = ask(undivided, requests)
        assert [ask(undivided, [request])[0] for request in requests] == expected
    with pair(model, max_batch_tokens=7) as nodes:
        assert ask(nodes.decoder, requests[::-1]) == expected[::-1]
        nodes.wait_for_balance()


# --- Log-probabilities ---


def test_logprobs_are_those_of_the_model_and_cut_to_what_was_asked(model):
    prompt, count = prompt_of(9), 5
    wish = SamplingParams(max_tokens=6, temperature=0.7, top_k=40, seed=4, logprobs=count)
    with Node(node_config(model)) as undivided:
        done = undivided.submit(Request(prompt_token_ids=prompt, sampling=wish)).result(
            DEADLINE_SECONDS
        )
        plain = undivided.submit(
            Request(prompt_token_ids=prompt, sampling=replace(wish, logprobs=None))
        ).result(DEADLINE_SECONDS)
    assert (plain.token_ids, plain.logprobs) == (done.token_ids, ())
    logits = reference_logits(model, (*prompt, *done.token_ids))[len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(done.logprobs) == len(done.token_ids) == 6
    for row, token, found in zip(expected, done.token_ids, done.logprobs, strict=True):
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in found.top] == row.topk(count).indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)


def test_each_request_gets_as_many_logprobs_as_it_asked_for():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).expand(4, -1)
    wishes = [SamplingParams(logprobs=count) for count in (None, 0, 2, MAX_LOGPROBS)]
    found = [token.logprobs for token in sample(logits, wishes, [0] * 4)]
    assert found[0] is None
    assert [len(logprobs.top) for logprobs in found[1:]] == [0, 2, 3]
    assert found[3].top[0] == (1, found[3].logprob)
    assert sum(math.exp(p) for _, p in found[3].top) == pytest.approx(1)


# --- Ends ---


def test_stop_token_ids_end_the_output_also_where_end_tokens_are_ignored():
    replica = Replica()
    number = replica.submit((1, 2, 3), 8)
    replica.run()
    free = replica.tokens[number]
    stop = free[2]
    for ignore_eos in (False, True):
        number = replica.submit((1, 2, 3), 8, stop_token_ids=(stop,), ignore_eos=ignore_eos)
        replica.run()
        assert replica.tokens[number] == free[: free.index(stop) + 1]
        assert replica.ends[number] == ("stop", None)
    with pytest.raises(ValueError, match="stop_token_ids: token id out of the vocabulary"):
        replica.submit((1, 2, 3), 8, stop_token_ids=(97,))


WRONG = {
    "max_tokens": (0, -1, 1.0, None, "8", True),
    "temperature": (-0.1, math.inf, math.nan, None, "1"),
    "top_k": (0, -1, 1.5, "1"),
    "top_p": (0, -0.5, 1.0001, math.nan, None),
    "seed": (-1, 0.5),
    "stop_token_ids": (1, ("a",), (1.0,)),
    "stop": (("",), "END", (b"END",), ("a\n", "")),
    "ignore_eos": (None, 1),
    "logprobs": (-1, MAX_LOGPROBS + 1, True),
}


@pytest.mark.parametrize(("field", "values"), WRONG.items())
def test_what_is_out_of_range_is_refused_by_its_name_in_one_line(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}: Expected .*; got .*$") as error:
            SamplingParams(**{field: value})
        assert "\n" not in str(error.value)
    assert set(WRONG) == set(SamplingParams.__dataclass_fields__)


def test_what_is_at_the_border_is_taken():
    SamplingParams(max_tokens=1, temperature=0, top_k=1, top_p=1, seed=0, logprobs=0)
    SamplingParams(top_p=1e-300, seed=2**64, logprobs=MAX_LOGPROBS, stop=("a", "b"))
    wishes = [SamplingParams(temperature=1, seed=seed) for seed in range(30)]
    assert set(ids(sample(torch.tensor([[3.0, 3.0]] * 30), wishes, [0] * 30))) == {0, 1}
