"""Prompts and their sampling: from the command line, from a file, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.request import SamplingParams
from disagg.serve.options import decode_parser
from disagg.serve.prompts import Prompt, read_prompts

FLAGS = (
    *("--max-tokens=9", "--temperature=0.5", "--top-k=4", "--top-p=0.9", "--seed=7"),
    *("--stop=a", "--stop=b b", "--ignore-eos", "--logprobs=2"),
)
FROM_FLAGS = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_k=4,
    top_p=0.9,
    seed=7,
    stop=("a", "b b"),
    ignore_eos=True,
    logprobs=2,
)


@pytest.fixture
def read(tmp_path):
    """Prompts of a file with these lines, and of flags."""

    def read(text, *flags):
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_prompts(decode_parser().parse_args([*flags, f"--prompts-file={path}"]))

    return read


def test_without_flags_answers_are_greedy():
    arguments = decode_parser().parse_args(["Hi", ""])
    expected = tuple(Prompt(content=text, sampling=SamplingParams()) for text in ("Hi", ""))
    assert read_prompts(arguments) == expected


def test_flags_are_for_all_prompts_and_a_line_goes_before_them(read):
    found = read(
        '{"prompt": "one"}\n'
        "\n"
        '{"prompt_token_ids": [3, 4], "max_tokens": 1, "temperature": 0, "stop": ["c"]}\r\n'
        '{"prompt": "\u2028three", "stop": [], "ignore_eos": false, "top_p": 1, "seed": null}',
        *FLAGS,
        "zero",
    )
    assert found == (
        Prompt(content="zero", sampling=FROM_FLAGS),
        Prompt(content="one", sampling=FROM_FLAGS),
        Prompt(
            content=(3, 4),
            sampling=replace(FROM_FLAGS, max_tokens=1, temperature=0, stop=("c",)),
        ),
        Prompt(
            content="\u2028three",
            sampling=replace(FROM_FLAGS, stop=(), ignore_eos=False, top_p=1),
        ),
    )


def test_every_field_can_be_set_in_a_line(read):
    line = (
        '{"prompt": "x", "max_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 7,'
        ' "stop": ["a", "b b"], "ignore_eos": true, "logprobs": 2, "stop_token_ids": [5]}'
    )
    assert read(line)[0].sampling == replace(FROM_FLAGS, stop_token_ids=(5,))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "x"', "truncated"),
        ("x", "malformed"),
        ('["x"]', "Expected `object`, got `array`"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        ("{}", "expected either prompt or prompt_token_ids"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "expected either prompt or prompt_token_ids"),
        ('{"prompt": ""}', r"length >= 1 - at `\$.prompt`"),
        ('{"prompt": 5}', r"at `\$.prompt`"),
        ('{"prompt_token_ids": []}', r"length >= 1 - at `\$.prompt_token_ids`"),
        ('{"prompt_token_ids": [1, "2"]}', r"at `\$.prompt_token_ids\[1\]`"),
        ('{"prompt_token_ids": [-1]}', r">= 0 - at `\$.prompt_token_ids\[0\]`"),
        ('{"prompt": "x", "max_token": 5}', "unknown field `max_token`"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens: Expected .* >= 1; got 0"),
        ('{"prompt": "x", "max_tokens": "5"}', r"got `str` - at `\$.max_tokens`"),
        ('{"prompt": "x", "temperature": -1}', "temperature: Expected"),
        ('{"prompt": "x", "top_p": 2}', "top_p: Expected"),
        ('{"prompt": "x", "stop": ["a", ""]}', "stop: Expected"),
        ('{"prompt": "x", "stop": "a"}', r"got `str` - at `\$.stop`"),
        ('{"prompt": "x", "logprobs": 99}', "logprobs: Expected"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_field(read, line, why):
    line = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(ValueError, match=rf"prompts.jsonl line 3: .*{why}") as error:
        read(b'{"prompt": "x"}\n\n' + line + b'\n{"prompt": "y"}\n')
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("x", "--temperature=-1"), "temperature: Expected .*; got -1.0"),
        (("x", "--top-k=0"), "top_k: Expected"),
        (("x", "--top-p=nan"), "top_p: Expected .*; got nan"),
        (("x", "--seed=-1"), "seed: Expected"),
        (("x", "--stop="), "stop: Expected"),
        (("x", "--logprobs=99"), "logprobs: Expected"),
        ((), "give a PROMPT or --prompts-file FILE"),
        (("--prompts-file=/nowhere/x",), "No such file or directory: '/nowhere/x'"),
        (("--prompts-file=/",), "Is a directory"),
    ],
)
def test_flags_that_cannot_be(flags, why):
    with pytest.raises((ValueError, OSError), match=why):
        read_prompts(decode_parser().parse_args(flags))


def test_a_file_without_prompts(read):
    with pytest.raises(ValueError, match="give a PROMPT"):
        read("\n \n")
