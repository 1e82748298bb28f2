"""Speculation through whole nodes: flags, refusals, ranks, what is told of it."""

from __future__ import annotations

import contextlib
import json

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from disagg.messenger.messages import Role, decode, encode
from disagg.request import FinishReason, Request, SamplingParams
from disagg.serve.answer import as_json
from disagg.serve.node import Node
from disagg.serve.tokenizer import Tokenizer
from tests.engines import shm_engine
from tests.nodes import (
    Oracle,
    ask,
    node_config,
    pair,
    prompt_of,
    start_together,
    tokens_of,
    wait_until,
)
from tests.tiny_models import add_draft_layer, make_tiny_llama, save_word_tokenizer

HERE = ("127.0.0.1", 0)
#: So few that a guess is often right by chance, and another one is not.
VOCABULARY = 6
WISHES = [(tuple(token % VOCABULARY for token in prompt_of(n)), 20) for n in (1, 2, 4, 5, 9, 31)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    main = tmp_path_factory.mktemp("model")
    return add_draft_layer(make_tiny_llama(main, family="deepseek_v3", vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """Of another shape; it guesses for the model in `folder`."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "seed": 3, "vocab_size": VOCABULARY}
    return make_tiny_llama(tmp_path_factory.mktemp("draft"), family="qwen3", **shape)


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


def served(node, oracle):
    """What every wish was told of its guesses, after its tokens were compared."""
    answers = [ask(node, *wish) for wish in WISHES]
    assert [tokens_of(answer) for answer in answers] == [oracle(*wish) for wish in WISHES]
    return [as_json(0, answer)["speculation"] for answer in answers]


@pytest.mark.parametrize("drafts_by", ["layer", "model"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_split_and_undivided_tell_the_same(
    tmp_path, folder, draft_model, oracle, transport, drafts_by
):
    same = {"speculate": 3, "draft_model": draft_model if drafts_by == "model" else None}
    with Node(node_config(folder, **same)) as undivided:
        told = served(undivided, oracle)
    decoder = {"trace": tmp_path / "trace.json"}
    same["transport"] = transport
    with pair(folder, prefiller={"max_batch_tokens": 9}, decoder=decoder, **same) as nodes:
        assert served(nodes.decoder, oracle) == told
        nodes.wait_for_balance()
    assert all(0 < each["drafts"] >= each["accepted"] for each in told)
    assert sum(each["accepted"] for each in told) > 5, "too few to tell by"
    spans = json.loads(decoder["trace"].read_text())["traceEvents"]
    assert {"layer 0", "norm", "sampling", "norm, tails"} <= {span["name"] for span in spans}
    traced = [span["args"] for span in spans if span.get("name") == "decode"]
    assert [(each["num_drafts"], each["num_accepted"]) for each in traced] == [
        (each["drafts"], each["accepted"]) for each in told
    ]


def test_draft_layers_on_one_side_are_refused(folder):
    with Node(node_config(folder, listen=HERE)) as prefiller:
        config = node_config(folder, prefillers=(prefiller.address,), speculate=1)
        with pytest.raises(ValueError, match="num_draft_layers differs: prefiller 0, decoder 1"):
            Node(config)


def test_a_model_without_a_draft_layer_is_refused(tmp_path):
    why = r"has no draft layer \(num_nextn_predict_layers in config.json\)"
    with pytest.raises(ValueError, match=why):
        Node(node_config(make_tiny_llama(tmp_path), speculate=1))


@pytest.mark.parametrize("token", [128, -1])
def test_draft_tokens_out_of_the_vocabulary_are_refused(tmp_path, token):
    folder = add_draft_layer(make_tiny_llama(tmp_path), tokens=[5, token])
    with pytest.raises(ValueError, match=r"a draft token is not in range\(0, 128\)"):
        Node(node_config(folder, speculate=1))


def test_draft_tokens_that_are_no_integers_are_refused(tmp_path):
    folder = add_draft_layer(make_tiny_llama(tmp_path), tokens=[5, 7])
    path = folder / "model.safetensors"
    tensors = {
        name: tensor.clone().float() if name.endswith("token_ids") else tensor.clone()
        for name, tensor in load_file(path).items()
    }
    path.unlink()
    save_file(tensors, path)
    why = r"token_ids in .* is torch\.float32; expected one of \(torch\.int32,\)"
    with pytest.raises(ValueError, match=why):
        Node(node_config(folder, speculate=1))


def test_another_draft_model_on_one_side_is_refused(folder, draft_model):
    with Node(node_config(folder, listen=HERE, speculate=1)) as prefiller:
        same = {"prefillers": (prefiller.address,), "speculate": 1, "draft_model": draft_model}
        with pytest.raises(ValueError, match="num_draft_layers differs: prefiller 1, decoder 0"):
            Node(node_config(folder, **same))


def test_ranks_that_cannot_share_the_heads_of_the_draft_model_are_refused(folder, draft_model):
    """Those of the model, which has latents, any number of ranks can share. Whoever says so of
    itself ends its own connection, not the prefiller."""
    same = {"speculate": 1, "draft_model": draft_model}
    with Node(node_config(folder, listen=HERE, **same)) as prefiller, shm_engine() as stranger:
        hello = replace(prefiller._messenger.hello, role=Role.DECODER, epoch=1, tp=3)
        peer = stranger.connect(*prefiller.address)
        stranger.send(peer, encode(replace(hello, kv_regions=3 * hello.kv_regions)))
        heard = []
        wait_until(lambda: heard.extend(stranger.poll(0.01)) or heard)
        assert "decoder 3 for 2 KV heads" in decode(heard[0].data).why
        assert prefiller._failure is None


@pytest.mark.parametrize("tokenizers", [False, True])
def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path, tokenizers):
    """Of another size or, of the same size, with other tokens."""
    model = make_tiny_llama(tmp_path / "model")
    other = make_tiny_llama(tmp_path / "other", **({} if tokenizers else {"vocab_size": 127}))
    if tokenizers:
        for folder, letters in ((model, "abc"), (other, "acb")):
            words = {letter: number for number, letter in enumerate(letters)}
            FastTokenizer(WordLevel(words)).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=f"the draft model {other} has another vocabulary"):
        Node(node_config(model, speculate=1, draft_model=other))


def test_a_draft_model_with_a_damaged_tokenizer_is_refused(tmp_path):
    model, other = make_tiny_llama(tmp_path / "model"), make_tiny_llama(tmp_path / "other")
    (other / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged: EOF"):
        Node(node_config(model, speculate=1, draft_model=other))


def test_a_draft_model_without_guesses_is_refused(tmp_path):
    folder = make_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match="say how many at a time"):
        Node(node_config(folder, draft_model=folder))


def test_a_model_that_drafts_for_itself_is_always_right(tmp_path):
    """But for what the end of an answer cuts off."""
    folder = make_tiny_llama(tmp_path)
    oracle = Oracle(folder)
    with Node(node_config(folder, speculate=3, draft_model=folder)) as node:
        for told in served(node, oracle):
            assert told["drafts"] == told["accepted"] > 0


def test_a_right_guess_that_ends_an_answer_is_counted(tmp_path):
    """Three of four tokens were guessed, whichever is the last."""
    folder, prompt = make_tiny_llama(tmp_path), prompt_of(9)
    tokens = Oracle(folder)(prompt, 12)
    with Node(node_config(folder, speculate=3, draft_model=folder)) as node:
        for stop in tokens:
            sampling = SamplingParams(max_tokens=12, stop_token_ids=(stop,))
            done = node.submit(Request(prompt_token_ids=prompt, sampling=sampling)).result(30)
            end = 1 + tokens.index(stop)
            assert (len(done.token_ids), done.num_accepted) == (end, end - end // 4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafts_by", ["layer", "layer of 3 tokens", "model"])
def test_one_and_two_ranks_on_either_side(tmp_path, folder, draft_model, oracle, drafts_by):
    """Two ranks share the head of 3 tokens as 2 and 2; the one that is none is never guessed."""
    if drafts_by == "layer of 3 tokens":
        folder = make_tiny_llama(tmp_path, family="deepseek_v3", vocab_size=VOCABULARY)
        add_draft_layer(folder, tokens=[5, 0, 3])
    with contextlib.ExitStack() as stack:
        same = {"speculate": 2, "peer_timeout": 20.0}
        same["draft_model"] = draft_model if drafts_by == "model" else None
        both = [
            node_config(folder, tp=tp, listen=HERE, max_batch_tokens=9, **same) for tp in (1, 2)
        ]
        addresses = tuple(node.address for node in start_together(stack, *both))
        both = [node_config(folder, tp=tp, prefillers=addresses, **same) for tp in (1, 2)]
        one, two = (served(node, oracle) for node in start_together(stack, *both))
        assert one == two


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("drafts_by", ["layer", "model"])
def test_up_to_the_models_limit(tmp_path, num_drafts, drafts_by):
    """No guess is made for a place that no answer can have, right or wrong."""
    limit = {"max_position_embeddings": 24}
    folder = add_draft_layer(make_tiny_llama(tmp_path, **limit))
    same = {"speculate": num_drafts, "draft_model": folder if drafts_by == "model" else None}
    oracle = Oracle(folder)
    with Node(node_config(folder, num_pages=6, **same)) as node:
        for length in (1, 19, 20, 22, 23):
            done = ask(node, prompt_of(length), 100).result()
            assert done.token_ids == oracle(prompt_of(length), 24 - length)
            assert done.finish_reason == FinishReason.LENGTH


def test_a_stop_string_ends_an_answer_inside_of_kept_guesses(tmp_path):
    """All guesses are right, so blocks of four tokens come at a time."""
    folder = save_word_tokenizer(make_tiny_llama(tmp_path))
    tokenizer = Tokenizer(folder)
    prompt = prompt_of(9)
    text = [f"t{token}" for token in Oracle(folder)(prompt, 12)]
    with Node(node_config(folder, speculate=3, draft_model=folder)) as node:
        for stop in text:
            sampling = SamplingParams(max_tokens=12, stop=(stop,))
            request = Request(prompt_token_ids=prompt, sampling=sampling)
            answer = node.submit(request, stream=tokenizer.stream())
            done = answer.result(30)
            end = 1 + next(i for i, word in enumerate(text) if stop in word)
            assert len(done.token_ids) == end
            assert done.finish_reason == FinishReason.STOP
            assert stop not in answer.text
