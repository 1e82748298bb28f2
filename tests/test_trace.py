"""Timelines: what a run writes is valid, in order and complete; files are joined and drawn."""

from __future__ import annotations

import json
import signal
from itertools import pairwise

import pytest

from disagg.trace import Event, Timeline, Trace
from disagg.trace_picture import main, merge
from tests.nodes import ask, pair, prompt_of, tokens_of
from tests.scripts import scripts
from tests.test_scripts import LONG, LONG_PROMPT, MODE, decode_flags, wait_until_busy
from tests.tiny_models import make_tiny_llama, save_word_tokenizer

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=65536)
    return save_word_tokenizer(folder)


@pytest.fixture
def run(tmp_path):
    with scripts(tmp_path) as starter:
        yield starter


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """Of a decoder and a prefiller: 29 tokens in chunks of 8, then two at once."""
    folder = tmp_path_factory.mktemp("traces")
    paths = folder / "decoder.json", folder / "prefiller.json"
    with pair(
        model, decoder={"trace": paths[0]}, prefiller={"trace": paths[1], "max_batch_tokens": 8}
    ) as nodes:
        tokens_of(ask(nodes.decoder, prompt_of(30), 4))
        for handle in [ask(nodes.decoder, prompt_of(n), 2) for n in (9, 12)]:
            tokens_of(handle)
        nodes.wait_for_balance()
    return paths


def spans_of(path):
    """Spans of each category in order of time, the fields of all events checked."""
    found = json.loads(path.read_text())
    tracks, spans = {}, {}
    for event in found["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            tracks[event["tid"]] = (event["name"], event["args"]["name"])
        else:
            assert event["ph"] == "X"
            assert event["ts"] > 0 and event["dur"] >= 0 and event["name"]
            spans.setdefault(event["cat"], []).append(event)
    events = sorted((e for group in spans.values() for e in group), key=lambda e: e["ts"])
    for tid in {event["tid"] for event in events}:
        what, name = tracks[tid]
        mine = [event for event in events if event["tid"] == tid]
        assert what == "thread_name" and {name.startswith(e["cat"]) for e in mine} == {True}
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(mine)), name
    assert tracks[0][0] == "process_name"
    return {cat: sorted(group, key=lambda e: e["ts"]) for cat, group in spans.items()}


def end_of(event):
    return event["ts"] + event["dur"]


def test_every_layer_of_every_step_and_its_writes_are_there_in_order(files):
    spans = spans_of(files[1])
    assert [step["name"] for step in spans["steps"][:4]] == ["8 tokens"] * 3 + ["5 tokens"]
    names = [f"layer {layer}" for layer in range(NUM_LAYERS)] + ["norm, tails"]  # samples nothing
    assert [e["name"] for e in spans["forward"]] == names * len(spans["steps"])
    first, *others = spans["prefills"]
    assert [first["name"], *sorted(e["name"] for e in others)] == [
        "29 tokens",
        "11 tokens",
        "8 tokens",
    ]
    writes = [e for e in spans["layer writes"] if e["args"]["attempt"] == first["args"]["attempt"]]
    for layer in range(NUM_LAYERS):
        name = f"layer {layer}"
        computed = [e for e in spans["forward"] if e["name"] == name][:4]
        sent = [e for e in writes if e["name"] == name]
        assert [e["args"]["writes"] for e in sent] == [2, 2, 2, 2]
        for layer_span, write in zip(computed, sent, strict=True):
            assert end_of(layer_span) <= write["ts"] <= end_of(write) <= end_of(first)
    (tail,) = (e for e in writes if e["name"] == "tail")
    assert tail["ts"] >= end_of([e for e in spans["forward"] if e["name"] == "norm, tails"][3])
    for step in spans["steps"]:
        inside = [e for e in spans["forward"] if step["ts"] <= e["ts"] <= end_of(step)]
        assert len(inside) == len(names)


def test_a_decoder_tells_its_requests_and_when_their_kv_came(files):
    spans, theirs = spans_of(files[0]), spans_of(files[1])
    for number in (1, 2, 3):
        queued, prefill, decode = spans[f"request {number}"]
        assert [e["name"] for e in (queued, prefill, decode)] == ["queued", "prefill", "decode"]
        assert end_of(prefill) == pytest.approx(decode["ts"], abs=1)
    assert len(spans["KV transfer"]) == 3
    came, last = spans["KV transfer"][0], theirs["layer writes"]
    job = [e for e in last if e["args"]["attempt"] == theirs["prefills"][0]["args"]["attempt"]]
    assert came["ts"] == pytest.approx(job[0]["ts"], abs=50_000)
    assert end_of(came) > max(e["ts"] for e in job)
    assert end_of(came) <= end_of(spans["request 1"][1])
    assert [e["args"]["largest"] for e in spans["steps"]] == [1] * len(spans["steps"])


