"""The engine: undivided, as prefiller and as decoder; tokens against an oracle, then the balance.

Every test steps engines by hand, but for those of the thread. `Messenger` stands for everything
between a prefiller and a decoder: it copies pages and tails in the test's own process.
"""

import itertools
import threading
import time
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.config import CacheConfig, OnFailure
from disagg.engine.attempts import Attempts
from disagg.engine.engine import Engine
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import Runner
from disagg.engine.stopwatch import Stopwatch
from disagg.hooks import KVEnded, KVFailed, KVStuck, ReleasePrefill, StartPrefill
from disagg.kv_layout import PageOrder, pages_for
from disagg.model.attention import TorchPagedAttention
from disagg.request import (
    FinishReason,
    Output,
    Request,
    SamplingParams,
    TokenLogprobs,
    TransferStats,
)
from tests.balance import engine_balance
from tests.fake_model import (
    fake_config,
    fake_greedy,
    fake_hidden,
    fake_runner,
    fake_scheduler,
)
from tests.tiny_models import greedy, loaded, make_tiny_llama

P = 4
CONFIG = fake_config()
MOVED = TransferStats(
    prefiller="a:1", transport="shm", writes=7, bytes=9, retries=0, exposed=0.5, span=2.0
)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + 7 * i + i * i) % CONFIG.vocab_size for i in range(length))


