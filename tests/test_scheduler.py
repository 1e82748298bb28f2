"""The scheduler: which ranges run, who waits, who is refused; checked after every step."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.config import CacheConfig
from disagg.engine.attempts import Attempts
from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import Sequence
from disagg.kv_layout import pages_for
from disagg.request import FinishReason, Request, SamplingParams
from tests.fake_model import fake_config, fake_scheduler

P = 4


def make(num_pages=10, num_tail_slots=2, config=None, **limits) -> Scheduler:
    cache = CacheConfig(num_pages=num_pages, page_size=P, num_tail_slots=num_tail_slots)
    return fake_scheduler(cache, config, **limits)


def request(length: int, max_tokens: int = 1, **sampling) -> Request:
    return Request(
        prompt_token_ids=tuple(1 + i % 90 for i in range(length)),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
    )


def add(scheduler: Scheduler, number: int, length: int, max_tokens=1, remote=False) -> Sequence:
    sequence = scheduler.new_request(number, request(length, max_tokens), remote=remote)
    scheduler.add(sequence)
    return sequence


def add_job(scheduler: Scheduler, number: int, length: int) -> Sequence:
    sequence = scheduler.new_job(number, tuple(range(1, length + 1)))
    scheduler.add(sequence)
    return sequence


def run_step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Schedule a step, check all that must hold of it, book it as an engine would.

    Returns (number, first token, number of tokens) of each span.
    """
    pending = {s: s.num_pending for s in scheduler.running}
    step = scheduler.schedule()
    check_step(scheduler, step, pending)
    ranges = []
    for sequence, span in step:
        ranges.append((sequence.number, span.first_token, len(span.token_ids)))
        sequence.num_computed += len(span.token_ids)
        if not sequence.is_job:
            scheduler.free_tail_slot(sequence)
            if span.sampling:
                sequence.accept(0)
            if sequence.finish is not None:
                scheduler.release(sequence)
    check_ownership(scheduler)
    return ranges


def check_step(scheduler: Scheduler, step, pending) -> None:
    limits = scheduler.limits
    sequences = [sequence for sequence, _ in step]
    assert sum(len(span.token_ids) for _, span in step) <= limits.max_batch_tokens
    assert len(step) <= limits.max_batch_size
    assert len({s.number for s in sequences}) == len(step), "two spans of one"
    decoding = [s.is_decoding for s in sequences]
    assert decoding == sorted(decoding, reverse=True), "a chunk before a decode"
    for group in (True, False):
        arrivals = [s.arrival for s in sequences if s.is_decoding == group]
        assert arrivals == sorted(arrivals)
    for sequence, span in step:
        count = len(span.token_ids)
        end = span.first_token + count
        assert count > 0
        assert span.first_token == sequence.num_computed, "a gap or an overlap"
        assert list(span.token_ids) == sequence.tokens[span.first_token : end]
        assert span.page_indices == sequence.page_indices
        assert len(span.page_indices) >= pages_for(end, P)
        is_last = count == pending[sequence]
        assert end <= len(sequence.tokens)
        if sequence.is_job:
            assert (span.tail_slot is not None) == is_last
            assert span.sampling is None
        else:
            assert span.tail_slot is None
            assert (span.sampling is not None) == is_last


def check_ownership(scheduler: Scheduler, *others: Sequence) -> None:
    sequences = [*scheduler.running, *others]
    pages = [page for sequence in sequences for page in sequence.page_indices]
    assert len(pages) == len(set(pages)), "a page has two owners"
    assert not set(pages) & set(scheduler.pages._free), "an owned page is free"
    assert all(not sequence.page_indices for sequence in scheduler.waiting)


def computed_jobs(scheduler: Scheduler) -> list[Sequence]:
    """Jobs that have nothing left to compute, but own pages."""
    return [s for s in scheduler.running if s.is_job and s.num_pending == 0]


JOBS = st.tuples(st.just("job"), st.integers(2, 20), st.just(0))
REQUESTS = st.tuples(st.sampled_from(["local", "remote"]), st.integers(1, 20), st.integers(1, 12))


