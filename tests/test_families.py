"""All model families through whole nodes: the tokens of transformers, divided and undivided."""

from __future__ import annotations

import contextlib

import pytest

from disagg.serve.node import Node
from tests.nodes import Oracle, ask, node_config, pair, prompt_of, start_together, tokens_of
from tests.tiny_models import FAMILIES, make_tiny_llama

HERE = ("127.0.0.1", 0)
#: Around the edges of pages of 4, chunks of 9 and both forms of latent attention.
WISHES = [(prompt_of(n), 6) for n in (1, 2, 4, 5, 9, 10, 31, 45)]


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_and_undivided_give_the_tokens_of_transformers(tmp_path, family, order):
    """The checkpoint is as transformers saves it, in several files."""
    folder = make_tiny_llama(tmp_path, family=family, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    oracle, same = Oracle(folder), {"kv_layout": order}
    with Node(node_config(folder, **same)) as undivided:
        answers = [ask(undivided, *wish) for wish in WISHES]
        assert [tokens_of(answer) for answer in answers] == [oracle(*wish) for wish in WISHES]
    with pair(folder, prefiller={"max_batch_tokens": 9}, **same) as nodes:
        answers = [ask(nodes.decoder, *wish) for wish in WISHES]
        assert [tokens_of(answer) for answer in answers] == [oracle(*wish) for wish in WISHES]
        assert [answer.transfer is not None for answer in map(finished, answers)] == [
            len(prompt) > 1 for prompt, _ in WISHES
        ]
        nodes.wait_for_balance()


def finished(answer):
    return answer.result(0.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("family", "order"),
    [*((family, "HND") for family in FAMILIES), ("qwen3", "NHD"), ("qwen3_moe", "NHD")],
)
def test_one_and_two_ranks_on_either_side(tmp_path, family, order, transport):
    """All four pairs at the same time: each decoder spreads its prompts over both prefillers."""
    folder = make_tiny_llama(tmp_path, family=family)
    oracle = Oracle(folder)
    same = {"kv_layout": order, "transport": transport, "peer_timeout": 20.0}
    with contextlib.ExitStack() as stack:
        both = [
            node_config(folder, tp=tp, listen=HERE, max_batch_tokens=9, **same) for tp in (1, 2)
        ]
        addresses = tuple(node.address for node in start_together(stack, *both))
        both = [node_config(folder, tp=tp, prefillers=addresses, **same) for tp in (1, 2)]
        decoders = start_together(stack, *both)
        answers = [[ask(decoder, *wish) for wish in WISHES] for decoder in decoders]
        for answers_of_one in answers:
            assert [tokens_of(answer) for answer in answers_of_one] == [
                oracle(*wish) for wish in WISHES
            ]