class Replica:
    """An engine of the toy model, with what it answered."""

    def __init__(
        self,
        *,
        prefill_hooks=None,
        decode_hooks=None,
        num_pages=40,
        slots=4,
        order=PageOrder.HND,
        make_runner=fake_runner,
        clock=time.monotonic,
        **limits,
    ):
        cache = CacheConfig(
            num_pages=num_pages, page_size=P, kv_layout=order, dtype="float32", num_tail_slots=slots
        )
        self.runner: Runner = make_runner(cache)
        self.scheduler = fake_scheduler(cache, self.runner.model.config, **limits)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, tuple[FinishReason, str | None]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.last: dict[int, Output] = {}
        self.engine = Engine(
            self.runner,
            self.scheduler,
            prefill_hooks=prefill_hooks,
            decode_hooks=decode_hooks,
            clock=clock,
        )
        self.engine._attempts._numbers = itertools.count(1)
        self.idle = engine_balance(self.engine)
        self.numbers = itertools.count(1)

    def on_output(self, number, output) -> None:
        assert number not in self.ends, f"request {number} is answered after its end"
        self.tokens.setdefault(number, []).extend(output.token_ids)
        self.logprobs.setdefault(number, []).extend(output.logprobs)
        if output.finish_reason is not None:
            self.ends[number] = (output.finish_reason, output.error)
            self.last[number] = output

    def submit(self, prompt, max_tokens=4, **sampling) -> int:
        sampling = SamplingParams(max_tokens=max_tokens, **sampling)
        return self.ask(Request(prompt_token_ids=tuple(prompt), sampling=sampling))

    def ask(self, request) -> int:
        # The engine's number, unless several threads ask.
        number = next(self.numbers)
        self.engine.submit(request, partial(self.on_output, number))
        return number

    def step(self) -> bool:
        counter, did_work = self.runner.counter.read(), self.engine.step()
        added = self.runner.counter.read() - counter
        assert added in (0, len(self.runner.kv_cache.layers) + 1)
        return did_work

    def run(self, max_steps=2000) -> None:
        """Step until there is nothing to do."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {max_steps} steps")


class Messenger:
    """Prefiller and decoder with a hand-over between them; `decoder.engine` is the one to ask.

    With `lose` no fetch is passed on: the test says what becomes of it.
    """

    def __init__(self, *, budget=512, lose=False, **same):
        self.prefiller = Replica(prefill_hooks=self, max_batch_tokens=budget, **same)
        self.decoder = Replica(decode_hooks=self, max_batch_tokens=budget, **same)
        self.lose = lose
        self.fetches = {}
        self.cancelled: list[int] = []
        self.finished_jobs = []
        self.steps: list[tuple[int, tuple]] = []

    def on_step_scheduled(self, base, chunks) -> None:
        assert base == self.prefiller.runner.counter.read()
        self.steps.append((base, tuple(chunks)))
        self.finished_jobs += [chunk for chunk in chunks if chunk.tail_slot is not None]

    def on_fetch(self, fetch) -> None:
        assert fetch.attempt not in self.fetches
        assert len(fetch.page_indices) == pages_for(len(fetch.token_ids) - 1, P)
        self.fetches[fetch.attempt] = fetch
        if not self.lose:
            self.start(fetch)

    def on_cancel(self, attempt) -> None:
        assert attempt in self.fetches
        self.cancelled.append(attempt)

    def start(self, fetch) -> None:
        self.prefiller.engine.post(StartPrefill(job=fetch.attempt, token_ids=fetch.token_ids))

    def hand_over(self) -> None:
        """Copy what the prefiller has finished, as raw bytes."""
        for chunk in self.finished_jobs:
            self.copy(chunk)
            self.decoder.engine.post(KVEnded(attempt=chunk.number, transfer=MOVED))
            self.prefiller.engine.post(ReleasePrefill(job=chunk.number))
        self.finished_jobs = []

    def copy(self, chunk) -> None:
        fetch = self.fetches[chunk.number]
        source, target = self.prefiller.runner.kv_cache, self.decoder.runner.kv_cache
        for ours, theirs in zip(source.layers, target.layers, strict=True):
            theirs[list(fetch.page_indices)] = ours[list(chunk.page_indices)]
        target.tail_hidden[fetch.tail_slot].copy_(source.tail_hidden[chunk.tail_slot])

    def scribble(self, attempts) -> None:
        """Late writes of failed or cancelled attempts: garbage into the pages that are theirs."""
        for attempt in attempts:
            for layer in self.decoder.runner.kv_cache.layers:
                layer[list(self.fetches[attempt].page_indices)] = 99.0

    def run(self, max_steps=2000) -> None:
        for _ in range(max_steps):
            busy = self.decoder.step() | self.prefiller.step()
            busy |= bool(self.finished_jobs)
            self.hand_over()
            if not busy:
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def check_balance(self) -> None:
        assert engine_balance(self.decoder.engine) == self.decoder.idle
        assert engine_balance(self.prefiller.engine) == self.prefiller.idle


# Undivided


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("budget", [1, 3, P, 2 * P, 512])
def test_every_prompt_length_gives_the_oracles_tokens(order, budget):
    replica = Replica(num_pages=150, order=order, max_batch_tokens=budget)
    prompts = [prompt_of(length, seed=length) for length in range(1, 4 * P + 3)]
    numbers = [replica.submit(prompt, 5) for prompt in prompts]
    replica.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert replica.tokens[number] == fake_greedy(CONFIG, prompt, 5), len(prompt)
        assert replica.ends[number] == (FinishReason.LENGTH, None)
    assert engine_balance(replica.engine) == replica.idle


def test_long_generations_in_too_small_a_pool_queue_and_all_finish():
    replica = Replica(num_pages=25)  # 10 pages each: room for two and a half
    prompts = [prompt_of(8, seed) for seed in range(4)]
    numbers = [replica.submit(prompt, 32) for prompt in prompts]
    replica.run(max_steps=70)
    for number, prompt in zip(numbers, prompts, strict=True):
        assert replica.tokens[number] == fake_greedy(CONFIG, prompt, 32)
    assert engine_balance(replica.engine) == replica.idle


def test_what_never_fits_is_refused_at_once_and_the_next_is_served():
    replica = Replica(num_pages=10)
    with pytest.raises(ValueError, match="at most 40 tokens"):
        replica.submit(prompt_of(33), 8)
    for wrong in ((), (97,), (-1,), prompt_of(64)):
        with pytest.raises(ValueError, match="expected"):
            replica.submit(wrong)
    number = replica.submit(prompt_of(3), 2)
    replica.run()
    assert replica.tokens == {number: fake_greedy(CONFIG, prompt_of(3), 2)}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("stop_at", [0, 1, 4])
def test_the_first_stop_ends_the_output(remote, length, max_tokens, stop_at):
    prompt = prompt_of(length, seed=3)
    eos = fake_greedy(CONFIG, prompt, 5)[stop_at]
    config = fake_config(eos_token_ids=(eos,))
    messenger = Messenger()
    replica = messenger.decoder if remote else Replica()
    replica.scheduler.model = config
    expected = fake_greedy(config, prompt, max_tokens)
    finish = FinishReason.STOP if expected[-1] == eos else FinishReason.LENGTH
    stopped = replica.submit(prompt, max_tokens)
    ignoring = replica.submit(prompt, max_tokens, ignore_eos=True)
    messenger.run() if remote else replica.run()
    assert replica.tokens[stopped] == expected
    assert replica.ends[stopped] == (finish, None)
    assert replica.tokens[ignoring] == fake_greedy(CONFIG, prompt, max_tokens)
    assert engine_balance(replica.engine) == replica.idle


def test_generation_goes_right_up_to_the_models_limit():
    replica = Replica()
    number = replica.submit(prompt_of(60), 100)
    replica.run()
    assert replica.tokens[number] == fake_greedy(CONFIG, prompt_of(60), 4)
    assert replica.ends[number] == (FinishReason.LENGTH, None)


def test_tokens_are_delivered_as_they_are_made():
    replica = Replica()
    number = replica.submit(prompt_of(3), 3)
    seen = []
    while replica.step():
        seen.append(len(replica.tokens.get(number, [])))
    assert seen == [1, 2, 3]


# Prefiller and decoder


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("budget", [1, 3, P, 2 * P, 512])
def test_a_split_gives_the_oracles_tokens_for_every_prompt_length(order, budget):
    messenger = Messenger(budget=budget, order=order)
    prompts = [prompt_of(length, seed=length) for length in range(1, 4 * P + 3)]
    numbers = [messenger.decoder.submit(prompt, 5) for prompt in prompts]
    messenger.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert messenger.decoder.tokens[number] == fake_greedy(CONFIG, prompt, 5), len(prompt)
    assert sorted(messenger.fetches) == list(range(1, len(prompts))), "N = 1 fetches nothing"
    assert messenger.prefiller.tokens == {}
    messenger.check_balance()


def test_the_tail_holds_the_hidden_state_before_the_last_prompt_token():
    messenger = Messenger(budget=3)
    for length in (2, 4, 5, 9):
        prompt = prompt_of(length)
        messenger.decoder.submit(prompt, 1)
        messenger.run()
        fetch = messenger.fetches[len(messenger.fetches)]
        hidden = messenger.decoder.runner.kv_cache.tail_hidden[fetch.tail_slot]
        assert torch.equal(hidden, fake_hidden(CONFIG, prompt)[length - 2])


def test_a_fetched_tail_slot_is_free_again_after_the_first_step_that_reads_it():
    messenger, number = lost_fetch(max_tokens=5)
    decoder = messenger.decoder
    assert engine_balance(decoder.engine).free_tail_slots == 3
    decoder.engine.post(KVEnded(attempt=1, transfer=MOVED))
    decoder.step()
    assert len(decoder.tokens[number]) == 1
    assert number not in decoder.ends
    assert engine_balance(decoder.engine).free_tail_slots == 4


def test_the_decoder_computes_only_the_last_prompt_token():
    messenger = Messenger()
    number = messenger.decoder.submit(prompt_of(9), 3)
    messenger.run()
    assert messenger.decoder.tokens[number] == fake_greedy(CONFIG, prompt_of(9), 3)
    assert messenger.decoder.runner.counter.read() == 3 * (CONFIG.num_layers + 1)


def test_chunks_are_announced_before_the_step_with_the_counter_at_its_start():
    messenger = Messenger(budget=P)
    replica = messenger.prefiller
    replica.submit(prompt_of(2), 1)  # another step before, and other tokens beside the chunks
    replica.run()
    calls = []
    replica.runner.model.before_layer = lambda layer: calls.append(len(messenger.steps))
    replica.submit(prompt_of(1), 9)
    replica.engine.post(StartPrefill(job=7, token_ids=prompt_of(9)))
    replica.run()
    chunks = [chunk for _, (chunk,) in messenger.steps]
    assert [base for base, _ in messenger.steps] == [3, 6, 9]
    assert calls[:6] == [1, 1, 2, 2, 3, 3], "a step ran before it was announced"
    assert [(c.number, c.first_token, len(c.token_ids)) for c in chunks] == [
        (7, 0, 3),
        (7, 3, 3),
        (7, 6, 2),
    ]
    assert [c.tail_slot is not None for c in chunks] == [False, False, True]
    assert [c.tail_slot is None for c in chunks] == [True, True, False]
    pages = chunks[-1].page_indices
    assert [c.page_indices for c in chunks] == [pages] * 3
    assert len(pages) == 2


def test_a_jobs_pages_stay_until_it_is_released():
    messenger = Messenger(num_pages=4, slots=1)
    replica = messenger.prefiller
    replica.engine.post(StartPrefill(job=1, token_ids=prompt_of(13)))
    replica.engine.post(StartPrefill(job=2, token_ids=prompt_of(9)))
    replica.run()
    assert [c.number for _, chunks in messenger.steps for c in chunks] == [1]
    assert engine_balance(replica.engine).free_pages == 1
    replica.engine.post(ReleasePrefill(job=1))
    replica.run()
    assert [c.number for _, chunks in messenger.steps for c in chunks] == [1, 2]
    replica.engine.post(ReleasePrefill(job=2))
    replica.run()
    messenger.check_balance()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_a_released_job_runs_no_further_chunk(num_steps):
    messenger = Messenger(budget=P)
    replica = messenger.prefiller
    replica.engine.post(StartPrefill(job=1, token_ids=prompt_of(12)))
    for _ in range(num_steps):
        replica.step()
    before = list(messenger.steps)
    replica.engine.post(ReleasePrefill(job=1))
    replica.run()
    assert messenger.steps == before
    messenger.check_balance()
    other = replica.submit(prompt_of(5), 3)
    replica.run()
    assert replica.tokens[other] == fake_greedy(CONFIG, prompt_of(5), 3)


def test_a_job_that_can_never_be_computed_is_refused_where_it_is_posted():
    replica = Replica(num_pages=2)
    for wrong in ((), (1,), (1, 97), prompt_of(10), prompt_of(64)):
        with pytest.raises(ValueError, match=r"expected|leaves nothing"):
            replica.engine.post(StartPrefill(job=1, token_ids=wrong))
    assert not replica.step()


# Times


class Clock:
    """Every layer of `replica` takes a second."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def tick(self, layer=0):
        self.now += 1.0