@settings(deadline=None, max_examples=200)
@given(
    work=st.lists(st.one_of(JOBS, REQUESTS), min_size=1, max_size=12),
    num_pages=st.integers(8, 14),
    num_tail_slots=st.integers(1, 3),
    max_batch_tokens=st.integers(1, 25),
    max_batch_size=st.integers(1, 8),
    random=st.randoms(use_true_random=False),
)
def test_any_mix_of_work_is_served_and_gives_everything_back(
    work, num_pages, num_tail_slots, max_batch_tokens, max_batch_size, random
):
    scheduler = make(
        num_pages,
        num_tail_slots,
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
    )
    todo = [
        scheduler.new_job(number, (1,) * length)
        if kind == "job"
        else scheduler.new_request(number, request(length, max_tokens), remote=kind == "remote")
        for number, (kind, length, max_tokens) in enumerate(work)
    ]
    everything = list(todo)
    fetching: list[Sequence] = []
    for _ in range(2000):
        if todo and random.random() < 0.5:
            scheduler.add(todo.pop(0))
        fetching += scheduler.admit()
        check_ownership(scheduler, *fetching)
        ran = run_step(scheduler)
        if fetching and random.random() < 0.5:
            scheduler.ready(fetching.pop(random.randrange(len(fetching))))
        computed = computed_jobs(scheduler)
        if computed and (random.random() < 0.3 or not ran):
            scheduler.release(random.choice(computed))
        unfinished = [*todo, *fetching, *scheduler.waiting, *scheduler.running]
        if not unfinished:
            break
    else:
        raise AssertionError(f"not served: {unfinished}")
    assert scheduler.pages.num_free == num_pages
    assert scheduler.slots.num_free == num_tail_slots
    for sequence, (kind, length, max_tokens) in zip(everything, work, strict=True):
        assert len(sequence.tokens) == length + (0 if kind == "job" else max_tokens), kind


def test_decodes_come_first_then_chunks_in_order_of_arrival():
    scheduler = make(num_pages=20, max_batch_tokens=6)
    add(scheduler, 1, 1, max_tokens=9)
    add(scheduler, 2, 9)
    scheduler.admit()
    assert run_step(scheduler) == [(1, 0, 1), (2, 0, 5)]
    add(scheduler, 3, 7)
    scheduler.admit()
    # 2 has one chunk a step, also where its budget is not used up by others.
    assert run_step(scheduler) == [(1, 1, 1), (2, 5, 4), (3, 0, 1)]
    assert run_step(scheduler) == [(1, 2, 1), (3, 1, 5)]
    assert run_step(scheduler) == [(1, 3, 1), (3, 6, 1)]


def test_a_request_that_just_fits_runs_and_one_token_more_is_refused():
    scheduler = make(num_pages=10)
    add(scheduler, 1, 30, max_tokens=10)
    scheduler.admit()
    assert len(scheduler.running) == 1
    with pytest.raises(
        ValueError, match=r"at most 40 tokens \(10 pages of 4\), got 31 prompt .*10"
    ):
        scheduler.new_request(2, request(31, 10))
    scheduler.new_job(3, (1,) * 41)
    with pytest.raises(ValueError, match=r"at most 40 tokens.*got 41 tokens to prefill"):
        scheduler.new_job(3, (1,) * 42)


def test_small_requests_do_not_overtake_a_waiting_big_one():
    scheduler = make(num_pages=10)
    first = add(scheduler, 1, 16, max_tokens=8)
    big = add(scheduler, 2, 30, max_tokens=8)
    small = add(scheduler, 3, 1)
    scheduler.admit()
    assert (scheduler.running, scheduler.waiting) == ([first], [big, small])
    scheduler.release(first)
    scheduler.admit()
    assert big in scheduler.running


@pytest.mark.parametrize("length", [64, 65, 100])
def test_a_prompt_that_fills_the_models_positions_is_refused(length):
    scheduler = make(num_pages=100)
    for new in (
        lambda: scheduler.new_request(1, request(length)),
        lambda: scheduler.new_job(1, (1,) * length),
    ):
        with pytest.raises(ValueError, match=f"expected at most 63 tokens.*got {length}"):
            new()


def test_max_tokens_is_clipped_to_the_models_positions():
    scheduler = make(num_pages=16)
    assert scheduler.new_request(1, request(63, 9)).max_tokens == 1
    assert scheduler.new_request(1, request(1, 10**9)).max_tokens == 63
    assert scheduler.new_request(1, request(54, 9)).max_tokens == 9


@pytest.mark.parametrize("token", [-1, 97, 10**12])
def test_an_unknown_token_is_refused(token):
    with pytest.raises(ValueError, match=f"expected 0 to 96, got {token};"):
        make().new_request(1, Request(prompt_token_ids=(0, 96, token)))
    with pytest.raises(ValueError, match=f"expected 0 to 96, got {token};"):
        make().new_job(1, (0, 96, token))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        make().new_request(1, Request(prompt_token_ids=()))
    with pytest.raises(ValueError, match="the prompt is empty"):
        make().new_job(1, ())
    with pytest.raises(ValueError, match="leaves nothing to prefill"):
        make().new_job(1, (1,))


def test_a_last_chunk_waits_for_a_tail_slot_and_others_go_on():
    scheduler = make(num_pages=20, num_tail_slots=1, max_batch_tokens=8)
    jobs = [add_job(scheduler, number, length) for number, length in [(1, 4), (2, 6), (3, 14)]]
    scheduler.admit()
    assert run_step(scheduler) == [(1, 0, 3), (3, 0, 5)]
    assert computed_jobs(scheduler) == [jobs[0]]
    assert run_step(scheduler) == []
    scheduler.release(jobs[0])
    assert run_step(scheduler) == [(2, 0, 5), (3, 5, 3)]
    scheduler.release(jobs[1])
    assert run_step(scheduler) == [(3, 8, 5)]
    scheduler.release(jobs[2])
    assert scheduler.slots.num_free == 1


