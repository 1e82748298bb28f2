"""Shares of a model and what makes them one: sums and joins, here of ranks that are threads.

That processes compute the same is `test_ranks.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.config import CacheConfig, SchedulerConfig
from disagg.engine.engine import Engine
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import make_runner
from disagg.engine.scheduler import Scheduler
from disagg.kv_layout import PageOrder
from disagg.model import rank_group
from disagg.model.rank_group import RankGroup, block_bytes, check_shares
from disagg.model.shape import read_config
from disagg.request import Request, SamplingParams
from disagg.shared_memory import SharedMemory
from tests.fake_model import fake_config
from tests.nodes import Oracle, prompt_of
from tests.tiny_models import loaded, make_tiny_llama


class Threads:
    """Ranks that are threads of this process: `everywhere(f)` is `f(rank)` of all of them."""

    def __init__(self, tp: int) -> None:
        self.block = SharedMemory(block_bytes(tp))
        self.groups = [RankGroup(rank, tp, self.block) for rank in range(tp)]
        self._pool = ThreadPoolExecutor(tp)

    def everywhere(self, act: Callable[[int], object]) -> list:
        return list(self._pool.map(act, range(len(self.groups))))

    def close(self) -> None:
        self._pool.shutdown()
        self.block.close()


class ThreadRanks(Threads):
    """All ranks at once, in the place of an engine's runner."""

    def __init__(self, folder, config: CacheConfig, tp: int) -> None:
        super().__init__(tp)
        shape = read_config(folder)
        self.caches = [KVCache(config, [shape], tp) for _ in range(tp)]
        self.counter, *others = (LayerCounter() for _ in range(tp))
        parts = zip(self.caches, [self.counter, *others], self.groups, strict=True)
        self.runners = [make_runner(*part) for part in parts]
        self.increments_per_step = self.runners[0].increments_per_step

    def run(self, spans):
        first, *others = self.everywhere(lambda rank: self.runners[rank].run(spans))
        assert all(other == first for other in others), "all ranks sample the same"
        return first