def seconds(output):
    times = output.timings
    return times.queue, times.prefill, times.first_token


def test_times_of_a_request_that_is_computed_here():
    clock = Clock()
    replica = Replica(max_batch_tokens=4, clock=clock)
    replica.runner.model.before_layer = clock.tick
    number = replica.submit(prompt_of(9), 3)
    clock.now += 5
    replica.run()
    last = replica.last[number]
    assert seconds(last) == (5, 6, 11)
    assert (last.timings.inter_token_mean, last.timings.inter_token_p99) == (2, 2)
    assert (last.timings.transfer, last.transfer) == (None, None)


def test_times_and_what_was_moved_of_a_request_that_is_fetched():
    clock = Clock()
    messenger = Messenger(lose=True, clock=clock)
    replica = messenger.decoder
    replica.runner.model.before_layer = clock.tick
    number = replica.submit(prompt_of(9), 1)
    clock.now += 3
    replica.run()
    clock.now += 7
    replica.engine.post(KVEnded(attempt=1, transfer=MOVED))
    replica.run()
    last = replica.last[number]
    assert seconds(last) == (3, 7, 12)
    assert (last.timings.transfer, last.transfer) == (0.5, MOVED)
    assert last.timings.inter_token_mean is None


def test_a_failed_attempt_is_part_of_the_prefill_and_moved_nothing():
    clock = Clock()
    messenger = Messenger(lose=True, clock=clock)
    replica = messenger.decoder
    replica.runner.model.before_layer = clock.tick
    number = replica.submit(prompt_of(9), 1)
    replica.run()
    clock.now += 7
    replica.engine.post(KVFailed(attempt=1, why="gone", then="local"))
    replica.run()
    assert seconds(replica.last[number]) == (0, 9, 9)
    assert replica.last[number].transfer is None


