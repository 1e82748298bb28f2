"""The two launch scripts as their users see them: output, exit codes, one line for each mistake.

Also what is left when they end in any way: no process, no traceback.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.serve.options import decode_parser, forwarded_flags, prefill_parser
from disagg.transfer import verbs_device
from tests.nodes import Oracle, wait_until
from tests.scripts import scripts
from tests.tiny_models import make_tiny_llama, save_word_tokenizer

MODE = ("--dtype=float32", "--page-size=4")
PROMPTS = ("t9 t8 t7 t6 t5 t4", "t3", " ".join(f"t{7 * i % 128}" for i in range(61)))
MAX_TOKENS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_word_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """The same, with room for prompts and answers that take many seconds."""
    folder = tmp_path_factory.mktemp("model")
    return save_word_tokenizer(make_tiny_llama(folder, max_position_embeddings=65536))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with scripts(tmp_path_factory.mktemp("scripts")) as starter:
        yield starter


@pytest.fixture
def run(tmp_path):
    with scripts(tmp_path) as starter:
        yield starter


@pytest.fixture(scope="module")
def prefiller(shared, model):
    """Started as a user does; serves all tests that need an ordinary one."""
    script = shared.start("run_prefill.py", *MODE, f"--model={model}", "--listen=127.0.0.1:0")
    script.wait_for("listening on ")
    return script


def decode_flags(model, *more):
    return (*MODE, f"--model={model}", f"--max-tokens={MAX_TOKENS}", "--json", *more)


def objects(outcome):
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def answers(outcome):
    """Without what is counted and timed."""
    counted = {"usage", "timings_ms", "transfer"}
    return [{k: v for k, v in found.items() if k not in counted} for found in objects(outcome)]


def as_json(index, token_ids, finish_reason="length"):
    text = " ".join(f"t{token}" for token in token_ids)
    return {
        "index": index,
        "token_ids": list(token_ids),
        "text": text,
        "finish_reason": finish_reason,
    }


@pytest.fixture(scope="module")
def expected(model):
    """The template puts each prompt between t1 and t2."""
    oracle = Oracle(model)
    prompts = [(1, *(int(word[1:]) for word in prompt.split()), 2) for prompt in PROMPTS]
    return [as_json(i, oracle(prompt, MAX_TOKENS)) for i, prompt in enumerate(prompts)]


# --- Answers ---


def test_split_by_hand_by_itself_and_undivided_print_the_same(run, model, prefiller, expected):
    """The default with its child prefiller, while the port that run_prefill.py takes is taken."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has taken it: as good
            stack.enter_context(socket.create_server(prefill_parser().parse_args([]).listen))
        by_itself = run.start("run_decode.py", *decode_flags(model), *PROMPTS)
        by_hand = run.fork(
            "run_decode.py", *decode_flags(model), f"--prefill={prefiller.address()}", *PROMPTS
        )
        undivided = run.fork("run_decode.py", *decode_flags(model), "--colocated", *PROMPTS)
        for script in (by_hand, undivided, by_itself):
            outcome = script.wait()
            assert (outcome.code, outcome.stderr) == (0, "")
            assert answers(outcome) == expected
    assert prefiller.stderr.read_text() == ""


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_every_transport_gives_the_same_answers(run, model, prefiller, expected, transport):
    """The prefiller offers all of them."""
    flags = (f"--prefill={prefiller.address()}", f"--transport={transport}", "--verbose")
    outcome = run.fork("run_decode.py", *decode_flags(model), *flags, *PROMPTS).wait()
    assert outcome.code == 0
    assert answers(outcome) == expected
    assert "failed" not in outcome.stderr
    chosen = {"auto": "shm"}.get(transport, transport)
    assert {found["transfer"]["transport"] for found in objects(outcome)} == {chosen}


def test_without_json_the_text_is_printed(run, model, prefiller, expected):
    flags = (*MODE, f"--model={model}", f"--prefill={prefiller.address()}")
    outcome = run.fork("run_decode.py", *flags, f"--max-tokens={MAX_TOKENS}", *PROMPTS).wait()
    assert outcome.stdout == "".join(answer["text"] + "\n" for answer in expected)
    assert (outcome.code, outcome.stderr) == (0, "")