def test_two_files_are_one_picture_and_one_file(files, tmp_path, capsys):
    merged, picture = tmp_path / "merged.json", tmp_path / "timeline.svg"
    main([*map(str, files), "-o", str(merged), "--picture", str(picture)])
    text = picture.read_text()
    assert "<svg" in text
    together = json.loads(merged.read_text())["traceEvents"]
    single = [json.loads(path.read_text())["traceEvents"] for path in files]
    assert len(together) == sum(map(len, single))
    assert len({event["pid"] for event in together}) == 2, "one process, but two nodes"
    main([str(merged), "--picture", str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").read_bytes()[1:4] == b"PNG"


def test_files_are_put_on_the_first_ones_clock():
    event = Event(ph="X", name="a", pid=7, tid=1, cat="steps", ts=5e6, dur=3.0)
    decoder = Timeline(trace_events=[event], other_data={"clock lag of 9": 2.5, "epoch": "1"})
    far = Timeline(trace_events=[event], other_data={"epoch": "9"})
    near = Timeline(trace_events=[event], other_data={"epoch": "8"})
    assert [e.ts for e in merge([decoder, far, near]).trace_events] == [5e6, 7.5e6, 5e6]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("garbage", "expected a file that --trace wrote"),
        ("[1, 2]", "expected a file that --trace wrote"),
        ('{"traceEvents": [{"ph": "X"}], "otherData": {}}', "missing required field `name`"),
        ('{"traceEvents": [], "otherData": {}}', "holds no spans"),
    ],
)
def test_a_file_that_is_no_trace_gets_one_line(tmp_path, capsys, text, why):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([str(path), "--picture", str(tmp_path / "a.svg")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("error: ") and why in line


def test_a_picture_of_no_known_kind_gets_one_line(files, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(files[0]), "--picture", str(tmp_path / "a.docx")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "docx" in line


def test_overlapping_spans_go_to_lanes():
    trace = Trace("node", on=True)
    for name, start, end in (("a", 1, 4), ("b", 2, 6), ("c", 4, 5), ("d", 5.5, 7)):
        trace.span("writes", name, start, end)
    events = trace.timeline().trace_events
    assert {e.name: e.tid for e in events if e.ph == "X"} == {"a": 1, "b": 2, "c": 1, "d": 1}
    names = {e.tid: e.args["name"] for e in events if e.ph == "M"}
    assert names == {0: "node", 1: "writes", 2: "writes 2"}


def test_a_trace_that_is_off_keeps_nothing():
    trace = Trace()
    trace.span("a", "b", 1, 2)
    trace.lap("a")
    trace.lap("a", "b")
    assert (trace._spans, trace._laps) == ([], {})


def test_a_child_prefiller_writes_a_file_beside_ours(run, model, tmp_path):
    flags = ("--trace=out.json", "--max-tokens=3", "t5 t6 t7")
    outcome = run.start("run_decode.py", *MODE, f"--model={model}", *flags).wait()
    assert outcome.code == 0, outcome
    assert not outcome.stderr
    assert len(spans_of(tmp_path / "out.json")["steps"]) == 3
    assert len(spans_of(tmp_path / "out.prefiller.json")["layer writes"]) == NUM_LAYERS + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_written_too(run, model, tmp_path, number):
    flags = (*MODE, *LONG, f"--model={model}")
    prefiller = run.fork(
        "run_prefill.py", *flags, "--listen=127.0.0.1:0", f"--trace={tmp_path}/p.json"
    )
    where = f"--prefill={prefiller.address()}"
    decoder = run.fork("run_decode.py", *flags, where, f"--trace={tmp_path}/d.json", LONG_PROMPT)
    wait_until_busy(prefiller)
    for script in (decoder, prefiller):
        script.signal(number)
        assert script.wait().code == 128 + number
    assert spans_of(tmp_path / "p.json")["forward"]
    assert [e["name"] for e in spans_of(tmp_path / "d.json")["request 1"]] == ["queued"]


@pytest.mark.parametrize("name", ["run_prefill.py", "run_decode.py"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(run, name, tmp_path):
    prompt = ("t3",) if name == "run_decode.py" else ()
    flags = ("--model=not-there", f"--trace={tmp_path}/no/out.json", *prompt)
    outcome = run.fork(name, *flags).wait()
    assert outcome.code == 2
    assert f"No such file or directory: '{tmp_path}/no/out.json'" in outcome.stderr_line


def test_a_file_that_the_child_cannot_write_is_refused(run, model, tmp_path):
    (tmp_path / "out.prefiller.json").mkdir()
    outcome = run.fork(
        "run_decode.py", *decode_flags(model), f"--trace={tmp_path}/out.json", "t3"
    ).wait()
    assert outcome.code == 2
    assert f"Is a directory: '{tmp_path}/out.prefiller.json'" in outcome.stderr_line


def test_a_disk_that_is_full_at_the_end_is_told(run, model):
    flags = ("--colocated", "--trace=/dev/full", "t3")
    outcome = run.fork("run_decode.py", *decode_flags(model), *flags).wait()
    assert outcome.code == 2
    last = outcome.stderr.splitlines()[-1]
    assert last == "error: [Errno 28] No space left on device: '/dev/full'"


def test_nothing_to_do_and_nothing_to_read_are_one_line(tmp_path, capsys):
    for arguments, said in (
        (["a.json"], "nothing to do; give -o or --picture"),
        ([str(tmp_path / "none.json"), "-o", "b.json"], "No such file or directory: '"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and line.startswith("error: ") and said in line