def test_times_of_a_request_that_never_began():
    replica = Replica(num_pages=4)
    replica.submit(prompt_of(9), 5)
    number = replica.submit(prompt_of(9), 5)
    replica.step()
    replica.engine.cancel(number)
    replica.step()
    assert seconds(replica.last[number]) == (None, None, None)


def test_the_p99_is_the_smallest_that_99_in_100_do_not_exceed():
    for gaps, expected in (([3.0], 3), ([1.0] * 99 + [9.0], 1), ([1.0] * 98 + [9.0] * 2, 9)):
        watch = Stopwatch()
        for now in itertools.accumulate(gaps, initial=0.0):
            watch.on_token(now)
        assert watch.timings(None).inter_token_p99 == expected


# Failures and cancels


def lost_fetch(length=9, max_tokens=4, **options):
    """A decoder with one request whose fetch nobody has passed on; (messenger, number)."""
    messenger = Messenger(lose=True, **options)
    number = messenger.decoder.submit(prompt_of(length), max_tokens)
    messenger.decoder.run()
    assert sorted(messenger.fetches) == [1]
    return messenger, number


def test_a_failed_fetch_is_computed_here_in_fresh_pages():
    messenger, number = lost_fetch()
    messenger.decoder.engine.post(KVFailed(attempt=1, why="gone", then="local"))
    for _ in range(20):
        messenger.scribble([1])
        messenger.decoder.step()
    assert messenger.decoder.tokens[number] == fake_greedy(CONFIG, prompt_of(9), 4)
    stats = engine_balance(messenger.decoder.engine)
    assert (stats.free_pages, stats.free_tail_slots) == (36, 3), "the attempt's pages and slot"
    assert stats.open_attempts == 1
    assert sorted(messenger.fetches) == [1]
    messenger.decoder.engine.post(KVEnded(attempt=1))
    messenger.run()
    messenger.check_balance()


