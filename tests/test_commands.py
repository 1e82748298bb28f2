"""What the scripts print, without the scripts: undivided, in this process, which is quick.

`test_scripts.py` starts them as users do.
"""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from disagg.engine.engine import Engine
from disagg.serve.commands import answer_prompts
from disagg.serve.node import Node, NodeConfig
from disagg.serve.options import decode_parser, given, prefill_parser
from disagg.serve.prompts import read_prompts
from tests import sysfs_trees
from tests.fake_verbs import FakeMachine
from tests.nodes import Oracle, wait_until
from tests.tiny_models import make_tiny_llama, save_word_tokenizer

PROMPTS = ("t9 t8 t7", "t3", "t5 t6")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_word_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture
def answer(model, capsys):
    """Answer with these flags: the exit code and what was printed on stdout."""

    def answer(*flags):
        arguments = decode_parser().parse_args(
            [f"--model={model}", "--colocated", "--dtype=float32", "--page-size=4", "--raw", *flags]
        )
        code = answer_prompts(arguments, read_prompts(arguments))
        return code, capsys.readouterr().out

    return answer


def objects(answered):
    code, text = answered
    assert code == 0
    return [json.loads(line) for line in text.splitlines()]


def words(token_ids):
    return " ".join(f"t{token}" for token in token_ids)


def test_prompts_of_a_file_are_answered_in_its_order_each_in_its_way(answer, oracle, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = (
        {"prompt": "t3", "max_tokens": 9},
        {"prompt_token_ids": [5, 6]},
        {"prompt": "t9", "temperature": 0.9, "seed": 3},
        {"prompt": "t9", "temperature": 0.9, "seed": 3, "logprobs": 2},
    )
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = objects(answer("--json", "--max-tokens=4", f"--prompts-file={path}", "t1"))
    assert [done["index"] for done in found] == [0, 1, 2, 3, 4]
    expected = [oracle(prompt, n) for prompt, n in (((1,), 4), ((3,), 9), ((5, 6), 4))]
    assert [tuple(done["token_ids"]) for done in found[:3]] == expected
    assert found[3]["token_ids"] == found[4]["token_ids"] != list(oracle((9,), 4))
    assert ["logprobs" in done for done in found] == [False] * 4 + [True]
    assert [done["usage"]["completion_tokens"] for done in found] == [4, 9, 4, 4, 4]


def test_a_stop_string_cuts_text_and_tokens(answer, oracle):
    expected = oracle((9, 8, 7), 9)
    stop = f"{words(expected[3:5])} "
    (done,) = objects(answer("--json", "--max-tokens=9", f"--stop={stop}", PROMPTS[0]))
    assert done["text"] == words(expected[:3]) + " "
    assert tuple(done["token_ids"]) == expected[:6]
    assert done["finish_reason"] == "stop"
    assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 6}
    code, text = answer("--max-tokens=9", f"--stop={stop}", "--stop=no", PROMPTS[0], PROMPTS[0])
    assert (code, text) == (0, 2 * (words(expected[:3]) + " \n"))


def test_a_later_answer_is_stopped_while_an_earlier_one_is_printed(
    answer, oracle, monkeypatch, capsys
):
    stop = f"{words(oracle((3,), 9)[:5])} "
    printed = []
    real_cancel = Engine.cancel

    def note(engine, number):
        printed.append(capsys.readouterr().out)
        real_cancel(engine, number)

    monkeypatch.setattr(Engine, "cancel", note)
    code, _ = answer("--max-tokens=200", f"--stop={stop}", *PROMPTS[:2])
    assert code == 0
    (so_far,) = printed
    assert 0 < len(so_far.split()) < 100


def test_logprobs_of_every_token(answer):
    (done,) = objects(answer("--json", "--max-tokens=5", "--logprobs=3", PROMPTS[0]))
    assert [found["token_id"] for found in done["logprobs"]] == done["token_ids"]
    for found in done["logprobs"]:
        assert len(found["top"]) == 3
        assert found["top"][0] == {"token_id": found["token_id"], "logprob": found["logprob"]}


def test_times_add_up(answer):
    for done in objects(answer("--json", "--max-tokens=5", *PROMPTS)):
        times = done["timings_ms"]
        assert times["transfer"] is None
        assert times["ttft"] == pytest.approx(times["queue"] + times["prefill"], abs=0.01)
        assert 0 < times["inter_token_mean"] <= times["inter_token_p99"]
        assert done["transfer"] is None


def test_a_refused_prompt_has_counted_tokens_but_no_times(answer):
    code, text = answer("--json", "--logprobs=1", "t5 " * 600)
    (done,) = [json.loads(line) for line in text.splitlines()]
    assert code == 1
    assert done["usage"] == {"prompt_tokens": 600, "completion_tokens": 0}
    assert (done["timings_ms"], done["transfer"], done["logprobs"]) == (None, None, [])
    assert "at most 511 tokens" in done["error"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_run_on_a_terminal_ends_with_a_summary(answer, monkeypatch, flags):
    """Unless JSON says all of it already."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert answer("--max-tokens=5", *flags, *PROMPTS)[0] == 0
    if flags:
        assert terminal.getvalue() == ""
    else:
        assert re.fullmatch(
            r"15 tokens in \d+\.\d\d s \(\d+\.\d tokens/s\), \d\.\d{3} s to the first token,"
            r" 0\.00 MB moved in 0 writes\n",
            terminal.getvalue(),
        )


def test_the_flags_for_rdma_reach_the_nics_and_the_messengers_thread(model, monkeypatch, tmp_path):
    sysfs_trees.eight_to_eight(tmp_path)
    machine = FakeMachine(monkeypatch, tmp_path)
    flags = ("--rdma-device=mlx5_8,mlx5_3:1", "--gid-index=1", "--poll-cpu=7", "--transport=verbs")
    flags = (*flags, "--dtype=float32", "--num-pages=8")
    arguments = prefill_parser().parse_args(["--listen=127.0.0.1:0", *flags])
    arguments.model = model
    with Node(given(NodeConfig, arguments)) as node:
        assert sorted(machine.opened) == [("mlx5_3", 1, 1), ("mlx5_8", 1, 1)]
        assert {nic.name for nic in node._transfer._media[0].nics} == {"mlx5_3", "mlx5_8"}
        wait_until(lambda: machine.polled_on == [{7}])
        where = node.address
    assert not any(machine.fabric.open.values())
    machine.opened.clear()
    arguments = decode_parser().parse_args([*flags, "--nic-map=cpu=mlx5_6"])
    arguments.model, arguments.prefillers = model, (where,)
    with pytest.raises(ValueError, match="cannot connect"):
        Node(given(NodeConfig, arguments))
    assert machine.opened == [("mlx5_6", 1, 1)]
    assert machine.polled_on == [{7}], "no thread begins before the links are up"
    assert not any(machine.fabric.open.values())
