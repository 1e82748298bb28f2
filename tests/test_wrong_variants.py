"""Proof that the protocol's tests can fail: one-line wrong variants of its code, each seen caught.

A variant replaces one piece of source text in a fresh copy of the messenger package and runs the
scenarios of `protocol_scenarios.py` on it. If the text is no longer in the source, or a variant
passes them all, the test fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import disagg.messenger
import disagg.transfer
from tests.protocol_scenarios import SCENARIOS
from tests.protocol_world import Code

PACKAGES = (Path(disagg.messenger.__file__).parent, Path(disagg.transfer.__file__).parent)

#: Import order: each module only needs those before it.
MODULES = (
    "imm_counter",
    "messages",
    "node_memory",
    "sharding",
    "liveness",
    "admission",
    "layer_writer",
    "prefillers",
    "prefiller",
    "decoder",
)


@dataclass(frozen=True)
class Variant:
    """`rule` is what it breaks: by doing `wrong` where `module` says `right`."""

    rule: str
    module: str
    right: str
    wrong: str


VARIANTS = (
    Variant(
        "1: an attempt id is unique",
        "decoder",
        "<< 32 | attempt.fetch.attempt",
        "<< 32 | attempt.fetch.attempt % 2",
    ),
    Variant(
        "1: an answer names the whole attempt id",
        "decoder",
        "self._attempt_id(attempt) == message.attempt_id",
        "attempt.fetch.attempt == message.attempt_id & 0xFFFFFFFF",
    ),
    Variant(
        "1: an imm counts from the asked peer alone",
        "imm_counter",
        "if expectation is not None and expectation.peer == peer:",
        "if expectation is not None:",
    ),
    Variant("1: an imm is never used twice", "decoder", "self._next_imm += 1", "pass"),
    Variant("2: what differs is refused", "messages", "if mine != other:", "if False:"),
    Variant(
        "2: every field is compared",
        "messages",
        "in Identity.__struct_fields__:",
        "in Identity.__struct_fields__[:-2]:",
    ),
    Variant(
        "3: cancel waits for the ack", "decoder", "self._cancel(attempt)", "self._end(attempt)"
    ),
    Variant(
        "3: a cancel that crosses KVReady is answered too",
        "decoder",
        "self._post(KVReleased(attempt=wish))",
        "pass",
    ),
    Variant(
        "3: a lost peer is fenced before its pages are free",
        "decoder",
        "attempt.move(AttemptState.FENCING)",
        "self._end(attempt)",
    ),
    Variant(
        "3: an unknown fate is fenced",
        "decoder",
        'self._transfer.close_peer(attempt.peer, "a posted write failed: its fate is unknown")',
        "self._end(attempt)",
    ),
    Variant(
        "3: freed only when what was posted has arrived",
        "decoder",
        "self._transfer.lower(attempt.imm, posted)",
        "self._end(attempt)",
    ),
    Variant(
        "3: the decoder waits for no more than was posted",
        "decoder",
        "self._transfer.lower(attempt.imm, posted)",
        "pass",
    ),
    Variant("3: posting stops before the ack", "prefiller", "self._writer.stop(attempt)", "pass"),
    Variant(
        "3: posted counts ended tickets too",
        "layer_writer",
        "None if posted is None else self.posted + posted",
        "posted",
    ),
    Variant(
        "3: posted is unknown once a posted write failed",
        "layer_writer",
        "posted = num_writes if isinstance(event, WritesDone) else event.posted",
        "posted = num_writes if isinstance(event, WritesDone) else event.posted or 0",
    ),
    Variant(
        "3: nothing is posted after a stop",
        "layer_writer",
        "if attempt is None or attempt.state is AttemptState.STOPPED:\n            return\n"
        "        layout",
        "if attempt is None:\n            return\n        layout",
    ),
    Variant(
        "4: source pages go back after their writes",
        "layer_writer",
        "if attempt.open_tickets or attempt.state in",
        "if attempt.state in",
    ),
    Variant(
        "5: a silent peer is given up",
        "liveness",
        "if silence >= self._peer_timeout]",
        "if silence >= 100 * self._peer_timeout]",
    ),
    Variant(
        "5: a silent decoder is given up",
        "prefiller",
        "self._liveness.heard(peer)",
        "pass",
    ),
    Variant(
        "5: a node beats while it has nothing to say",
        "prefiller",
        "if self._liveness.beat_due():",
        "if False:",
    ),
    Variant(
        "5: a request gets too old",
        "decoder",
        "elif self._clock() >= attempt.deadline:",
        "elif False:",
    ),
    Variant(
        "5: age is not silence",
        "decoder",
        "attempt.deadline = self._clock() + self._config.request_timeout",
        "attempt.deadline = self._clock() + self._config.peer_timeout",
    ),
    Variant("6: a lost write is told", "layer_writer", "self._on_failed(attempt, why)", "pass"),
    Variant(
        "6: a refused post is a lost write",
        "layer_writer",
        "self._note(attempt, ticket, end - first)\n        except TransferError as error:\n"
        "            self._fail(attempt, str(error))",
        "self._note(attempt, ticket, end - first)\n        except TransferError:\n            pass",
    ),
    Variant(
        "7: the tail's id is checked",
        "decoder",
        "if found == self._attempt_id(attempt):",
        "if True:",
    ),
    Variant(
        "7: the tail carries the id",
        "layer_writer",
        "self._memory.write_attempt_id(chunk.tail_slot, request.attempt_id)",
        "pass",
    ),
    Variant(
        "8: an epoch has one connection",
        "prefiller",
        "if link.hello.epoch == hello.epoch:",
        "if False:",
    ),
    Variant("8: answers count from the asked peer alone", "decoder", "or attempt.peer != peer", ""),
    Variant(
        "9: the policy is followed",
        "decoder",
        "return NextStep(self._config.on_failure)",
        "return NextStep.LOCAL",
    ),
    Variant(
        "9: decode waits for the whole count",
        "sharding",
        "num_layers * num_sent_pages * len(slices) + 1",
        "num_layers * num_sent_pages * len(slices)",
    ),
    Variant(
        "9: a retry goes elsewhere first",
        "prefillers",
        "key=lambda p: (p.num_failures, p.num_attempts)",
        "key=lambda p: (-p.num_failures, p.num_attempts)",
    ),
    Variant(
        "10: a limit of now is no refusal for ever",
        "prefiller",
        "permanent = why is not None",
        "permanent = True",
    ),
    Variant(
        "10: the engine's refusal is passed on",
        "prefiller",
        "except ValueError as error:",
        "except KeyError as error:",
    ),
    Variant(
        "10: what never fits is refused by the decoder",
        "prefillers",
        "permanent=everyone",
        "permanent=False",
    ),
    Variant(
        "10: what never fits is refused by the prefiller",
        "admission",
        "    if too_long is not None:\n        return too_long\n",
        "",
    ),
    Variant(
        "a layer is posted when the counter has passed it",
        "layer_writer",
        "min(counter - step.base, num_layers)",
        "min(counter - step.base + 1, num_layers)",
    ),
    Variant(
        "every layer between is posted when the counter jumps",
        "layer_writer",
        "range(step.next_layer, num_finished)",
        "range(max(step.next_layer, num_finished - 1), num_finished)",
    ),
    Variant(
        "the tail waits for its own increment",
        "layer_writer",
        "if counter < step.base + num_layers + 1:",
        "if counter < step.base + num_layers:",
    ),
    Variant(
        "a page goes with the chunk that fills it",
        "layer_writer",
        "end = (chunk.first_token + chunk.num_tokens) // layout.page_size",
        "end = -(-(chunk.first_token + chunk.num_tokens) // layout.page_size)",
    ),
    Variant(
        "the last chunk sends a partly filled page",
        "layer_writer",
        "end = len(request.page_indices)",
        "pass",
    ),
    Variant(
        "pages the decoder holds are not sent",
        "layer_writer",
        "max(chunk.first_token // layout.page_size, request.num_held_pages)",
        "chunk.first_token // layout.page_size",
    ),
    Variant(
        "a chunk starts at the page of its first token",
        "layer_writer",
        "max(chunk.first_token // layout.page_size, request.num_held_pages)",
        "max(-(-chunk.first_token // layout.page_size), request.num_held_pages)",
    ),
    Variant(
        "both chunks of a step are posted",
        "layer_writer",
        "                for chunk in step.chunks:\n",
        "                for chunk in step.chunks[:1]:\n",
    ),
    Variant(
        "a probe gets what it asked for and no more",
        "admission",
        "if not 0 < probe.num_pages <= limit:",
        "if False:",
    ),
    Variant(
        "ended tickets are settled before anything is withdrawn",
        "prefiller",
        "self._writer.settle(event for event in events if isinstance(event, WritesEnded))\n"
        "        for event in events:\n            self._on_event(event)\n",
        "for event in events:\n            self._on_event(event)\n"
        "        self._writer.settle("
        "event for event in events if isinstance(event, WritesEnded))\n",
    ),
)


def load(variant: Variant) -> Code:
    """A fresh copy of the package with the variant's text in place, then the real one put back."""
    paths = [p / f"{name}.py" for name in MODULES for p in PACKAGES if (p / f"{name}.py").exists()]
    names = {f"disagg.{path.parent.name}.{path.stem}": path for path in paths}
    real: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    try:
        for name in names:
            del sys.modules[name]
        for name, path in names.items():
            source = path.read_text()
            if path.stem == variant.module:
                assert source.count(variant.right) >= 1, f"{variant.right!r} left {path.name}"
                source = source.replace(variant.right, variant.wrong)
            spec = importlib.util.spec_from_loader(name, loader=None)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            exec(compile(source, f"wrong {path.name}", "exec"), module.__dict__)
        return Code(
            prefiller=sys.modules["disagg.messenger.prefiller"].PrefillerMessenger,
            decoder=sys.modules["disagg.messenger.decoder"].DecoderMessenger,
            prefillers=sys.modules["disagg.messenger.prefillers"].Prefillers,
            imm_counter=sys.modules["disagg.transfer.imm_counter"].ImmCounter,
        )
    finally:
        sys.modules.update(real)


def test_the_loader_alone_changes_nothing() -> None:
    code = load(Variant("none", "decoder", "import enum", "import enum"))
    for scenario in SCENARIOS[:-1]:
        scenario(code)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.rule)
def test_wrong_variant_is_caught(variant: Variant) -> None:
    code = load(variant)
    for scenario in SCENARIOS:
        try:
            scenario(code)
        except Exception as error:  # noqa: BLE001  (whatever the variant breaks, it is caught)
            print(f"caught by {scenario.__name__}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"no scenario notices: {variant.wrong!r} for {variant.right!r}")