def test_a_failed_fetch_is_fetched_again_under_a_new_number():
    messenger, number = lost_fetch()
    messenger.lose = False
    messenger.decoder.engine.post(KVFailed(attempt=1, why="gone", then="retry"))
    messenger.run()
    messenger.scribble([1])
    assert messenger.decoder.tokens[number] == fake_greedy(CONFIG, prompt_of(9), 4)
    first, second = messenger.fetches[1], messenger.fetches[2]
    assert (first.retries, second.retries) == (0, 1)
    assert not set(first.page_indices) & set(second.page_indices)
    assert first.tail_slot != second.tail_slot
    messenger.decoder.engine.post(KVEnded(attempt=1))
    messenger.run()
    messenger.check_balance()


def test_attempts_of_two_engines_have_different_numbers():
    attempts = [Attempts(fake_scheduler(CacheConfig(num_pages=1)), None) for _ in range(2)]
    assert len({next(each._numbers) >> 20 for each in attempts}) == 2


def test_a_failed_fetch_can_fail_the_request_with_its_cause():
    messenger, number = lost_fetch()
    messenger.decoder.engine.post(KVFailed(attempt=1, why="gone", then="fail"))
    messenger.run()
    assert messenger.decoder.ends == {number: (FinishReason.ERROR, "gone")}
    assert engine_balance(messenger.decoder.engine).free_pages == 36
    messenger.decoder.engine.post(KVEnded(attempt=1))
    messenger.run()
    messenger.check_balance()