def test_raw_prompts_get_no_template(run, model, prefiller):
    flags = decode_flags(model, f"--prefill={prefiller.address()}", "--raw")
    outcome = run.fork("run_decode.py", *flags, "t5 t6 t7").wait()
    assert answers(outcome) == [as_json(0, Oracle(model)((5, 6, 7), MAX_TOKENS))]


def test_what_was_moved_is_told(run, model, prefiller):
    """Of prompts with 1, 2 and 3 tokens for the prefiller, in pages of 4, and of one with none."""
    flags = (f"--prefill={prefiller.address()}", "--raw", "--logprobs=1")
    prompts = ("t5 t6", "t5 t6 t7 t8 t9 t10", "t5 " * 10, "t5")
    outcome = run.fork("run_decode.py", *decode_flags(model, *flags), *prompts).wait()
    assert outcome.code == 0
    *fetched, local = objects(outcome)
    tail_bytes = -(-(24 + 64 * 4) // 64) * 64
    page_bytes = 2 * 2 * 4 * 16 * 4
    for num_pages, found in zip((1, 2, 3), fetched, strict=True):
        assert found["transfer"] == {
            "prefiller": prefiller.address(),
            "transport": "shm",
            "writes": 3 * num_pages + 1,
            "bytes": 3 * num_pages * page_bytes + tail_bytes,
            "retries": 0,
        }
        times = found["timings_ms"]
        assert 0 <= times["transfer"] < times["prefill"] < times["ttft"]
        assert len(found["logprobs"]) == found["usage"]["completion_tokens"] == MAX_TOKENS
    assert local["transfer"] is None
    assert [found["usage"]["prompt_tokens"] for found in (*fetched, local)] == [2, 6, 10, 1]


def test_two_prefillers(run, model, prefiller, expected):
    other = run.fork("run_prefill.py", *MODE, f"--model={model}", "--listen=127.0.0.1:0")
    both = f"--prefill={prefiller.address()},{other.address()}"
    outcome = run.fork("run_decode.py", *decode_flags(model, both), *PROMPTS).wait()
    assert (outcome.code, answers(outcome)) == (0, expected)


@pytest.mark.parametrize("on_failure", ["local", "retry", "fail"])
def test_every_policy_and_other_limits_are_accepted(run, model, prefiller, expected, on_failure):
    flags = decode_flags(
        model,
        f"--prefill={prefiller.address()}",
        f"--on-failure={on_failure}",
        "--num-pages=50",
        "--max-batch-tokens=5",
        "--peer-timeout=4",
        "--request-timeout=20",
    )
    outcome = run.fork("run_decode.py", *flags, *PROMPTS).wait()
    assert (outcome.code, answers(outcome)) == (0, expected)


# --- Mistakes ---


def without_config(folder):
    (folder / "config.json").unlink()


def without_shard(folder):
    shutil.rmtree(folder)
    save_word_tokenizer(make_tiny_llama(folder, max_shard_size="50KB"))
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def other_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (folder / "config.json").write_text(json.dumps(config))


def without_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def wrong_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
    save_file(tensors, folder / "model.safetensors")


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BROKEN = [
    (shutil.rmtree, "no folder .*broken here"),
    (without_config, "has no config.json"),
    (without_shard, "model-00002-of-.* is missing, damaged or half copied"),
    (
        other_architecture,
        r"architectures \['GPT2LMHeadModel'\] is not supported; expected \['LlamaForCausalLM'\]",
    ),
    (without_tensor, "lacks the tensor model.layers.1.mlp.up_proj.weight"),
    (
        wrong_shape,
        r"model.layers.1.mlp.up_proj.weight in .* expected \[96, 64\], got \[95, 64\]",
    ),
    (truncated, "damaged or half copied"),
]


@pytest.mark.parametrize(("damage", "why"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_a_model_that_cannot_be_loaded(run, model, tmp_path, damage, why):
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    damage(folder)
    flags = (*MODE, f"--model={folder}")
    for script in (
        run.fork("run_prefill.py", *flags, "--listen=127.0.0.1:0"),
        run.fork("run_decode.py", *flags, "--colocated", "t3"),
    ):
        outcome = script.wait()
        assert (outcome.code, outcome.stdout) == (2, "")
        assert re.search(why, outcome.stderr_line), outcome.stderr_line


def test_an_empty_name_of_a_draft_model_is_not_none(run, model):
    """As a script gives whose variable is not set."""
    flags = (*MODE, f"--model={model}", "--speculate=1", "--draft-model=")
    outcome = run.fork("run_decode.py", *flags, "--colocated", "t3").wait()
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "does not exist or has no config.json" in outcome.stderr_line


def test_a_child_prefiller_that_cannot_start_says_so_once(run, model, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    without_tensor(folder)
    outcome = run.fork("run_decode.py", *decode_flags(folder), "t3").wait()
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "error: " in outcome.stderr_line
    assert "lacks the tensor" in outcome.stderr_line


def test_a_taken_port_is_told_at_once(run, model, prefiller):
    """Before torch is loaded, which takes longer than the two seconds there are."""
    flags = (*MODE, f"--model={model}", f"--listen={prefiller.address()}")
    seconds = []
    while len(seconds) < 3 and min(seconds, default=9.0) > 2.0:  # others may have the cores
        start = time.monotonic()
        outcome = run.start("run_prefill.py", *flags).wait()
        seconds.append(time.monotonic() - start)
        assert outcome.code == 2
        assert f"{prefiller.address()}: Address already in use" in outcome.stderr_line
        assert "choose another with --listen" in outcome.stderr_line
    assert min(seconds) < 2.0


def test_a_prefiller_that_is_not_there(run, model):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        where = "{}:{}".format(*unused.getsockname())
        outcome = run.fork("run_decode.py", *decode_flags(model, f"--prefill={where}"), "t3").wait()
    assert (outcome.code, outcome.stdout) == (2, "")
    assert f"prefiller {where}: cannot connect" in outcome.stderr_line
    assert "Connection refused" in outcome.stderr_line


def test_a_port_that_is_no_prefiller(run, model):
    """One says nothing, one talks HTTP, one hangs up: each ends within the opening's deadline."""

    def serve(server, say):
        for _ in range(2):
            connection, _ = server.accept()
            held.append(connection)
            if say is not None:
                connection.sendall(say)
                connection.shutdown(socket.SHUT_WR)

    held = []
    cases = {
        None: "sent no opening within 3 s",
        b"HTTP/1.1 400 Bad Request\r\n\r\n": "does a disagg node listen there?",
        b"": "closed the connection",
    }
    with contextlib.ExitStack() as stack:
        running = {}
        for say in cases:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=serve, args=(server, say), daemon=True).start()
            where = "{}:{}".format(*server.getsockname())
            flags = decode_flags(model, f"--prefill={where}")
            running[say] = where, run.fork("run_decode.py", *flags, "t3")
        for say, (where, script) in running.items():
            outcome = script.wait(15.0)
            assert (outcome.code, outcome.stdout) == (2, "")
            assert f"prefiller {where}: " in outcome.stderr_line
            assert cases[say] in outcome.stderr_line
        for connection in held:
            connection.close()


def test_a_prefiller_that_refuses_names_the_field_and_lives_on(
    run, model, prefiller, expected, tmp_path
):
    other = save_word_tokenizer(make_tiny_llama(tmp_path / "other", seed=1))
    where = f"--prefill={prefiller.address()}"
    for flags, field in (
        ((f"--model={other}", *MODE), "model_fingerprint"),
        (
            (f"--model={model}", "--page-size=4", "--dtype=bfloat16"),
            "dtype differs: prefiller float32, decoder bfloat16",
        ),
        (
            (f"--model={model}", "--dtype=float32", "--page-size=8"),
            "page_size differs: prefiller 4, decoder 8",
        ),
        (
            (f"--model={model}", *MODE, "--kv-layout=NHD"),
            "kv_layout differs: prefiller HND, decoder NHD",
        ),
    ):
        outcome = run.fork("run_decode.py", *flags, where, "t3").wait(10.0)
        assert (outcome.code, outcome.stdout) == (2, "")
        assert f"prefiller {prefiller.address()}: {field}" in outcome.stderr_line
    outcome = run.fork("run_decode.py", *decode_flags(model, where), *PROMPTS).wait()
    assert (outcome.code, answers(outcome)) == (0, expected)


def test_two_transports_are_refused_with_both_names(run, model):
    prefiller = run.fork(
        "run_prefill.py", *MODE, f"--model={model}", "--listen=127.0.0.1:0", "--transport=shm"
    )
    where = f"--prefill={prefiller.address()}"
    outcome = run.fork("run_decode.py", *decode_flags(model, where), "--transport=tcp", "t3").wait()
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "an opening for transport shm, ours is tcp" in outcome.stderr_line
    assert prefiller.poll() is None


@pytest.mark.parametrize(
    "flag",
    [
        *("--transport=tcp", "--rdma-device=mlx5_0,mlx5_1:2", "--gid-index=0", "--poll-cpu=0"),
        "--nic-map=cpu=mlx5_0;cuda:0=mlx5_1",
    ],
)
def test_a_child_prefiller_is_told_how_to_transfer(flag):
    arguments = decode_parser().parse_args(["t3", flag])
    assert flag in forwarded_flags(arguments)


@pytest.mark.skipif(
    not verbs_device.MISSING and any(Path("/sys/class/infiniband").glob("*")),
    reason="this machine has an RDMA device",
)
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("run_prefill.py", ("--listen=127.0.0.1:0", "--transport=verbs")),
        ("run_prefill.py", ("--listen=127.0.0.1:0", "--gid-index=3")),
        ("run_decode.py", ("--prefill=127.0.0.1:9", "--transport=verbs", "t3")),
        ("run_decode.py", ("--transport=verbs", "t3")),
        ("run_decode.py", ("--check=127.0.0.1:9", "--transport=verbs")),
        ("run_decode.py", ("--check=127.0.0.1:9", "--rdma-device=mlx5_0")),
        ("run_decode.py", ("--check=127.0.0.1:9", "--poll-cpu=0")),
    ],
)
def test_without_pyverbs_or_a_device_one_line_says_what_is_missing(run, model, name, flags):
    outcome = run.fork(name, *MODE, f"--model={model}", *flags).wait(30.0)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert re.search(r"--transport (auto|verbs): ", outcome.stderr_line)
    lacks = (
        "RDMA ports are: none, load the driver" if not verbs_device.MISSING else "apt-get install"
    )
    assert lacks in outcome.stderr_line


def test_a_request_that_fails_leaves_the_others(run, model, prefiller, expected):
    """Exit code 1, an object and a line on stderr for each that failed, in the order of input."""
    flags = decode_flags(model, f"--prefill={prefiller.address()}", "--num-pages=100")
    too_long_for_model = "t5 " * 520
    too_long_for_pool = "t5 " * 395
    prompts = (PROMPTS[0], "", too_long_for_model, PROMPTS[1], too_long_for_pool, PROMPTS[2])
    outcome = run.fork("run_decode.py", *flags, *prompts).wait()
    assert outcome.code == 1
    found = answers(outcome)
    assert [answer["index"] for answer in found] == list(range(6))
    assert [found[i]["token_ids"] for i in (0, 3, 5)] == [e["token_ids"] for e in expected]
    for i, why in ((1, "empty"), (2, "at most 511 tokens"), (4, "100 pages of 4")):
        assert (found[i]["finish_reason"], found[i]["token_ids"]) == ("error", [])
        assert why in found[i]["error"]
    assert [line[:16] for line in outcome.stderr.splitlines()] == [
        f"error: prompt {i}:" for i in (1, 2, 4)
    ]


@pytest.mark.parametrize("on_failure", ["local", "retry", "fail"])
def test_a_prompt_longer_than_the_prefillers_pool(run, model, expected, on_failure):
    """Refused at once, whatever the policy is: it would not fit later either."""
    flags = (*MODE, f"--model={model}", "--listen=127.0.0.1:0", "--num-pages=15")
    small = run.fork("run_prefill.py", *flags)
    where = (f"--prefill={small.address()}", f"--on-failure={on_failure}")
    outcome = run.fork("run_decode.py", *decode_flags(model, *where), PROMPTS[2], PROMPTS[0]).wait(
        10.0
    )
    assert outcome.code == 1
    refused, served = answers(outcome)
    assert refused["finish_reason"] == "error"
    assert "needs 16 pages" in refused["error"]
    assert "pool has 15" in outcome.stderr_line
    assert served["token_ids"] == expected[0]["token_ids"]
    assert small.poll() is None


@pytest.mark.parametrize(
    ("name", "flags", "why"),
    [
        ("run_decode.py", (), "PROMPT"),
        ("run_decode.py", ("t3", "--prefill=nowhere"), "expected HOST:PORT, got 'nowhere'"),
        ("run_decode.py", ("t3", "--prefill=a:1", "--colocated"), "not allowed with"),
        ("run_decode.py", ("t3", "--max-tokens=0"), "at least 1, got '0'"),
        ("run_decode.py", ("t3", "--on-failure=pray"), "invalid choice: 'pray'"),
        ("run_decode.py", ("t3", "--temperature=-1"), "temperature: Expected"),
        ("run_decode.py", ("t3", "--peer-timeout=0", "--colocated"), "peer_timeout must be"),
        ("run_prefill.py", ("--listen=127.0.0.1:99999",), "expected HOST:PORT"),
        ("run_prefill.py", ("--listen=127.0.0.1:0", "--page-size=-4"), "at least 1, got '-4'"),
        ("run_prefill.py", ("--listen=127.0.0.1:0", "--dtype=int3"), "invalid choice: 'int3'"),
        ("run_prefill.py", ("--listen=127.0.0.1:0", "--kv-layout=XYZ"), "invalid choice: 'XYZ'"),
        ("run_decode.py", ("t3", "--transport=pigeon"), "invalid choice: 'pigeon'"),
    ],
)
def test_wrong_flags(run, model, name, flags, why):
    outcome = run.fork(name, f"--model={model}", *flags).wait(10.0)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert why in outcome.stderr_line


def test_a_bad_line_of_a_file_is_told_before_any_work(run, model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "t3"}\n{"prompt": "t3", "top_p": 0}\n')
    outcome = run.fork("run_decode.py", "--model=/nowhere", f"--prompts-file={path}").wait(10.0)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert f"error: {path} line 2: top_p: Expected" in outcome.stderr_line


def test_a_folder_without_a_tokenizer(run, tmp_path):
    folder = make_tiny_llama(tmp_path / "bare")
    outcome = run.fork("run_decode.py", *decode_flags(folder, "--colocated"), "t3").wait()
    assert outcome.code == 2
    assert "has no tokenizer.json" in outcome.stderr_line


# --- Ends ---


def ended(script, seconds=10.0):
    """Its exit code after an interrupt: soon, in good order, with nothing to read but a word."""
    outcome = script.wait(seconds)
    assert outcome.stderr in ("", "interrupted\n"), outcome.stderr
    return outcome.code


def shared_memory():
    return sorted(Path("/dev/shm").iterdir())


def is_gone(pid):
    """Ended; perhaps not yet waited for by whoever inherited it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def children_of(pid):
    """Processes that a process has started and that run a script of ours by now."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in found if "run_prefill.py" in command_of(child)]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def child_of(decoder):
    """The prefiller that a decoder has started."""
    wait_until(lambda: len(children_of(decoder.pid)) == 1)
    return children_of(decoder.pid)[0]


def wait_until_busy(script):
    """It has worked for half a second from now on, which is not waiting."""

    def ticks():
        fields = Path(f"/proc/{script.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    start = ticks()
    wait_until(lambda: ticks() - start >= os.sysconf("SC_CLK_TCK") // 2)


LONG = ("--num-pages=16384", "--max-batch-tokens=1")
LONG_PROMPT = "t5 t6 t7 " * 2000


def test_interrupting_a_prefiller(run, long_model):
    """While it waits, and while it computes a prompt."""
    before = shared_memory()
    flags = (*MODE, *LONG, f"--model={long_model}")
    idle = run.start("run_prefill.py", *flags, "--listen=127.0.0.1:0")
    busy = run.fork("run_prefill.py", *flags, "--listen=127.0.0.1:0")
    decoder = run.fork(
        "run_decode.py", *flags, f"--prefill={busy.address()}", "--on-failure=fail", LONG_PROMPT
    )
    wait_until_busy(busy)
    busy.signal(signal.SIGINT)
    assert ended(busy) == 130
    failed = decoder.wait()
    assert failed.code == 1
    assert "error: prompt 0: prefiller lost: said goodbye: the node stops\n" in failed.stderr
    idle.address()
    idle.signal(signal.SIGINT)
    assert ended(idle) == 130
    assert shared_memory() == before


def test_interrupting_a_decoder(run, long_model, prefiller):
    """While a prompt is prefilled elsewhere, and while tokens are printed."""
    flags = (*MODE, "--num-pages=16384", f"--model={long_model}")
    busy = run.fork("run_prefill.py", *flags, "--max-batch-tokens=1", "--listen=127.0.0.1:0")
    where = f"--prefill={busy.address()}"
    fetching = run.fork("run_decode.py", *flags, where, LONG_PROMPT)
    wait_until_busy(busy)
    fetching.signal(signal.SIGINT)
    assert ended(fetching) == 130
    decoding = run.fork("run_decode.py", *flags, where, "--max-tokens=30000", "t3 t4")
    decoding.wait_for(r"t\d+ t\d+ t\d+")
    decoding.signal(signal.SIGINT)
    assert ended(decoding) == 130
    assert busy.poll() is None


def test_interrupting_a_decoder_with_a_child_while_it_decodes(run, long_model):
    before = shared_memory()
    flags = (*MODE, "--num-pages=16384", f"--model={long_model}", "--max-tokens=30000")
    decoder = run.fork("run_decode.py", *flags, "t3 t4")
    decoder.wait_for(r"t\d+ t\d+ t\d+")
    child = child_of(decoder)
    decoder.signal(signal.SIGINT)
    assert ended(decoder) == 130
    assert is_gone(child)
    assert shared_memory() == before


def test_a_reader_that_leaves_ends_a_decoder_and_its_child(run, long_model):
    """As `| head -1` does."""
    before = shared_memory()
    flags = (*MODE, "--num-pages=16384", f"--model={long_model}", "--max-tokens=30000")
    reader = ("bash", "-c", 'exec "$@" > >(head -c 9)', "bash")
    decoder = run.start("run_decode.py", *flags, "t3 t4", within=reader)
    child = child_of(decoder)
    outcome = decoder.wait()
    assert (outcome.code, outcome.stderr) == (141, "")
    assert len(outcome.stdout) == 9
    assert is_gone(child)
    assert shared_memory() == before


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
def test_interrupting_at_any_moment(run, long_model, seconds):
    """Most of these are inside the start, which is why time is the only handle."""
    before = shared_memory()
    flags = (*MODE, "--num-pages=16384", f"--model={long_model}")
    decoder = run.start("run_decode.py", *flags, "--max-tokens=60000", "t3 t4")
    prefiller = run.start("run_prefill.py", *flags, "--listen=127.0.0.1:0")
    for script in (decoder, prefiller):
        # Before its first import, Python's own handler may still be there and print a traceback.
        maps = Path(f"/proc/{script.pid}/maps")
        wait_until(lambda maps=maps: "numpy" in maps.read_text())
    time.sleep(seconds)
    children = children_of(decoder.pid)
    for script in (decoder, prefiller):
        script.signal(signal.SIGINT)
        assert ended(script) in (130, -signal.SIGINT)
    for child in children:
        wait_until(lambda child=child: is_gone(child), seconds=2.0)
    assert shared_memory() == before


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_prefiller_does_not_outlive_a_killed_decoder(run, long_model, stopped):
    flags = (*MODE, "--num-pages=16384", f"--model={long_model}", "--max-tokens=60000")
    decoder = run.fork("run_decode.py", *flags, "t3 t4")
    child = child_of(decoder)
    if stopped:
        os.kill(child, signal.SIGSTOP)
    decoder.signal(signal.SIGKILL)
    wait_until(lambda: is_gone(child), seconds=3.0)


def test_a_child_prefiller_ends_with_the_decoder_though_it_is_stopped(run, long_model):
    flags = (*MODE, "--num-pages=16384", f"--model={long_model}", "--max-tokens=2000")
    decoder = run.fork("run_decode.py", *flags, "t3 t4")
    decoder.wait_for(r"t\d+")
    child = child_of(decoder)
    os.kill(child, signal.SIGSTOP)
    assert decoder.wait().code == 0
    assert is_gone(child)
