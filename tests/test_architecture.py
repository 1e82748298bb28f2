"""The shape of the code: who imports whom, how long files are, what a module may hold.

    run_*.py --> serve --> engine --> model -----.
                   '-----> messenger --> transfer --> leaves (the modules of disagg/ itself)

Each check is a function from source text to a list of problems, so that the second half of this
file can show each of them a text with the fault in it.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Which parts each part may import, beside itself. A part is a folder of disagg/.
ARROWS = {
    "leaves": set(),
    "model": {"leaves"},
    "engine": {"model", "leaves"},
    "transfer": {"leaves"},
    "messenger": {"transfer", "leaves"},
    "serve": {"engine", "model", "messenger", "transfer", "leaves"},
    "scripts": {"serve"},
}

#: Read and run without torch: these parts, and these modules of serve.
TORCH_FREE_PARTS = {"leaves", "transfer", "messenger"}
TORCH_FREE_MODULES = {
    *("disagg.serve.child_prefiller", "disagg.serve.exits", "disagg.serve.options"),
    *("disagg.serve.check", "disagg.serve.prompts"),
}
#: Packages that are torch or bring it along.
TORCH = {"torch", "transformers", "safetensors"}

#: Imported by one file each, where tests put a fake. A file need not exist yet.
OPTIONAL_PACKAGES = {
    "pyverbs": "disagg/transfer/verbs_device.py",
    "flashinfer": "disagg/model/flashinfer_attention.py",
    "cuda": "disagg/cuda.py",
    "matplotlib": "disagg/trace_picture.py",
}

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_PACKAGE_LINES = 5500

#: Modules without a test file of their own, and the one whose subject they are part of.
TESTED_IN = {
    "disagg.config": "test_scheduler",
    "disagg.model.shape": "test_weights",
    "disagg.hooks": "test_engine",
    "disagg.kv_layout": "test_kv_cache",
    "disagg.request": "test_scheduler",
    "disagg.resource": "test_kv_cache",
    "disagg.shared_memory": "test_kv_cache",
    "disagg.trace_picture": "test_trace",
    "disagg.serve.exits": "test_scripts",
    "disagg.engine.attempts": "test_engine",
    "disagg.engine.sequence": "test_scheduler",
    "disagg.engine.stopwatch": "test_engine",
    "disagg.model.mtp": "test_drafter",
    "disagg.messenger.decoder": "test_protocol",
    "disagg.messenger.messages": "test_protocol",
    "disagg.messenger.messenger": "test_protocol",
    "disagg.messenger.prefiller": "test_protocol",
    "disagg.serve.child_prefiller": "test_scripts",
    "disagg.serve.answer": "test_stop_strings",
    "disagg.serve.options": "test_scripts",
    "disagg.transfer.interface": "test_transfer_conformance",
    "disagg.transfer.lease": "test_shm",
    "disagg.transfer.medium": "test_transfer_conformance",
    "disagg.transfer.transfer_engine": "test_transfer_conformance",
    "disagg.transfer.wire": "test_control",
}

#: Calls that may stand at module level: what they make does not change.
FIXED_CALLS = {
    *("logging.getLogger", "struct.Struct", "TypeVar", "frozenset", "Path"),
    *("msgspec.defstruct", "msgspec.Meta", "get_type_hints", "np.dtype", "re.compile"),
}
MUTABLE_LITERALS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MUTATING_METHODS = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "sort", "update"),
}


@dataclass(frozen=True)
class Module:
    """A source file: its path from the root ("disagg/engine/engine.py") and its text."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def name(self) -> str:
        """As it is imported: "disagg.engine.engine"; a package without its `__init__`."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def part(self) -> str:
        """Its key in `ARROWS`."""
        folders = self.path.split("/")[:-1]
        if not folders:
            return "scripts"
        return folders[1] if len(folders) > 1 else "leaves"


def read_modules(*patterns: str) -> list[Module]:
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


PACKAGE = read_modules("disagg/**/*.py")
SCRIPTS = read_modules("run_*.py")


def problems_in(check: Callable[[Module], list[str]], modules: list[Module]) -> list[str]:
    assert modules, "there is nothing to check"
    return [problem for module in modules for problem in check(module)]


# --- Reading imports ---


def imported(tree: ast.AST, known: set[str]) -> set[str]:
    """Names of all modules that are imported anywhere in `tree`.

    `from a.b import c` is `a.b.c` if that is one of the `known` modules, else `a.b`.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in known else base)
    return names