@settings(deadline=None, max_examples=50)
@given(
    tp=st.integers(2, 5),
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=12),
    seed=st.integers(0, 100),
)
def test_sums_and_joins_of_any_shapes_in_turn(tp, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    wanted = [torch.randint(-1000, 1000, (tp, *shape), generator=generator) for shape in shapes]
    with contextlib.closing(Threads(tp)) as threads:

        def act(rank):
            group = threads.groups[rank]
            return [(group.sum(x[rank].float()), group.join(x[rank])) for x in wanted]

        for results in threads.everywhere(act):
            for x, (total, joined) in zip(wanted, results, strict=True):
                assert total.equal(x.float().sum(0))
                assert joined.equal(torch.cat(list(x), -1))


def test_who_is_slow_reads_what_was_there_in_its_turn():
    """The fast rank may be one turn ahead of the slow one, and no further."""
    with contextlib.closing(Threads(2)) as threads:
        rng = random.Random(0)

        def act(rank):
            found = []
            for turn in range(300):
                if rank == 0 and rng.random() < 0.1:
                    torch.rand(200_000).sum()  # takes a moment
                found.append(int(threads.groups[rank].sum(torch.tensor([turn + rank]))))
            return found

        assert threads.everywhere(act) == [[2 * turn + 1 for turn in range(300)]] * 2


def test_a_rank_that_does_not_come_is_waited_for_and_then_given_up(monkeypatch):
    monkeypatch.setattr(rank_group, "SECONDS", 0.05)
    with contextlib.closing(Threads(2)) as threads:
        with pytest.raises(TimeoutError, match=r"late by 0.05 s: turns \[1 0\]"):
            threads.groups[0].sum(torch.ones(1))


def test_a_pause_of_all_ranks_is_nobodys_fault(monkeypatch):
    """As when a machine or a container is frozen: clocks go on."""
    monkeypatch.setattr(rank_group.time, "monotonic", itertools.count(0.0, 100.0).__next__)
    with contextlib.closing(Threads(2)) as threads:

        def act(rank):
            time.sleep(0.05 * rank)
            return int(threads.groups[rank].sum(torch.tensor([rank])))

        assert threads.everywhere(act) == [1, 1]


def test_alone_nothing_is_cut_or_copied():
    alone, tensor = RankGroup(), torch.rand(5, 3)
    for found in (alone.cut(tensor, 0), alone.cut_vocabulary(tensor), alone.sum(tensor)):
        assert found.data_ptr() == tensor.data_ptr()
        assert found.equal(tensor)
    assert alone.join(tensor) is tensor


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shares_of_heads(tp, heads):
    """Of equal size; together all of them, the same one more than once if there are too few."""
    rows = torch.arange(heads * 3).view(heads * 3, 1)
    shares = [RankGroup(rank, tp).cut(rows, 0, unit=3).flatten().tolist() for rank in range(tp)]
    assert {len(share) for share in shares} == {max(1, heads // tp) * 3}
    copies = max(1, tp // heads)
    assert [row for share in shares[::copies] for row in share] == list(range(heads * 3))
    assert all(shares[i] == shares[i - i % copies] for i in range(tp))


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9])
def test_shares_of_a_vocabulary(vocab_size):
    rows = torch.rand(vocab_size, 2)
    shares = [RankGroup(rank, 4).cut_vocabulary(rows) for rank in range(4)]
    together = torch.cat(shares)
    assert len({len(share) for share in shares}) == 1
    assert together[:vocab_size].equal(rows)
    assert not together[vocab_size:].any()


@pytest.mark.parametrize(
    ("tp", "overrides", "problem"),
    [
        (3, {"num_qo_heads": 4, "num_kv_heads": 1}, "num_qo_heads 4 .* by 3 ranks"),
        (2, {"num_qo_heads": 6, "num_kv_heads": 3}, "3 KV heads cannot be shared by 2 ranks"),
        (4, {"num_qo_heads": 24, "num_kv_heads": 6}, "6 KV heads cannot be shared by 4 ranks"),
        (2, {"intermediate_size": 97}, "intermediate_size 97 .* by 2 ranks"),
        (256, {"num_qo_heads": 4, "num_kv_heads": 2}, "num_qo_heads 4 .* by 256 ranks"),
    ],
)
def test_ranks_that_cannot_share_a_model(tp, overrides, problem):
    with pytest.raises(ValueError, match=problem):
        check_shares(fake_config(**overrides), tp)


OPTIONS = {
    "plain": {},
    "everything": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "odd vocabulary": {"vocab_size": 129, "tie_word_embeddings": True},
    "norms of heads": {"family": "qwen3"},
    "experts": {"family": "qwen3_moe"},
    "latents": {"family": "deepseek_v3"},
}


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize(
    ("options", "num_kv_heads"),
    [*itertools.product(list(OPTIONS)[:-1], (4, 2, 1)), ("latents", 4)],
)
@pytest.mark.parametrize("tp", [2, 4])
def test_tokens_of_ranks_are_those_of_transformers(tmp_path, tp, num_kv_heads, options, order):
    folder = make_tiny_llama(tmp_path, num_key_value_heads=num_kv_heads, **OPTIONS[options])
    oracle = Oracle(folder)
    cache = CacheConfig(num_pages=64, page_size=4, dtype="float32", kv_layout=order)
    limits = SchedulerConfig(max_batch_tokens=9)
    with contextlib.closing(ThreadRanks(folder, cache, tp)) as ranks:
        engine = Engine(ranks, Scheduler(limits, cache, read_config(folder)))
        found = {}
        for length in (1, 5, 21):
            tokens = found[prompt_of(length)] = []
            sampling = SamplingParams(max_tokens=6)
            request = Request(prompt_token_ids=prompt_of(length), sampling=sampling)
            engine.submit(request, lambda output, to=tokens: to.extend(output.token_ids))
        while engine.step():
            pass
    for prompt, tokens in found.items():
        assert tuple(tokens) == oracle(prompt, 6)


def test_logits_are_of_the_vocabulary_alone(tmp_path):
    """Not of the zeros that fill it up, which would be the largest if all others were below 0."""
    folder = make_tiny_llama(tmp_path, vocab_size=129)
    cache = CacheConfig(num_pages=1, dtype="float32")
    hidden = torch.rand(2, 64)
    with contextlib.closing(ThreadRanks(folder, cache, 4)) as ranks:
        for logits in ranks.everywhere(lambda rank: ranks.runners[rank].model.logits(hidden)):
            torch.testing.assert_close(logits, loaded(folder, "float32").logits(hidden))