@pytest.mark.parametrize("then", ["local", "retry"])
def test_a_retry_that_does_not_fit_beside_the_old_pages_waits(then):
    messenger, number = lost_fetch(num_pages=5)
    messenger.lose = False
    messenger.decoder.engine.post(KVFailed(attempt=1, why="gone", then=then))
    messenger.run()
    assert messenger.decoder.ends == {}
    messenger.decoder.engine.post(KVEnded(attempt=1))
    messenger.run()
    assert messenger.decoder.tokens[number] == fake_greedy(CONFIG, prompt_of(9), 4)
    messenger.check_balance()


@pytest.mark.parametrize("then", ["local", "retry"])
@pytest.mark.parametrize("limit", [{"num_pages": 5}, {"slots": 1}])
def test_what_does_not_fit_beside_stuck_pages_ends_and_the_rest_goes_on(then, limit):
    messenger, number = lost_fetch(**limit)
    messenger.lose = False
    decoder = messenger.decoder
    needs_slot = "slots" in limit
    decoder.engine.post(KVFailed(attempt=1, why="gone", then=then))
    small = decoder.submit(prompt_of(1 if needs_slot else 2), 2)
    messenger.run()
    hopeless = [] if needs_slot and then == "local" else [number]
    assert not set(decoder.ends) & set(hopeless), "not even waited"
    decoder.engine.post(KVStuck(attempt=1))
    messenger.run()
    late = decoder.submit(prompt_of(9), 4)
    messenger.run()
    for ended in (*hopeless, late):
        finish, why = decoder.ends[ended]
        assert finish is FinishReason.ERROR and "a prefiller hangs" in why
    assert decoder.ends[small][0] is FinishReason.LENGTH, "others wait behind it"
    messenger.scribble([1])
    decoder.engine.post(KVEnded(attempt=1))
    after = decoder.submit(prompt_of(9), 4)
    messenger.run()
    assert decoder.tokens[after] == fake_greedy(CONFIG, prompt_of(9), 4)
    messenger.check_balance()


@pytest.mark.parametrize("moved", [None, MOVED])
def test_a_cancel_while_fetching_answers_at_once_and_keeps_the_pages(moved):
    messenger, number = lost_fetch()
    engine = messenger.decoder.engine
    engine.cancel(number)
    engine.cancel(number)
    messenger.decoder.step()
    assert messenger.decoder.ends == {number: (FinishReason.CANCELLED, None)}
    assert messenger.cancelled == [1]
    assert engine_balance(engine).free_pages == 36
    for then in get_args(OnFailure):
        engine.post(KVFailed(attempt=1, why="gone", then=then))
        messenger.decoder.run()
        assert engine_balance(engine).free_pages == 36
    engine.post(KVEnded(attempt=1, transfer=moved))
    messenger.run()
    messenger.check_balance()


def test_an_end_without_kv_of_what_is_still_waited_for_is_an_error():
    messenger, _ = lost_fetch()
    messenger.decoder.engine.post(KVEnded(attempt=1))
    with pytest.raises(AssertionError, match=r"attempt=1.* still waited for"):
        messenger.decoder.step()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_a_cancel_at_any_step_restores_the_balance(num_steps):
    replica = Replica(max_batch_tokens=P)
    other = replica.submit(prompt_of(3), 12)
    number = replica.submit(prompt_of(9), 3)
    for _ in range(num_steps):
        replica.step()
    finished = number in replica.ends
    replica.engine.cancel(number)
    replica.engine.cancel(number + 100)
    replica.run()
    replica.engine.cancel(number)
    replica.run()
    expected = FinishReason.LENGTH if finished else FinishReason.CANCELLED
    assert replica.ends[number] == (expected, None)
    assert replica.tokens[other] == fake_greedy(CONFIG, prompt_of(3), 12)
    assert engine_balance(replica.engine) == replica.idle
    assert finished == (num_steps >= 6)


