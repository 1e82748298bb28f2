"""The bench of the two phases: its formula, and that it runs from end to end."""

import re

import pytest

from tests.bench import phases
from tests.tiny_models import make_tiny_llama


def feeds(**changes):
    given = {"prefill_seconds": 0.5, "step_seconds": 0.05, "output_tokens": 100, "batch": 10}
    return phases.decoders_per_prefiller(**(given | changes))


def test_a_decoder_needs_as_many_prompts_as_it_ends_requests():
    """10 requests in 100 steps of 0.05 s are 2 a second, which is what 0.5 s a prompt gives."""
    assert feeds() == pytest.approx(1.0)
    assert feeds(prefill_seconds=0.25) == pytest.approx(2.0)
    assert feeds(output_tokens=300) == pytest.approx(3.0)
    assert feeds(step_seconds=0.2) == pytest.approx(4.0)
    assert feeds(batch=20) == pytest.approx(0.5)


def test_a_prompt_is_prefilled_in_chunks_but_for_its_last_token():
    step = phases.Step
    assert phases.prefill_steps(1024, 512) == [step(512, 512), step(511, 1023)]
    assert phases.prefill_steps(1025, 512) == [step(512, 512), step(512, 1024)]
    assert phases.prefill_steps(2, 512) == [step(1, 1)]


def test_it_runs(tmp_path, capsys):
    folder = make_tiny_llama(tmp_path / "model")
    picture = tmp_path / "pictures" / "phases.svg"
    sizes = "--qo-lens 1 8 --kv-lens 4 32 --rounds 1 --dtype float32"
    ask = "--prompt-tokens 33 --output-tokens 5 --batch 3 --chunk 16"
    phases.main([f"--model={folder}", f"--picture={picture}", *sizes.split(), *ask.split()])
    out = capsys.readouterr().out
    assert re.search(r"^kv_len +qo_len 1 +qo_len 8$", out, re.MULTILINE)
    assert re.search(r"^ +4 +\d+\.\d ms +$", out, re.MULTILINE)
    assert re.search(r"^ +32 +\d+\.\d ms +\d+\.\d ms$", out, re.MULTILINE)
    assert re.search(r"outputs of 5 tokens: one prefiller feeds \d+\.\d\d decoders", out)
    assert b"<svg" in picture.read_bytes()
