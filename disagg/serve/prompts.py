"""What to answer: the prompts of the command line and of a file, each with its sampling.

A file has one JSON object a line: `prompt` or `prompt_token_ids`, and any field of
`SamplingParams`, which goes before the flag of its name; null means the flag. All lines are checked
before any work is done; blank ones are skipped. No torch here.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from disagg.request import SamplingParams
from disagg.serve.options import given


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Text, or token ids as they are."""

    content: str | tuple[int, ...]
    sampling: SamplingParams


_FIELDS = {
    "prompt": Annotated[str, Meta(min_length=1)],
    "prompt_token_ids": Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)],
    **get_type_hints(SamplingParams),
}
_NULLABLE = [(name, kind | None, None) for name, kind in _FIELDS.items()]
#: Types only; what is in range is `SamplingParams`' to say.
_Line = msgspec.defstruct("_Line", _NULLABLE, forbid_unknown_fields=True)


def read_prompts(arguments: argparse.Namespace) -> tuple[Prompt, ...]:
    """Those of the command line, then those of the file. ValueError for what is wrong, OSError."""
    defaults = given(SamplingParams, arguments, stop=tuple(arguments.stop or ()))
    prompts = [Prompt(content=text, sampling=defaults) for text in arguments.prompts]
    if arguments.prompts_file is not None:
        prompts += _read_file(arguments.prompts_file, defaults)
    if not prompts:
        raise ValueError("nothing to answer; give a PROMPT or --prompts-file FILE")
    return tuple(prompts)


def _read_file(path: Path, defaults: SamplingParams) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            if line.strip():
                prompts.append(_read_line(line, defaults))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return prompts


def _read_line(line: bytes, defaults: SamplingParams) -> Prompt:
    found: dict[str, Any] = msgspec.structs.asdict(msgspec.json.decode(line, type=_Line))
    text, token_ids = found.pop("prompt"), found.pop("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise ValueError("expected either prompt or prompt_token_ids")
    sampling = {name: value for name, value in found.items() if value is not None}
    return Prompt(content=text or token_ids, sampling=replace(defaults, **sampling))