def test_a_cancel_of_one_that_waits_for_pages():
    replica = Replica(num_pages=4)
    first = replica.submit(prompt_of(9), 4)
    second = replica.submit(prompt_of(9), 4)
    replica.step()
    replica.engine.cancel(second)
    replica.run()
    assert replica.tokens[first] == fake_greedy(CONFIG, prompt_of(9), 4)
    assert replica.ends[second] == (FinishReason.CANCELLED, None)
    assert engine_balance(replica.engine) == replica.idle


ACTIONS = st.sampled_from(
    ["submit", "submit", "submit", "cancel", "fail", "release", "prefill", "hand over", "decode"]
)


@settings(deadline=None, max_examples=100)
@given(actions=st.lists(ACTIONS, max_size=80), random=st.randoms(use_true_random=False))
def test_random_failures_cancels_and_late_writes_leave_the_others_right(actions, random):
    """Attempts end in every way at every moment; until released, garbage lands in their pages."""
    messenger = Messenger(budget=5, num_pages=16, slots=3)
    decoder, prefiller = messenger.decoder, messenger.prefiller
    prompts: dict[int, tuple[int, ...]] = {}
    failed: set[int] = set()
    handed_over: set[int] = set()
    released: set[int] = set()

    def unreleased() -> list[int]:
        return sorted({*failed, *messenger.cancelled} - released - handed_over)

    def live() -> list[int]:
        return sorted({*messenger.fetches} - {*failed, *messenger.cancelled} - handed_over)

    def act(action: str) -> None:
        messenger.scribble(unreleased())
        if action == "submit":
            prompt = prompt_of(random.randint(1, 14), seed=random.randint(0, 99))
            prompts[decoder.submit(prompt, random.randint(1, 6))] = prompt
        elif action == "cancel" and prompts:
            decoder.engine.cancel(random.choice(list(prompts)))
        elif action == "fail" and live():
            attempt = random.choice(live())
            then = random.choice(get_args(OnFailure))
            decoder.engine.post(KVFailed(attempt=attempt, why="test", then=then))
            failed.add(attempt)
        elif action == "release" and unreleased():
            attempt = random.choice(unreleased())
            prefiller.engine.post(ReleasePrefill(job=attempt))
            decoder.engine.post(KVEnded(attempt=attempt))
            released.add(attempt)
        elif action == "hand over":
            done = [chunk for chunk in messenger.finished_jobs if chunk.number in live()]
            messenger.finished_jobs = done
            handed_over.update(chunk.number for chunk in done)
            messenger.hand_over()
        elif action == "prefill":
            prefiller.step()
        elif action == "decode":
            decoder.step()

    for action in actions:
        act(action)
    for _ in range(500):
        for action in ("prefill", "hand over", "decode", "release"):
            act(action)
        if {*prompts} == {*decoder.ends} and not unreleased():
            break
    decoder.run()
    prefiller.run()
    messenger.check_balance()
    assert {*prompts} == {*decoder.ends}
    for number, (finish, _) in decoder.ends.items():
        tokens = decoder.tokens[number]
        assert tokens or finish in (FinishReason.CANCELLED, FinishReason.ERROR)
        assert not tokens or tokens == fake_greedy(CONFIG, prompts[number], len(tokens))