def part_of(name: str) -> str | None:
    """The part of a module by its import name; None if it is not disagg's."""
    first, *rest = name.split(".")
    if first != "disagg":
        return None
    return rest[0] if rest and rest[0] in ARROWS else "leaves"


def import_closure(roots: list[Module], modules: list[Module]) -> dict[str, set[str]]:
    """Every module of `modules` that importing `roots` loads, and what each of them imports."""
    by_name = {module.name: module for module in modules}
    loaded: dict[str, set[str]] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module.name in loaded:
            continue
        # What a function imports is not loaded with its module.
        loaded[module.name] = imported(without_functions(module.tree), set(by_name))
        waiting += [by_name[name] for name in loaded[module.name] if name in by_name]
    return loaded


def without_functions(tree: ast.Module) -> ast.Module:
    body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    return ast.Module(body=body, type_ignores=[])


# --- The checks: module(s) -> problems ---


def arrow_problems(module: Module) -> list[str]:
    """Imports against the arrows. Relative ones are refused: they hide where they point."""
    allowed = ARROWS[module.part] | {module.part}
    known = {other.name for other in PACKAGE}
    problems = []
    for name in sorted(imported(module.tree, known)):
        part = part_of(name)
        if name.startswith(".") or (part is not None and part not in allowed):
            problems.append(f"{module.path} ({module.part}) imports {name} ({part})")
    return problems


def engine_meets_messenger(module: Module) -> bool:
    parts = {part_of(name) for name in imported(module.tree, set())}
    return {"engine", "messenger"} <= parts


def torch_problems(roots: list[Module], modules: list[Module]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in import_closure(roots, modules).items()
        for other in sorted(others)
        if other.split(".")[0] in TORCH
    ]


def optional_package_problems(module: Module) -> list[str]:
    packages = {name.split(".")[0] for name in imported(module.tree, set())}
    return [
        f"{module.path} imports {package}, which is {home}'s alone"
        for package, home in OPTIONAL_PACKAGES.items()
        if package in packages and module.path != home
    ]


def code_lines(module: Module) -> set[int]:
    """Numbers of the lines that hold code: no blanks, no comments, no docstrings."""
    not_code = (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING),
        *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in not_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= lines_of(node)
    return lines


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def budget_problems(module: Module) -> list[str]:
    lines = code_lines(module)
    problems = []
    if len(lines) > MAX_FILE_LINES:
        problems.append(f"{module.path} has {len(lines)} code lines of {MAX_FILE_LINES}")
    for node in functions(module.tree):
        count = len(lines & lines_of(node))
        if count > MAX_FUNCTION_LINES:
            problems.append(f"{module.path}: {node.name} has {count} of {MAX_FUNCTION_LINES}")
    return problems


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def docstring_problems(module: Module) -> list[str]:
    """An empty `__init__.py` needs none; one that holds names would give them a second path."""
    is_init = module.path.endswith("__init__.py")
    if is_init and not module.source.strip():
        return []
    problems = []
    if not ast.get_docstring(module.tree):
        problems.append(f"{module.path} has no docstring")
    if is_init and len(module.tree.body) > 1:
        problems.append(f"{module.path} holds more than a docstring")
    return problems


