"""Nodes whose model is shared by rank processes: the thesis again, who may count, and the end.

`test_rank_group.py` has the mathematics; here are real processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from disagg.engine.ranks import Ranks
from disagg.model import rank_group
from disagg.request import FinishReason
from disagg.serve.node import Node
from tests.gated_ranks import gated
from tests.nodes import (
    DEADLINE_SECONDS,
    Oracle,
    ask,
    node_config,
    pair,
    prompt_of,
    start_together,
    tokens_of,
    wait_until,
)
from tests.test_trace import spans_of
from tests.tiny_models import make_tiny_llama

HERE = ("127.0.0.1", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


def pids_of(node):
    return [process.pid for process in node._engine._runner._processes]


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def small_parts(monkeypatch):
    """Next to nothing goes through shared memory."""
    small = "from disagg.model import rank_group; rank_group.MAX_PART_BYTES = 8; "
    monkeypatch.setattr(rank_group, "MAX_PART_BYTES", 8)
    monkeypatch.setattr(Ranks, "program", small + Ranks.program)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- The thesis ---


def test_a_prefiller_of_two_ranks(tmp_path, model, oracle):
    timeline = tmp_path / "trace.json"
    with pair(model, prefiller={"tp": 2, "max_batch_tokens": 9, "trace": timeline}) as nodes:
        for length in (1, 2, 5, 30):
            assert tokens_of(ask(nodes.decoder, prompt_of(length), 6)) == oracle(
                prompt_of(length), 6
            )
        nodes.wait_for_balance()
    spans = spans_of(timeline)
    # Three layers and the norm, as rank 0 ran them.
    assert len(spans["forward"]) == 4 * len(spans["steps"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_prefillers_and_decoders_of_1_2_and_4_ranks(tmp_path, num_kv_heads, transport):
    """All nine pairs at the same time: each decoder spreads its prompts over all prefillers."""
    folder = make_tiny_llama(tmp_path, num_key_value_heads=num_kv_heads)
    oracle, sizes = Oracle(folder), (1, 2, 4)
    same = {"transport": transport, "max_batch_tokens": 9, "peer_timeout": 20.0}
    with contextlib.ExitStack() as stack:
        prefillers = start_together(
            stack, *(node_config(folder, tp=tp, listen=HERE, **same) for tp in sizes)
        )
        addresses = tuple(node.address for node in prefillers)
        decoders = start_together(
            stack, *(node_config(folder, tp=tp, prefillers=addresses, **same) for tp in sizes)
        )
        wanted = [(prompt_of(n, seed=4), 6) for n in (2, 4, 5, 6, 9, 17, 30, 31, 45)]
        answers = [[ask(decoder, *wish) for wish in wanted] for decoder in decoders]
        for answers_of_one in answers:
            assert [tokens_of(answer) for answer in answers_of_one] == [
                oracle(*wish) for wish in wanted
            ]
            moved = [answer.result(0).transfer for answer in answers_of_one]
            assert {stats.transport for stats in moved} == {transport}
            used = {stats.prefiller for stats in moved}
            assert used == {"{}:{}".format(*address) for address in addresses}


@pytest.mark.slow
def test_sums_that_go_over_gloo_give_the_same_tokens(monkeypatch, model, oracle):
    small_parts(monkeypatch)
    with Node(node_config(model, tp=2, max_batch_tokens=9)) as node:
        for length in (1, 2, 5, 30):
            assert tokens_of(ask(node, prompt_of(length), 6)) == oracle(prompt_of(length), 6)


# --- One counter for all ranks ---


def test_no_page_leaves_before_the_slowest_rank_has_stored_its_share(
    tmp_path, monkeypatch, model, oracle
):
    """Rank 1 is held before it stores its KV of layer 1, and the others run as far as they can."""
    gate = gated(monkeypatch, tmp_path, rank=1, layer=1)
    prompt = prompt_of(30)
    with pair(model, prefiller={"tp": 2}) as nodes:
        start = nodes.prefiller._counter.read()
        answer = ask(nodes.decoder, prompt, 6)
        gate.wait_until_held()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert nodes.prefiller._counter.read() <= start + 1
        caches = nodes.decoder._kv_caches[0].layers
        wait_until(lambda: caches[0].any(), "layer 0 is sent")
        assert not caches[1].any()
        gate.open()
        assert tokens_of(answer) == oracle(prompt, 6)


# --- Ends ---


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_step(tmp_path, monkeypatch, model, rank):
    gate = gated(monkeypatch, tmp_path, rank=1, layer=2)
    with Node(node_config(model, tp=2)) as node:
        answer = ask(node, prompt_of(9), 6)
        gate.wait_until_held()
        os.kill(pids_of(node)[rank], signal.SIGKILL)
        why = node.wait()
        assert f"rank {rank} of 2 was killed by signal 9" in why
        done = answer.result(DEADLINE_SECONDS)
        assert done.finish_reason is FinishReason.ERROR
        assert f"rank {rank} of 2 was killed by signal 9" in done.error
        pids = pids_of(node)
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_a_decoder_answers_by_itself_when_its_prefiller_loses_a_rank(
    tmp_path, monkeypatch, model, oracle
):
    gate = gated(monkeypatch, tmp_path, rank=0, layer=2)
    with pair(model, prefiller={"tp": 2}) as nodes:
        answer = ask(nodes.decoder, prompt_of(30), 6)
        gate.wait_until_held()
        os.kill(pids_of(nodes.prefiller)[1], signal.SIGKILL)
        assert "rank 1 of 2 was killed by signal 9" in nodes.prefiller.wait()
        assert tokens_of(answer) == oracle(prompt_of(30), 6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_there_is_nothing_to_do(model, rank):
    with Node(node_config(model, tp=2)) as node:
        os.kill(pids_of(node)[rank], signal.SIGKILL)
        assert f"rank {rank} of 2 was killed by signal 9" in node.wait()
        with pytest.raises(RuntimeError, match="no more requests"):
            wait_until(lambda: ask(node, prompt_of(9), 6) is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("1 / 0", "division by zero"),
        # Such an error cannot be pickled.
        ("(_ for _ in ()).throw(ArithmeticError(lambda: 1))", "ArithmeticError(<function"),
    ],
)
def test_a_rank_that_fails_says_why(monkeypatch, model, fault, problem):
    fault = f"from disagg.model import layers; layers.Rope = lambda *a: {fault}; "
    monkeypatch.setattr(Ranks, "program", fault + Ranks.program)
    with Node(node_config(model, tp=2)) as node:
        answer = ask(node, prompt_of(9), 6)
        assert problem in node.wait()
        assert answer.result(DEADLINE_SECONDS).finish_reason is FinishReason.ERROR


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_sum_over_gloo(tmp_path, monkeypatch, model):
    """The other one fails by it, which is not the reason."""
    gate = gated(monkeypatch, tmp_path, rank=1, layer=2)
    small_parts(monkeypatch)
    hear = Ranks._hear

    def hear_late(ranks, speakers):
        if ranks.counter.read():
            gate.wait_until_held()
            os.kill(ranks._processes[1].pid, signal.SIGKILL)
            assert ranks._pipes[0].poll(DEADLINE_SECONDS), "rank 0 has failed, too"
        return hear(ranks, speakers)

    with Node(node_config(model, tp=2)) as node:
        monkeypatch.setattr(Ranks, "_hear", hear_late)
        node._counter.add()
        ask(node, prompt_of(9), 6)
        assert "rank 1 of 2 was killed by signal 9" in node.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_rank_that_is_killed_while_it_loads(monkeypatch, capfd, model, number):
    """Nothing from the rank itself, and nothing is left."""
    end = f"import os; os.kill(os.getpid(), {number:d}); from disagg"
    monkeypatch.setattr(Ranks, "program", Ranks.program.replace("from disagg", end))
    why = rf"cannot be loaded: .*rank [01] of 2 was killed by signal {number:d}"
    with pytest.raises(ValueError, match=why):
        Node(node_config(model, tp=2))
    assert capfd.readouterr() == ("", "")
    assert not [pid for pid in children_of(os.getpid()) if b"ranks" in cmdline(pid)]


def test_a_model_for_which_there_is_no_memory(monkeypatch, model):
    def fail(*arguments, **settings):
        raise MemoryError

    monkeypatch.setattr("disagg.serve.node.make_runner", fail)
    with pytest.raises(ValueError, match="cannot be loaded: MemoryError"):
        Node(node_config(model))


@pytest.mark.slow
def test_a_model_that_ranks_cannot_load(tmp_path):
    folder = make_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the tensor model.layers.1.mlp.up_proj.weight"):
        Node(node_config(folder, tp=2))
    assert not [pid for pid in children_of(os.getpid()) if b"ranks" in cmdline(pid)]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_ranks_that_cannot_share_a_model_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "__init__", None)
    folder = make_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match="num_qo_heads 4 of the model cannot be shared by 3 ranks"):
        Node(node_config(folder, tp=3))


@contextlib.contextmanager
def node_process(model, program=""):
    """A process that is a node of two ranks, and answers a prompt; its ranks."""
    code = (
        "import sys; from pathlib import Path; from tests.nodes import *;"
        "from disagg.engine.ranks import Ranks; Ranks.program = sys.argv[2] or Ranks.program;"
        "node = Node(node_config(Path(sys.argv[1]), tp=2));"
        "print('up', flush=True); ask(node, prompt_of(9), 1); node.wait()"
    )
    command = [sys.executable, "-c", code, str(model), program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        ranks = []
        try:
            assert process.stdout.readline() == "up\n"
            ranks += children_of(process.pid)
            assert len(ranks) == 2
            yield process, ranks
        finally:
            process.kill()
            for pid in filter(is_alive, ranks):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_with_their_node(model, number, stopped):
    with node_process(model) as (process, ranks):
        if stopped:
            os.kill(ranks[1], signal.SIGSTOP)
        process.send_signal(number)
        wait_until(lambda: not any(map(is_alive, ranks)), "ranks outlive their node", 5.0)


@pytest.mark.slow
def test_ranks_end_with_their_node_while_they_wait_for_each_other(tmp_path, monkeypatch, model):
    gate = gated(monkeypatch, tmp_path, rank=1, layer=1)
    with node_process(model, Ranks.program) as (process, ranks):
        gate.wait_until_held()
        process.kill()
        wait_until(lambda: not any(map(is_alive, ranks)), "ranks outlive their node", 5.0)


def test_no_file_of_ours_has_the_number_of_a_closed_stream():
    """What a rank inherits would be replaced by its own streams, or printed into."""
    code = (
        "import os; from disagg.serve.exits import run_script;"
        "run_script(lambda: os.open(os.devnull, os.O_RDONLY))"
    )
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(shell, cwd=Path(__file__).parents[1]).returncode == 3


@pytest.mark.slow
def test_ranks_see_the_memory_of_their_node(model):
    """Each rank's KV lies in the node's own mapping of it, its heads and no others."""
    with Node(node_config(model, tp=2)) as node:
        tokens_of(ask(node, prompt_of(9), 2))
        filled = [np.count_nonzero(cache.memory.bytes) for cache in node._kv_caches]
        assert all(filled)
        first, second = (cache.layers[0] for cache in node._kv_caches)
        assert not first.equal(second)
        assert node._kv_caches[0].layouts[0].num_kv_heads == 1