def test_a_job_reserves_pages_without_its_last_token():
    scheduler = make(num_pages=20)
    jobs = [add_job(scheduler, number, length) for number, length in [(1, 2), (2, 5), (3, 6)]]
    scheduler.admit()
    assert [len(job.page_indices) for job in jobs] == [1, 1, 2]


@pytest.mark.parametrize(("length", "count"), [(2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_what_is_fetched_are_the_prefillers_pages(length, count):
    scheduler = make(num_pages=20)
    sequence = add(scheduler, 1, length, max_tokens=5, remote=True)
    assert scheduler.admit() == [sequence]
    fetches = []
    hooks = SimpleNamespace(on_fetch=fetches.append)
    Attempts(scheduler, hooks).start(sequence)
    assert fetches[0].page_indices == sequence.page_indices[:count]
    assert len(sequence.page_indices) == pages_for(length + 5, P)


def test_a_fetch_needs_pages_and_a_slot_or_takes_neither():
    scheduler = make(num_pages=10, num_tail_slots=1)
    first, second = (add(scheduler, number, 5, remote=True) for number in (1, 2))
    assert scheduler.admit() == [first]
    assert scheduler.waiting == [second]
    assert second.page_indices == ()
    assert scheduler.pages.num_free == 8
    scheduler.ready(first)
    assert scheduler.admit() == []
    run_step(scheduler)
    assert scheduler.admit() == [second]


def test_a_prompt_of_one_token_fetches_nothing():
    scheduler = make()
    sequence = add(scheduler, 1, 1, remote=True)
    assert scheduler.admit() == []
    assert scheduler.running == [sequence]
    assert scheduler.slots.num_free == 2


def test_a_fetched_sequence_computes_only_its_last_prompt_token():
    scheduler = make()
    sequence = add(scheduler, 1, 7, max_tokens=3, remote=True)
    scheduler.admit()
    assert run_step(scheduler) == []
    scheduler.ready(sequence)
    assert [run_step(scheduler) for _ in range(4)] == [[(1, 6, 1)], [(1, 7, 1)], [(1, 8, 1)], []]


def test_the_last_prompt_token_of_a_fetched_sequence_is_a_decode():
    scheduler = make(max_batch_tokens=3)
    add_job(scheduler, 1, 9)
    fetched = add(scheduler, 2, 7, remote=True)
    scheduler.admit()
    scheduler.ready(fetched)
    assert run_step(scheduler) == [(2, 6, 1), (1, 0, 2)]


def test_one_that_is_tried_again_starts_from_zero_and_without_pages():
    scheduler = make()
    again = add(scheduler, 1, 7, remote=True)
    scheduler.admit()
    owned = (again.page_indices, again.tail_slot)
    attempts = Attempts(scheduler, None)
    attempts.try_again(5, again, remote=True)
    assert (again.page_indices, again.tail_slot, again.attempt) == ((), None, None)
    assert (again.num_computed, again.num_pending, again.retries) == (0, 7, 1)
    parted = attempts._owners[5]
    assert (parted.page_indices, parted.tail_slot) == owned != ((), None)


def test_one_that_comes_back_gets_its_old_place():
    scheduler = make(num_pages=10)
    first, second, third = (add(scheduler, number, 9, remote=True) for number in (1, 2, 3))
    assert scheduler.admit() == [first, second]
    for sequence in (second, first):  # both failed, the later one first
        Attempts(scheduler, None).try_again(sequence.number, sequence, remote=True)
    assert [sequence.number for sequence in scheduler.waiting] == [1, 2, 3]
    assert scheduler.waiting[2] is third


STOP = 5


@pytest.mark.parametrize(
    ("sampled", "finish"),
    [
        ([1, 2], None),
        ([1, STOP], FinishReason.STOP),
        ([1, 2, 3], FinishReason.LENGTH),
        ([1, 2, STOP], FinishReason.STOP),
        ([STOP], FinishReason.STOP),
        ([96], FinishReason.STOP),
        ([], None),
    ],
)
def test_the_first_stop_or_the_last_token_allowed_ends_the_output(sampled, finish):
    scheduler = make(config=fake_config(eos_token_ids=(STOP, 96)))
    sequence = scheduler.new_request(1, request(2, max_tokens=3))
    for token in sampled:
        assert sequence.finish is None
        sequence.accept(token)
    assert sequence.finish is finish
    assert sequence.tokens == [1, 2, *sampled]


def test_an_end_token_that_is_to_be_ignored_does_not_end_the_output():
    scheduler = make(config=fake_config(eos_token_ids=(STOP,)))
    sequence = scheduler.new_request(1, request(2, max_tokens=3, ignore_eos=True))
    for _ in range(3):
        assert sequence.finish is None
        sequence.accept(STOP)
    assert sequence.finish is FinishReason.LENGTH