# A real model, against transformers


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama and 5 greedy tokens of transformers for a prompt of each length 1..4P+2."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("llama"))
    prompts = [tuple((7 * i * i + n) % 128 for i in range(n)) for n in range(1, 4 * P + 3)]
    return folder, [(prompt, greedy(folder, prompt, 5)) for prompt in prompts]


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("budget", [1, 3, P, 2 * P, 512])
@pytest.mark.parametrize("split", [False, True])
def test_a_llama_gives_the_tokens_of_transformers(llama, split, budget, order):
    folder, oracle = llama
    model = loaded(folder, "float32")

    def make_runner(cache: CacheConfig) -> Runner:
        kv_cache = KVCache(cache, [model.config])
        attention = TorchPagedAttention(
            kv_cache.layouts[0], group_size=model.group_size, dtype=torch.float32
        )
        return Runner(model, attention, kv_cache, LayerCounter())

    same = {"make_runner": make_runner, "order": order, "num_pages": 150}
    messenger = Messenger(budget=budget, **same)
    replica = messenger.decoder if split else Replica(max_batch_tokens=budget, **same)
    numbers = [replica.submit(prompt, 5) for prompt, _ in oracle]
    (messenger if split else replica).run()
    for number, (prompt, expected) in zip(numbers, oracle, strict=True):
        assert replica.tokens[number] == expected, f"prompt of {len(prompt)}"
    assert len(messenger.fetches) == (len(oracle) - 1 if split else 0)
    messenger.check_balance()


# The thread, and the end


@pytest.mark.timeout(20)
def test_requests_from_other_threads_wake_the_idle_engine():
    replica = Replica()
    done = threading.Event()
    on_output = replica.on_output

    def note(number, output) -> None:
        on_output(number, output)
        if len(replica.ends) == 6:
            done.set()

    replica.on_output = note
    thread = threading.Thread(target=replica.engine.run_forever, daemon=True)
    thread.start()
    clients = [
        threading.Thread(target=replica.submit, args=(prompt_of(5, seed), 3)) for seed in range(6)
    ]
    for client in clients:
        client.start()
    assert done.wait(10)
    answers = sorted(replica.tokens.values())
    assert answers == sorted(fake_greedy(CONFIG, prompt_of(5, seed), 3) for seed in range(6))
    assert engine_balance(replica.engine) == replica.idle
    replica.engine.stop()
    replica.engine.stop()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="was stopped"):
        replica.submit(prompt_of(3))


def test_after_a_stop_nothing_is_handled():
    messenger, number = lost_fetch()
    engine = messenger.decoder.engine
    engine.stop()
    engine.cancel(number)
    engine.post(KVFailed(attempt=1, why="gone", then="fail"))
    engine.run_forever()
    assert messenger.decoder.ends == {number: (FinishReason.ERROR, "the engine was stopped")}
    assert messenger.cancelled == []


def test_a_stop_answers_what_is_open():
    replica = Replica()
    number = replica.submit(prompt_of(3), 9)
    replica.step()
    waiting = replica.submit(prompt_of(3), 9)
    replica.engine.stop()
    replica.engine.run_forever()
    assert replica.tokens[number] == fake_greedy(CONFIG, prompt_of(3), 1)
    for request in (number, waiting):
        assert replica.ends[request] == (FinishReason.ERROR, "the engine was stopped")
    assert engine_balance(replica.engine).open_requests == 0


@pytest.mark.parametrize("where", ["model", "hooks", "counter"])
def test_a_step_that_raises_ends_the_engine_and_answers_everybody(where):
    messenger = Messenger()
    replica = messenger.prefiller
    open_requests = [replica.submit(prompt_of(3), 9) for _ in range(3)]
    replica.step()

    def fail(*_):
        raise OSError("broken")

    if where == "model":
        replica.runner.model.before_layer = fail
    elif where == "hooks":
        messenger.on_step_scheduled = fail
        replica.engine.post(StartPrefill(job=1, token_ids=prompt_of(4)))
    else:
        replica.runner.model.before_layer = lambda layer: replica.runner.counter.add()
    waiting = replica.submit(prompt_of(3), 9)
    with pytest.raises((OSError, AssertionError)):
        replica.engine.run_forever()
    for number in (*open_requests, waiting):
        finish, error = replica.ends[number]
        assert finish is FinishReason.ERROR
        assert "broken" in error or "must add 3 to the counter, this added 5" in error
    with pytest.raises(RuntimeError, match="takes no more requests: a step failed"):
        replica.submit(prompt_of(3))
    with pytest.raises(RuntimeError, match="runs no more steps: a step failed"):
        replica.engine.step()
