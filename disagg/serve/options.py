"""Command-line flags of both launch scripts.

No torch here, so that `--help` and a wrong flag answer at once.
"""

import argparse
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from disagg.config import ITEMSIZE, MAX_DRAFTS, OnFailure
from disagg.kv_layout import PageOrder
from disagg.serve.exits import EXIT_USAGE
from disagg.transfer.auto import TRANSPORTS
from disagg.transfer.wire import open_listener

#: Of a flag that is a time.
SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}

Made = TypeVar("Made")


class OneLineParser(argparse.ArgumentParser):
    """A wrong flag gets one line, as every other mistake does; `--help` shows the rest."""

    def error(self, message: str) -> NoReturn:
        """End with the usage exit code."""
        self.exit(EXIT_USAGE, f"error: {message}; see {self.prog} --help\n")


def address(text: str) -> tuple[str, int]:
    """HOST:PORT, as an argparse type."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


#: Of a flag that is an address.
PLACE: dict[str, Any] = {"type": address, "metavar": "HOST:PORT"}


def addresses(text: str) -> tuple[tuple[str, int], ...]:
    """HOST:PORT[,HOST:PORT...], as an argparse type."""
    return tuple(dict.fromkeys(address(part) for part in text.split(",")))


def positive(text: str) -> int:
    """A whole number from 1, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def writable(text: str) -> Path:
    """A file that can be written, as an argparse type: OSError before any work, not after it."""
    Path(text).open("a").close()
    return Path(text)


def _node_parser(script: str = "", what: str = "") -> OneLineParser:
    """With the flags that both nodes have; those in the first group must agree."""
    parser = OneLineParser(prog=script, description=what)
    same = parser.add_argument_group("must agree on both nodes")
    same.add_argument("--model", help="folder or hub name (default SmolLM2-135M-Instruct, fetched)")
    same.add_argument("--dtype", choices=[*ITEMSIZE], default="bfloat16", help="of weights and KV")
    same.add_argument("--page-size", type=positive, default=16, help="tokens a page")
    counts, what = range(MAX_DRAFTS + 1), f"tokens guessed at a time (up to {MAX_DRAFTS})"
    same.add_argument("--speculate", type=int, choices=counts, default=0, metavar="N", help=what)
    what = "folder or hub name of who guesses (default: the model's own draft layer, MTP)"
    same.add_argument("--draft-model", metavar="MODEL", help=what)
    same.add_argument("--kv-layout", choices=[str(order) for order in PageOrder], default="HND")
    own = parser.add_argument_group("may differ")
    own.add_argument("--tp", type=positive, default=1, help="ranks that share the model's heads")
    own.add_argument("--num-pages", type=positive, default=1024, help="size of the KV pool")
    own.add_argument("--max-batch-tokens", type=positive, default=512, help="tokens a step")
    own.add_argument("--peer-timeout", default=5.0, help="silence that means death", **SECONDS)
    own.add_argument("--transport", choices=TRANSPORTS, default="auto", help="for KV pages")
    own.add_argument("--rdma-device", metavar="NAME[:PORT],...", help="RDMA NICs to use")
    own.add_argument("--gid-index", type=int, metavar="N", help="their address")
    own.add_argument("--nic-map", metavar="MEMORY=NAME,..;..", help="which NICs move what")
    own.add_argument("--poll-cpu", type=int, metavar="N", help="where to poll the NICs")
    own.add_argument("--trace", type=writable, metavar="FILE", help="write a timeline of the run")
    own.add_argument("--verbose", action="store_true", help="log what the node does")
    return parser


def prefill_parser() -> argparse.ArgumentParser:
    """Flags of `run_prefill.py`."""
    parser = _node_parser("run_prefill.py", "Compute prompts' KV for decoders.")
    what = "where decoders connect (default %(default)s; port 0 picks one and prints it)"
    parser.add_argument("--listen", default="127.0.0.1:7400", help=what, **PLACE)
    return parser


def decode_parser() -> argparse.ArgumentParser:
    """Flags of `run_decode.py`."""
    parser = _node_parser("run_decode.py", "Answer prompts prefilled elsewhere.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--prompts-file", type=Path, metavar="FILE", help="a JSON object a line")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--check", help="only try a prefiller", **PLACE)
    what = "HOST:PORT[,HOST:PORT...] of those to use (default: start one as a child process)"
    where.add_argument("--prefill", dest="prefillers", type=addresses, default=(), help=what)
    where.add_argument("--colocated", action="store_true", help="prefill here, without a split")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout")
    parser.add_argument("--on-failure", choices=get_args(OnFailure), default="local")
    parser.add_argument("--request-timeout", default=120.0, help="for one prefill", **SECONDS)
    # Named as the fields of `SamplingParams`, which checks what is in range.
    group = parser.add_argument_group("sampling, for all prompts that do not say otherwise")
    group.add_argument("--max-tokens", type=positive, default=128, help="output tokens a prompt")
    group.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of those a share P")
    group.add_argument("--seed", type=int, help="makes draws repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    group.add_argument("--logprobs", type=int, metavar="N", help="of N tokens, with --json")
    return parser


def check_port(host: str, port: int) -> None:
    """TransferError if the port is taken: found at once, where loading a model takes seconds."""
    open_listener(host, port).close()


def given(kind: type[Made], arguments: argparse.Namespace, **more: object) -> Made:
    """A dataclass of the flags that are named as its fields, or as those of dataclasses in it."""
    kinds, known = get_type_hints(kind), vars(arguments) | more
    for name, part in kinds.items():
        if isinstance(part, type) and is_dataclass(part):
            known[name] = given(part, arguments)
    return kind(**{name: known[name] for name in kinds.keys() & known.keys()})


def forwarded_flags(arguments: argparse.Namespace) -> list[str]:
    """The node flags again, for a prefiller that a decoder starts as its child."""
    names = vars(_node_parser().parse_args([])).keys() - {"verbose"}
    trace = arguments.trace and arguments.trace.with_suffix(".prefiller.json")
    values = vars(arguments) | {"trace": trace}
    flags = [f"--{n.replace('_', '-')}={values[n]}" for n in names if values[n] is not None]
    return flags + ["--verbose"] * arguments.verbose
