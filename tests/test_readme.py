"""The README says what is there: its tree, its flags and defaults, its exit codes, its files."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from disagg.request import SamplingParams
from disagg.serve import exits, options
from disagg.serve.answer import as_json
from disagg.serve.default_model import MODEL_NAME
from tests.test_report import DONE, answered

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

#: Defaults that a parser holds as None, and that are not nothing.
NAMED_DEFAULTS = {"--model": MODEL_NAME, "--draft-model": "the model's own draft layer"}


def section(title: str, readme: str = README) -> str:
    """The text under a `##` heading."""
    _, heading, rest = readme.partition(f"\n## {title}\n")
    assert heading, f"the README has no section {title!r}"
    return rest.partition("\n## ")[0]


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def table(text: str, first_column: str) -> dict[str, list[str]]:
    """The cells after the first of each row, by the first; the table is known by its heading."""
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in text.partition(f"| {first_column} |")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    assert rows, f"no table of {first_column}"
    assert len({row[0] for row in rows}) == len(rows), "a row stands there twice"
    return {row[0]: row[1:] for row in rows}


def files_of_tree(block: str) -> set[str]:
    """Paths of the files in an indented tree, two spaces a level; a folder ends with "/"."""
    folders: list[str] = []
    files: set[str] = set()
    for line in block.splitlines():
        name, _, what = line.strip().partition(" ")
        level = (len(line) - len(line.lstrip())) // 2
        del folders[level:]
        if name.endswith("/"):
            folders.append(name)
        else:
            assert what.strip(), f"{name} has no description"
            files.add("".join([*folders, name]))
    return files


def described_flags(parser: argparse.ArgumentParser) -> dict[str, tuple[str, list[str]]]:
    """Each flag of a parser: its default as the README writes it, and its choices."""
    return {
        action.option_strings[-1]: (default_text(action), list(action.choices or ()))
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }


def default_text(action: argparse.Action) -> str:
    default = action.default
    if default is None or default == ():
        return NAMED_DEFAULTS.get(action.option_strings[-1], "none")
    if default is False:
        return "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


PREFILL = described_flags(options.prefill_parser())
DECODE = described_flags(options.decode_parser())


def test_the_tree_is_the_files() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("disagg/**/*.py")}
    found = {path for path in found if not path.endswith("__init__.py")}
    found |= {path.name for path in ROOT.glob("run_*.py")}
    assert files_of_tree(code_blocks(section("The tree"))[0]) == found


def test_every_flag_is_in_the_table_and_no_other() -> None:
    assert set(table(section("Flags"), "flag")) == set(PREFILL) | set(DECODE)


def test_flags_have_the_scripts_defaults_and_choices_of_the_parsers() -> None:
    for flag, (script, default, meaning) in table(section("Flags"), "flag").items():
        takers = {"run_prefill.py": flag in PREFILL, "run_decode.py": flag in DECODE}
        wanted = "both" if all(takers.values()) else next(name for name in takers if takers[name])
        assert script == wanted, flag
        for flags in (PREFILL, DECODE):
            if flag in flags:
                wanted_default, choices = flags[flag]
                assert default == wanted_default, flag
                assert all(f"`{choice}`" in meaning for choice in choices), flag


def test_both_parsers_agree_on_the_flags_they_share() -> None:
    assert all(PREFILL[flag] == DECODE[flag] for flag in set(PREFILL) & set(DECODE))


def test_fields_of_json_are_those_that_are_printed() -> None:
    found = as_json(0, answered(replace(DONE, error="why", num_drafts=3)))
    rows = table(section("Flags"), "field")
    assert set(rows) == set(found)
    for field in ("usage", "timings_ms", "transfer", "speculation", "logprobs"):
        inner = found[field][0] if field == "logprobs" else found[field]
        assert set(inner) <= set(re.findall(r"\w+", rows[field][0])), field
    assert all(reason in rows["finish_reason"][0] for reason in ("stop", "length", "error"))


def test_fields_of_a_prompts_file_are_those_that_are_read() -> None:
    meaning = table(section("Flags"), "flag")["--prompts-file"][2]
    assert set(re.findall(r"`(\w+)`", meaning)) == {
        "prompt",
        "prompt_token_ids",
        *SamplingParams.__dataclass_fields__,
    }


def test_exit_codes_are_those_of_the_scripts() -> None:
    codes = {str(value) for name, value in vars(exits).items() if name.startswith("EXIT_")}
    assert set(table(section("Flags"), "exit code")) == codes


def test_the_reading_order_names_files_that_exist_once() -> None:
    items = re.findall(r"^\d+\. (.*)$", section("Reading order"), re.MULTILINE)
    named = [re.match(r"`([^`]+)`: \w", item) for item in items]
    assert len(items) > 10
    assert all(named), "each item is a file and what to look for"
    paths = [match[1] for match in named if match]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert len(set(paths)) == len(paths)


def test_every_path_in_the_text_exists() -> None:
    paths = set(re.findall(r"`((?:disagg|tests|\.ci)/[^`\s*]*|run_\w+\.py|\w+\.txt)`", README))
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_commands_use_flags_that_exist() -> None:
    commands = [line for block in code_blocks(README) for line in block.splitlines()]
    for script, flags in (("run_prefill.py", PREFILL), ("run_decode.py", DECODE)):
        lines = [line for line in commands if f"python {script}" in line]
        assert lines, f"no command shows {script}"
        for line in lines:
            assert set(re.findall(r"--[\w-]+", line)) <= set(flags), line


def test_the_two_commands_are_there() -> None:
    for command in ('python run_decode.py "Why is the sky blue?"', "python -m pytest"):
        assert f"pip install -r requirements.txt && {command}\n" in README


def test_flags_named_in_the_text_exist() -> None:
    named = set(re.findall(r"`(--[\w-]+)", README))
    assert named <= set(PREFILL) | set(DECODE)


# --- The readers above read what is there ---


def test_a_tree_is_read_by_its_indentation() -> None:
    block = "run.py  a\ndisagg/\n  a.py  b\n  engine/\n    b.py  c\n  c.py  d\ntests/  e\n"
    assert files_of_tree(block) == {"run.py", "disagg/a.py", "disagg/engine/b.py", "disagg/c.py"}


def test_a_table_is_read_up_to_its_end() -> None:
    text = "| flag | x |\n|---|---|\n| `--a` | `1` |\n| `--b` | off |\n\n| other | y |\n"
    assert table(text, "flag") == {"--a": ["1"], "--b": ["off"]}