def inner_import_problems(module: Module) -> list[str]:
    return [
        f"{module.path}:{node.lineno} imports in {function.name}()"
        for function in functions(module.tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def state_problems(module: Module) -> list[str]:
    """Module and class level hold constants: nothing there can change, and nobody changes it."""
    problems = []
    constants: set[str] = set()
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    for statement in [*module.tree.body, *(node for owner in classes for node in owner.body)]:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [node.id for target in targets for node in ast.walk(target) if is_name(node)]
        if isinstance(statement.value, MUTABLE_LITERALS):
            constants.update(names)
            problems += [
                f"{module.path}:{statement.lineno} {name} can change; name a constant in capitals"
                for name in names
                if name != name.upper()
            ]
        if isinstance(statement.value, ast.Call) and statement in module.tree.body:
            function = ast.unparse(statement.value.func)
            if function not in FIXED_CALLS:
                problems.append(f"{module.path}:{statement.lineno} holds a {function}()")
    return problems + [
        f"{module.path}:{node.lineno} changes a constant: {ast.unparse(node)}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global) or changed_name(node) in constants
    ]


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def changed_name(node: ast.AST) -> str | None:
    """`name[...] = ...`, `del name[...]` or `name.append(...)` and the like: the name."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
            return name if method in MUTATING_METHODS else None
    return None


def missing_test_problems(
    modules: list[str], tested_in: dict[str, str], tests: set[str]
) -> list[str]:
    """`modules` by import name, `tests` by file name without `.py`."""
    problems = [f"{name} is gone: take it out" for name in tested_in if name not in modules]
    for name in modules:
        own = f"test_{name.rpartition('.')[2]}"
        elsewhere = tested_in.get(name)
        if elsewhere is not None and own in tests:
            problems.append(f"{name} has {own}.py now: take it out of TESTED_IN")
        elif (elsewhere or own) not in tests:
            problems.append(f"{name} has no tests/{elsewhere or own}.py")
    return problems


# --- The tree as it is ---


def test_imports_follow_the_arrows() -> None:
    assert problems_in(arrow_problems, PACKAGE + SCRIPTS) == []


def test_engine_and_messenger_meet_in_one_file() -> None:
    meeting = [module.path for module in PACKAGE if engine_meets_messenger(module)]
    assert meeting == ["disagg/serve/node.py"]


def torch_free() -> list[Module]:
    modules = [m for m in PACKAGE if m.part in TORCH_FREE_PARTS or m.name in TORCH_FREE_MODULES]
    assert {m.name for m in modules} > TORCH_FREE_MODULES, (
        "TORCH_FREE_MODULES names one that is gone"
    )
    return modules


def test_torch_free_code_imports_no_torch() -> None:
    assert torch_problems(torch_free() + SCRIPTS, PACKAGE) == []


def test_torch_is_not_loaded_by_torch_free_code() -> None:
    lines = [f"import {module.name}" for module in torch_free()]
    lines += ["import sys", "assert 'torch' not in sys.modules, 'torch was loaded'"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_optional_packages_have_one_home() -> None:
    assert problems_in(optional_package_problems, PACKAGE) == []


def test_files_and_functions_are_short() -> None:
    assert problems_in(budget_problems, PACKAGE + SCRIPTS) == []


def test_the_package_is_short() -> None:
    total = sum(len(code_lines(module)) for module in PACKAGE)
    print(f"disagg/ has {total} code lines")
    assert 0 < total <= MAX_PACKAGE_LINES


def test_modules_open_with_a_docstring() -> None:
    assert problems_in(docstring_problems, PACKAGE + SCRIPTS) == []


def test_imports_stand_at_the_top() -> None:
    # The two scripts are the exception: they parse flags before they load torch, so that `--help`
    # and a wrong flag answer at once.
    assert problems_in(inner_import_problems, PACKAGE) == []


def test_modules_hold_no_state() -> None:
    assert problems_in(state_problems, PACKAGE + SCRIPTS) == []


def test_every_module_has_a_test_file() -> None:
    modules = [module.name for module in PACKAGE if not module.path.endswith("__init__.py")]
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert missing_test_problems(modules, TESTED_IN, tests) == []


def test_ruff_wants_annotations_in_all_of_disagg() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "ANN" in lint["select"]
    assert not any(code.startswith("ANN") for code in lint["ignore"])
    assert set(lint["per-file-ignores"]) == {"tests/**"}


# --- Each check sees its fault ---


def made_of(path: str, source: str) -> Module:
    return Module(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("disagg/config.py", "from disagg.model.layers import Linear"),
        ("disagg/config.py", "import disagg.serve.node"),
        ("disagg/transfer/shm.py", "from disagg.messenger import messages"),
        ("disagg/model/gqa.py", "from disagg.engine.runner import Runner"),
        ("disagg/engine/engine.py", "def f():\n    from disagg.messenger.messages import Hello"),
        ("disagg/messenger/decoder.py", "if TYPE_CHECKING:\n    import disagg.engine.engine"),
        ("disagg/engine/engine.py", "from ..messenger import messages"),
        ("disagg/engine/engine.py", "from disagg import messenger"),
        ("run_decode.py", "from disagg.engine.engine import Engine"),
    ],
)
def test_a_wrong_arrow_is_seen(path: str, source: str) -> None:
    assert len(arrow_problems(made_of(path, source))) == 1


def test_a_second_meeting_of_engine_and_messenger_is_seen() -> None:
    source = "import disagg.messenger.decoder\nfrom disagg.engine.engine import Engine"
    assert engine_meets_messenger(made_of("disagg/serve/commands.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn",
        "try:\n    from transformers import AutoConfig\nexcept ImportError:\n    pass",
        "from disagg.model import layers",
        "from disagg.model.layers import Linear",
    ],
)
def test_torch_is_seen_also_behind_another_module(source: str) -> None:
    layers = made_of("disagg/model/layers.py", "import torch")
    root = made_of("disagg/serve/options.py", source)
    assert len(torch_problems([root], [root, layers])) == 1


def test_an_optional_package_in_a_second_file_is_seen() -> None:
    source = "from cuda.bindings import driver"
    assert optional_package_problems(made_of("disagg/cuda.py", source)) == []
    assert len(optional_package_problems(made_of("disagg/model/gqa.py", source))) == 1


def test_code_lines_are_counted_without_comments_docstrings_and_blanks() -> None:
    source = (
        '"""Doc\n\nmore."""\n\n# no\nx = """two\nlines"""\n\ndef f():\n    "doc"\n    f()  # a\n'
    )
    assert code_lines(made_of("disagg/x.py", source)) == {6, 7, 9, 11}


def test_a_long_file_and_a_long_function_are_seen() -> None:
    longest = "def f():\n" + "    f()\n" * (MAX_FUNCTION_LINES - 1)
    assert budget_problems(made_of("disagg/x.py", longest)) == []
    assert len(budget_problems(made_of("disagg/x.py", longest + "    f()\n"))) == 1
    fullest = "f()\n" * MAX_FILE_LINES
    assert budget_problems(made_of("disagg/x.py", fullest)) == []
    assert len(budget_problems(made_of("disagg/x.py", fullest + "f()\n"))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("disagg/x.py", ""),
        ("disagg/x.py", "x = 1"),
        ("disagg/engine/__init__.py", '"""Doc."""\nfrom disagg.engine.engine import Engine'),
    ],
)
def test_a_missing_docstring_and_a_reexport_are_seen(path: str, source: str) -> None:
    assert len(docstring_problems(made_of(path, source))) == 1


def test_an_import_in_a_function_is_seen() -> None:
    source = "class A:\n    def f(self):\n        if self:\n            import os"
    assert len(inner_import_problems(made_of("disagg/x.py", source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "cache = {}",
        "seen: set[int] = {1}",
        "a, table = 1, 2\ntable = [i for i in x]",
        "QUEUE = deque()",
        "numbers = itertools.count()",
        "class A:\n    known = []",
        "def f():\n    global X\n    X = 1",
        "TABLE = {}\ndef f():\n    TABLE[1] = 2",
        "TABLE = {}\ndef f():\n    del TABLE[1]",
        "NAMES = []\ndef f():\n    NAMES.append(1)",
    ],
)
def test_state_is_seen(source: str) -> None:
    assert len(state_problems(made_of("disagg/x.py", source))) == 1


def test_constants_are_no_state() -> None:
    source = (
        "TABLE = {1: 2}\nlogger = logging.getLogger(__name__)\nOffsets = npt.NDArray[np.int64]\n"
        "def f():\n    mine = {}\n    mine[1] = TABLE[1]\n    mine.update(TABLE)\n"
    )
    assert state_problems(made_of("disagg/x.py", source)) == []


def test_a_module_without_a_test_file_is_seen() -> None:
    assert missing_test_problems(["disagg.a"], {}, {"test_a"}) == []
    assert missing_test_problems(["disagg.a"], {"disagg.a": "test_b"}, {"test_b"}) == []
    assert len(missing_test_problems(["disagg.a"], {}, {"test_b"})) == 1
    assert len(missing_test_problems(["disagg.a"], {"disagg.a": "test_b"}, {"test_c"})) == 1
    assert (
        len(missing_test_problems(["disagg.a"], {"disagg.a": "test_b"}, {"test_a", "test_b"})) == 1
    )
    assert len(missing_test_problems([], {"disagg.a": "test_b"}, {"test_b"})) == 1
