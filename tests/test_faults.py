"""What users of split prefill and decode run into, done on purpose to whole nodes.

Every case ends the same way: the tokens of all who were answered are those of transformers, and
pages, tail slots, requests and attempts are the same as before on both sides.
"""

import itertools
import random
import threading
import time

import pytest

from disagg.request import FinishReason
from disagg.transfer.interface import TransferError
from disagg.transfer.transfer_engine import TransferEngine
from tests.balance import engine_balance
from tests.engines import in_halves, shm_medium
from tests.nodes import (
    DEADLINE_SECONDS,
    HeldNode,
    Oracle,
    P,
    ask,
    balance_of,
    node_config,
    pair,
    prompt_of,
    tokens_of,
    wait_until,
)
from tests.prefiller_process import Moment, prefiller_process
from tests.tiny_models import make_tiny_llama

NUM_LAYERS = 4
MAX_TOKENS = 5

#: Three chunks of two pages each.
PROMPT = prompt_of(6 * P)
CHUNK = 2 * P

TIMES = [20, pytest.param(50, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_llama(folder, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


class Gate:
    """Holds the thread that comes through after `close()`, until `open()`."""

    def __init__(self):
        self._opened = threading.Event()
        self._opened.set()
        self._arrived = threading.Event()

    def __call__(self):
        if not self._opened.is_set():
            self._arrived.set()
            assert self._opened.wait(DEADLINE_SECONDS), "the gate was never opened"

    def close(self):
        self._arrived.clear()
        self._opened.clear()

    def wait_for_arrival(self):
        assert self._arrived.wait(DEADLINE_SECONDS), "nobody came to the gate"

    def open(self):
        self._opened.set()


class LayerGate(Gate):
    """The gate before a layer of a step, counted from the last `close_at`."""

    def __init__(self):
        super().__init__()
        self._step = self._layer = self._steps = 0

    def close_at(self, step, layer):
        self._step, self._layer, self._steps = step, layer, 0
        self.close()

    def before_layer(self, layer):
        if (self._steps, layer) == (self._step, self._layer):
            self()
        self._steps += layer == NUM_LAYERS


class HeldShm(TransferEngine):
    """Calls `before_poll`, `inside` in the middle of each copy, `on_write` before each write."""

    def __init__(self, *, before_poll=None, inside=None, on_write=None):
        super().__init__([shm_medium(in_halves(inside or (lambda: None)))])
        self.before_poll = before_poll or (lambda: None)
        self.on_write = on_write or (lambda: None)

    def poll(self, timeout):
        self.before_poll()
        return super().poll(timeout)

    def write_pages(self, *arguments):
        self.on_write()
        return super().write_pages(*arguments)


def is_cancelled(handle):
    return handle.result(DEADLINE_SECONDS).finish_reason is FinishReason.CANCELLED


def error_of(handle):
    done = handle.result(DEADLINE_SECONDS)
    assert done.finish_reason is FinishReason.ERROR, done
    return done.error


# --- Cancels ---


@pytest.mark.parametrize("times", TIMES)
def test_cancel_while_queued(model, oracle, times):
    gate, others = LayerGate(), prompt_of(9)
    with pair(model, hold_prefiller={"before_layer": gate.before_layer}) as nodes:
        for _ in range(times):
            gate.close_at(0, 1)
            first = ask(nodes.decoder, others, MAX_TOKENS)
            gate.wait_for_arrival()
            queued = ask(nodes.decoder, PROMPT, MAX_TOKENS)
            wait_until(lambda: len(nodes.prefiller._messenger._attempts) == 2)
            queued.cancel()
            assert is_cancelled(queued)
            gate.open()
            assert tokens_of(first) == oracle(others, MAX_TOKENS)
            nodes.wait_for_balance()
        assert tokens_of(ask(nodes.decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)


@pytest.mark.parametrize("times", TIMES)
def test_cancel_between_chunks(model, oracle, times):
    """Also in the middle of a chunk, at every layer in turn."""
    gate = LayerGate()
    hold = {"before_layer": gate.before_layer}
    with pair(model, max_batch_tokens=CHUNK, hold_prefiller=hold) as nodes:
        for i in range(times):
            gate.close_at(1, i % (NUM_LAYERS + 1))
            handle = ask(nodes.decoder, PROMPT, MAX_TOKENS)
            gate.wait_for_arrival()
            handle.cancel()
            assert is_cancelled(handle)
            gate.open()
            nodes.wait_for_balance()
        assert tokens_of(ask(nodes.decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)


@pytest.mark.parametrize("times", TIMES)
def test_cancel_in_the_middle_of_a_copy(model, oracle, times):
    gate = Gate()
    hold = {"make_transfer": lambda: HeldShm(inside=gate)}
    with pair(model, max_batch_tokens=CHUNK, hold_prefiller=hold) as nodes:
        for _ in range(times):
            gate.close()
            handle = ask(nodes.decoder, PROMPT, MAX_TOKENS)
            gate.wait_for_arrival()
            handle.cancel()
            assert is_cancelled(handle)
            # The copy is not over, so its pages are nobody else's yet.
            assert engine_balance(nodes.decoder._engine).open_attempts == 1
            gate.open()
            nodes.wait_for_balance()
        assert tokens_of(ask(nodes.decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)


@pytest.mark.parametrize("times", TIMES)
def test_cancel_after_the_last_write(model, oracle, times):
    """The prefiller is done and has forgotten the attempt; the decoder has not looked yet."""
    gate = Gate()
    hold = {"make_transfer": lambda: HeldShm(before_poll=gate)}
    with pair(model, hold_decoder=hold) as nodes:
        for _ in range(times):
            wrote = nodes.prefiller._counter.read()
            handle = ask(nodes.decoder, PROMPT, MAX_TOKENS)
            wait_until(lambda wrote=wrote: nodes.prefiller._counter.read() > wrote)
            gate.close()
            wait_until(lambda: balance_of(nodes.prefiller) == nodes.at_start[:2])
            handle.cancel()
            gate.open()
            done = handle.result(DEADLINE_SECONDS)
            # Whether it won the race or not: the answer is right as far as it goes.
            assert done.token_ids == oracle(PROMPT, MAX_TOKENS)[: len(done.token_ids)]
            nodes.wait_for_balance()
        assert tokens_of(ask(nodes.decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)


def test_cancel_while_decoding(model, oracle):
    with pair(model) as nodes:
        for count in range(1, 20):
            handle = ask(nodes.decoder, PROMPT, 100)
            while len(handle._token_ids) < count:
                handle.wait(DEADLINE_SECONDS)
            handle.cancel()
            done = handle.result(DEADLINE_SECONDS)
            assert done.finish_reason is FinishReason.CANCELLED
            assert len(done.token_ids) >= count
            assert done.token_ids == oracle(PROMPT, 100)[: len(done.token_ids)]
            nodes.wait_for_balance()


def test_needless_cancels_are_harmless(model, oracle):
    """Before anything was sent, twice, after the end, of a number that never was."""
    with pair(model) as nodes:
        other = ask(nodes.decoder, prompt_of(13), 60)
        for _ in range(30):
            handle = ask(nodes.decoder, PROMPT, MAX_TOKENS)
            handle.cancel()
            handle.cancel()
            nodes.decoder._engine.cancel(10**9)
            assert is_cancelled(handle)
            handle.cancel()
        assert tokens_of(other) == oracle(prompt_of(13), 60)
        finished = ask(nodes.decoder, PROMPT, MAX_TOKENS)
        assert tokens_of(finished) == oracle(PROMPT, MAX_TOKENS)
        finished.cancel()
        nodes.wait_for_balance()
        assert tokens_of(finished) == oracle(PROMPT, MAX_TOKENS)


# --- Peers that die, restart, stop ---


@pytest.mark.parametrize("on_failure", ["fail", "local", "retry"])
def test_a_prefiller_killed_after_half_of_the_layers(model, oracle, on_failure):
    half = Moment(step=1, layer=NUM_LAYERS // 2)
    with prefiller_process(model, moment=half, max_batch_tokens=CHUNK) as dying:
        config = node_config(model, prefillers=(dying.address,), on_failure=on_failure)
        with HeldNode(config) as decoder:
            before = balance_of(decoder)
            handle = ask(decoder, PROMPT, MAX_TOKENS)
            dying.wait_until_held()
            dying.kill()
            with prefiller_process(model, address=dying.address) as restarted:
                if on_failure == "fail":
                    assert "prefiller lost" in error_of(handle)
                else:
                    assert tokens_of(handle) == oracle(PROMPT, MAX_TOKENS)
                wait_until(lambda: balance_of(decoder) == before)
                wait_until_connected(decoder)
                for n in range(2, 7):
                    handle = ask(decoder, prompt_of(n), MAX_TOKENS)
                    assert tokens_of(handle) == oracle(prompt_of(n), MAX_TOKENS)
                wait_until(lambda: balance_of(decoder) == before)
                restarted.wait_for_balance()


def wait_until_connected(decoder, count=1):
    wait_until(lambda: len(decoder._messenger._greeted) == count)


def test_requests_while_a_prefiller_restarts(model, oracle):
    """Retried until it is back, on the same port; no request is computed on the decoder."""
    with prefiller_process(model) as first:
        config = node_config(model, prefillers=(first.address,), on_failure="retry")
        with HeldNode(config) as decoder:
            before = balance_of(decoder)
            assert tokens_of(ask(decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)
            first.kill()
            wait_until_connected(decoder, count=0)
            handles = [ask(decoder, prompt_of(n), MAX_TOKENS) for n in range(10, 15)]
            computed = decoder._counter.read()
            with prefiller_process(model, address=first.address) as second:
                for n, handle in zip(range(10, 15), handles, strict=True):
                    assert tokens_of(handle) == oracle(prompt_of(n), MAX_TOKENS)
                second.wait_for_balance()
            # Decode steps only: five requests in lockstep or one after the other.
            steps = (decoder._counter.read() - computed) // (NUM_LAYERS + 1)
            assert MAX_TOKENS <= steps <= 5 * MAX_TOKENS
            wait_until(lambda: balance_of(decoder) == before)


def test_another_prefiller_takes_over(model, oracle):
    with (
        prefiller_process(model, moment=Moment(step=0, layer=2)) as dying,
        prefiller_process(model) as healthy,
    ):
        both = (dying.address, healthy.address)
        with HeldNode(node_config(model, prefillers=both, on_failure="retry")) as decoder:
            before = balance_of(decoder)
            handle = ask(decoder, PROMPT, MAX_TOKENS)
            dying.wait_until_held()
            dying.kill()
            assert tokens_of(handle) == oracle(PROMPT, MAX_TOKENS)
            assert tokens_of(ask(decoder, PROMPT[:7], 9)) == oracle(PROMPT[:7], 9)
            wait_until(lambda: balance_of(decoder) == before)
            healthy.wait_for_balance()


@pytest.mark.parametrize("on_failure", ["fail", "local", "retry"])
@pytest.mark.parametrize("nth", [NUM_LAYERS // 2, 7])
def test_a_write_that_is_rejected(model, oracle, nth, on_failure):
    """In the first chunk at half of the layers, and in the second: never half of the KV is used."""
    numbers = itertools.count(1)

    def reject():
        if next(numbers) == nth:
            raise TransferError("the send queue is full")

    hold = {"make_transfer": lambda: HeldShm(on_write=reject)}
    settings = {"max_batch_tokens": CHUNK, "on_failure": on_failure}
    with pair(model, hold_prefiller=hold, **settings) as nodes:
        handle = ask(nodes.decoder, PROMPT, MAX_TOKENS)
        if on_failure == "fail":
            assert error_of(handle) == "the send queue is full"
        else:
            assert tokens_of(handle) == oracle(PROMPT, MAX_TOKENS)
        nodes.wait_for_balance()
        assert tokens_of(ask(nodes.decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)
        nodes.wait_for_balance()
    assert next(numbers) > nth


def test_a_queue_is_not_silence(model, oracle):
    """Three seconds of work are asked of a prefiller at once; half as long a silence is death."""
    hold = {"before_layer": lambda layer: time.sleep(0.025)}
    settings = {"max_batch_tokens": 3 * P, "num_tail_slots": 2, "on_failure": "fail"}
    with pair(model, hold_prefiller=hold, peer_timeout=1.5, **settings) as nodes:
        prompts = [prompt_of(3 * P, seed) for seed in range(24)]
        handles = [ask(nodes.decoder, prompt, 3) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            assert tokens_of(handle) == oracle(prompt, 3)
        nodes.wait_for_balance()


@pytest.mark.parametrize("on_failure", ["fail", "local"])
def test_a_prefiller_that_beats_but_does_not_compute(model, oracle, on_failure):
    """The request's age ends the wait; its pages come back when the prefiller goes on."""
    gate = LayerGate()
    hold = {"before_layer": gate.before_layer}
    settings = {"request_timeout": 1.0, "on_failure": on_failure}
    with pair(model, hold_prefiller=hold, **settings) as nodes:
        gate.close_at(0, 2)
        handle = ask(nodes.decoder, PROMPT, MAX_TOKENS)
        gate.wait_for_arrival()
        if on_failure == "fail":
            assert "no KV after 1.0 s (request_timeout)" in error_of(handle)
        else:
            assert tokens_of(handle) == oracle(PROMPT, MAX_TOKENS)
        gate.open()
        nodes.wait_for_balance()
        assert tokens_of(ask(nodes.decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)


@pytest.mark.parametrize("then", ["woken", "killed", "never"])
def test_a_prefiller_stopped_in_the_middle_of_a_copy(model, oracle, then):
    """Its process could go on writing at any time, so until it cannot, nobody gets the pages."""
    with prefiller_process(model, moment=Moment(copy=1), max_batch_tokens=CHUNK) as stopped:
        settings = {"peer_timeout": 1.5, "on_failure": "local", "num_pages": 20}
        with HeldNode(node_config(model, prefillers=(stopped.address,), **settings)) as decoder:
            before = balance_of(decoder)
            handle = ask(decoder, PROMPT, MAX_TOKENS)
            stopped.wait_until_stopped()
            start = time.monotonic()
            handle.cancel()
            assert is_cancelled(handle)
            assert time.monotonic() - start < 1.0, "a cancel waits for nobody"
            # Asked of the stopped prefiller, failed by its silence, computed here.
            caught = ask(decoder, prompt_of(9), MAX_TOKENS)
            assert tokens_of(caught) == oracle(prompt_of(9), MAX_TOKENS)
            for n in range(2, 6):
                served = ask(decoder, prompt_of(n), MAX_TOKENS)
                assert tokens_of(served) == oracle(prompt_of(n), MAX_TOKENS)
            quarantined = before[0].free_pages - engine_balance(decoder._engine).free_pages
            # Those of the cancelled request and of the caught one.
            assert quarantined == -(-(len(PROMPT) + MAX_TOKENS) // P) + -(-(9 + MAX_TOKENS) // P)
            if then == "never":
                return
            # Does not fit beside them: it waits, and is served when they come back.
            waiting = ask(decoder, prompt_of(50), MAX_TOKENS)
            other = ask(decoder, (3,), MAX_TOKENS)
            if then == "woken":
                stopped.wake()
            else:
                stopped.kill()
            assert tokens_of(waiting) == oracle(prompt_of(50), MAX_TOKENS)
            assert tokens_of(other) == oracle((3,), MAX_TOKENS)
            wait_until(lambda: balance_of(decoder) == before)
            if then == "woken":
                wait_until_connected(decoder)
                again = ask(decoder, PROMPT, MAX_TOKENS)
                assert tokens_of(again) == oracle(PROMPT, MAX_TOKENS)
                stopped.wait_for_balance()
                wait_until(lambda: balance_of(decoder) == before)


# --- What arrives, and where ---


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("starved", [False, True])
def test_what_arrives_is_what_was_computed(model, oracle, starved, kv_layout):
    """The forward pass sleeps before each layer's KV is written, so a page sent early is stale."""
    prompt = prompt_of(14)
    hold = {"before_layer": lambda layer: time.sleep(0.003)}
    if starved:
        hold["make_transfer"] = lambda: HeldShm(before_poll=lambda: time.sleep(0.05))
    with pair(model, max_batch_tokens=P, kv_layout=kv_layout, hold_prefiller=hold) as nodes:
        places = record_places(nodes)
        assert tokens_of(ask(nodes.decoder, prompt, 1)) == oracle(prompt, 1)
        nodes.wait_for_balance()
        (sent, tail), (fetched, slot) = places["sent"], places["fetched"]
        axis = 2 if kv_layout == "HND" else 1
        for page, (source, destination) in enumerate(zip(sent, fetched, strict=True)):
            # Positions 0..12 travel; on the last page the decoder has added position 13.
            count = min(P, 13 - P * page)
            for ours, theirs in zip(
                nodes.prefiller._kv_caches[0].layers,
                nodes.decoder._kv_caches[0].layers,
                strict=True,
            ):
                kv = ours[source].narrow(axis, 0, count)
                assert kv.abs().min() > 0
                assert kv.equal(theirs[destination].narrow(axis, 0, count))
        hidden = nodes.prefiller._kv_caches[0].tail_hidden[tail]
        assert hidden.abs().min() > 0
        assert hidden.equal(nodes.decoder._kv_caches[0].tail_hidden[slot])


def record_places(nodes):
    """Will hold the pages and the tail slot of a prompt, where it is sent from and fetched to."""
    places = {}
    on_step = nodes.prefiller._messenger.on_step_scheduled
    on_fetch = nodes.decoder._messenger.on_fetch

    def step(base, chunks):
        if chunks[0].tail_slot is not None:
            places["sent"] = chunks[0].page_indices, chunks[0].tail_slot
        on_step(base, chunks)

    def fetch(fetch):
        places["fetched"] = fetch.page_indices, fetch.tail_slot
        on_fetch(fetch)

    nodes.prefiller._messenger.on_step_scheduled = step
    nodes.decoder._messenger.on_fetch = fetch
    return places


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]


@pytest.mark.parametrize("seed", SEEDS)
def test_few_tail_slots_many_requests_random_cancels(model, oracle, seed):
    rng = random.Random(seed)
    with pair(model, num_tail_slots=2, max_batch_tokens=CHUNK, num_pages=300) as nodes:
        wanted = [(prompt_of(rng.randint(2, 30), 100 * seed + i), 6) for i in range(32)]
        handles = []
        doomed = set(rng.sample(range(32), 10))
        for i, request in enumerate(wanted):
            handles.append(ask(nodes.decoder, *request))
            for victim in doomed & set(range(i)):
                if rng.random() < 0.1:
                    handles[victim].cancel()
        for victim in doomed:
            handles[victim].cancel()
        for i, (request, handle) in enumerate(zip(wanted, handles, strict=True)):
            if i in doomed:
                done = handle.result(DEADLINE_SECONDS)
                assert done.token_ids == oracle(*request)[: len(done.token_ids)]
            else:
                assert tokens_of(handle) == oracle(*request)
        nodes.wait_for_balance()


# --- Pairs that cannot work, requests that cannot fit ---


def test_a_mismatch_is_refused_at_connect(model, oracle, tmp_path):
    """By field, with both values; the prefiller serves the next one that fits."""
    other = make_tiny_llama(tmp_path / "other", num_hidden_layers=NUM_LAYERS, seed=1)
    deeper = make_tiny_llama(tmp_path / "deeper", num_hidden_layers=NUM_LAYERS + 1)
    with HeldNode(node_config(model, listen=("127.0.0.1", 0))) as prefiller:
        before = balance_of(prefiller)
        for folder, settings, why in (
            (model, {"dtype": "bfloat16"}, "dtype differs: prefiller float32, decoder bfloat16"),
            (model, {"page_size": 8}, "page_size differs: prefiller 4, decoder 8"),
            (model, {"kv_layout": "NHD"}, "kv_layout differs: prefiller HND, decoder NHD"),
            (other, {}, "fingerprint differs: prefiller [0-9a-f]{32}, decoder [0-9a-f]{32}"),
            (deeper, {}, "model_fingerprint differs"),
        ):
            config = node_config(folder, prefillers=(prefiller.address,), **settings)
            start = time.monotonic()
            with pytest.raises(ValueError, match=why):
                HeldNode(config)
            assert time.monotonic() - start < 3.0
        with HeldNode(node_config(model, prefillers=(prefiller.address,))) as decoder:
            assert tokens_of(ask(decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)
        wait_until(lambda: balance_of(prefiller) == before)


def test_a_pool_for_two_and_a_half_requests(model, oracle):
    with pair(model, decoder={"num_pages": 37}) as nodes:
        prompts = [prompt_of(20, seed) for seed in range(4)]
        handles = [ask(nodes.decoder, prompt, 40) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            assert tokens_of(handle) == oracle(prompt, 40)
        nodes.wait_for_balance()


def test_a_prompt_that_fills_the_pool(model, oracle):
    with pair(model, decoder={"num_pages": 2}) as nodes:
        with pytest.raises(ValueError, match="too large for the KV cache; expected at most 8"):
            ask(nodes.decoder, prompt_of(8), 2)
        assert tokens_of(ask(nodes.decoder, prompt_of(6), 2)) == oracle(prompt_of(6), 2)
        nodes.wait_for_balance()


@pytest.mark.parametrize("on_failure", ["fail", "local", "retry"])
def test_what_never_fits_does_not_block_what_does(model, oracle, on_failure):
    """10 pages here, 11 needed: on the decoder, then on the prefiller."""
    with pair(model, decoder={"num_pages": 10}) as nodes:
        with pytest.raises(
            ValueError, match=r"10 pages of 4.*got 40 prompt tokens \+ max_tokens 1"
        ):
            ask(nodes.decoder, prompt_of(10 * P), 1)
        assert tokens_of(ask(nodes.decoder, PROMPT, MAX_TOKENS)) == oracle(PROMPT, MAX_TOKENS)
    with pair(model, prefiller={"num_pages": 10}, on_failure=on_failure) as nodes:
        too_long = ask(nodes.decoder, prompt_of(10 * P + 2), 1)
        small = ask(nodes.decoder, PROMPT, MAX_TOKENS)
        assert "needs 11 pages" in error_of(too_long)
        assert tokens_of(small) == oracle(PROMPT, MAX_TOKENS)
        exact = prompt_of(10 * P + 1)
        assert tokens_of(ask(nodes.decoder, exact, MAX_TOKENS)) == oracle(exact, MAX_TOKENS)
        nodes.wait_for_balance()
