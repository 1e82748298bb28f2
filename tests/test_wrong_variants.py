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
from tests.protocol_rarities import RARITIES
from tests.protocol_scenarios import SCENARIOS
from tests.protocol_world import Code

PACKAGES = (Path(disagg.messenger.__file__).parent, Path(disagg.transfer.__file__).parent)

#: Import order: each module only needs those before it.
MODULES = (
    "imm_counter",
    "messages",
    "sharding",
    "messenger",
    "prefiller",
    "decoder",
)


@dataclass(frozen=True)
class Variant:
    """`rule` is what it breaks: by doing `wrong` where `module` says `right`.

    `caught_by` names the scenario that sees it, by a check of its own or by the `error` it causes.
    """

    rule: str
    module: str
    right: str
    wrong: str
    caught_by: str
    error: type[Exception] = AssertionError


VARIANTS = (
    Variant(
        "1: an attempt is cancelled by whoever asked for it",
        "prefiller",
        " and attempt.link is link:",
        ":",
        "cancels_of_others_do_not_count",
    ),
    Variant(
        "1: an imm counts from the asked peer alone",
        "imm_counter",
        "if expectation is not None and expectation.peer == peer:",
        "if expectation is not None:",
        "answers_of_others_do_not_count",
    ),
    Variant(
        "1: an imm is never used twice",
        "decoder",
        "self._next_imm += 1",
        "pass",
        "without_faults",
        ValueError,
    ),
    Variant(
        "2: what differs is refused",
        "messenger",
        "if mine != other:",
        "if False:",
        "each_difference_is_refused",
    ),
    Variant(
        "2: every field is compared",
        "messenger",
        "in Identity.__struct_fields__:",
        "in Identity.__struct_fields__[:-2]:",
        "each_difference_is_refused",
    ),
    Variant(
        "3: cancel waits for the ack",
        "decoder",
        "self._cancel(attempt)",
        "self._end(attempt)",
        "without_faults",
    ),
    Variant(
        "3: every attempt ends once",
        "decoder",
        "            return  # it ended by itself while the cancel was on its way",
        "            self.post(KVEnded(attempt=wish))\n            return",
        "cancels_cross_everything",
        KeyError,
    ),
    Variant(
        "3: a lost peer is fenced before its pages are free",
        "decoder",
        "attempt.move(AttemptState.FENCING)",
        "self._end(attempt)",
        "cancelled_while_stopped",
    ),
    Variant(
        "3: freed only when what was posted has arrived",
        "decoder",
        "self.transfer.lower(attempt.imm, message.posted)",
        "self._end(attempt)",
        "cancels_cross_everything",
    ),
    Variant(
        "3: the decoder waits for no more than was posted",
        "decoder",
        "self.transfer.lower(attempt.imm, message.posted)",
        "pass",
        "cancel_gives_back_soon",
    ),
    Variant(
        "3: posting stops before the answer",
        "prefiller",
        "(self.transfer.withdraw(list(attempt.open_tickets)) or 0)",
        "0",
        "without_faults",
    ),
    Variant(
        "3: posted counts ended tickets too",
        "prefiller",
        "posted = attempt.num_ended + (",
        "posted = (",
        "posted_is_exact",
    ),
    Variant(
        "3: nothing is posted after a stop",
        "prefiller",
        "if attempt is None or attempt.is_stopped:",
        "if attempt is None:",
        "posted_is_exact",
    ),
    Variant(
        "4: source pages go back after their writes",
        "prefiller",
        "if attempt.open_tickets or not (",
        "if not (",
        "cancels_cross_everything",
    ),
    Variant(
        "5: a silent peer is given up",
        "messenger",
        "if self._silence[peer] >= self.config.peer_timeout:",
        "if self._silence[peer] >= 100 * self.config.peer_timeout:",
        "silence_ends_a_request",
    ),
    Variant(
        "5: a silent decoder is given up",
        "messenger",
        "self._silence[event.peer] = 0.0",
        "pass",
        "silent_decoder_is_given_up",
    ),
    Variant(
        "5: a prefiller beats while it has nothing to say",
        "messenger",
        "if now >= self._next_beat:",
        "if now >= self._next_beat and self.hello.role == 'decoder':",
        "without_faults",
    ),
    Variant(
        "5: a request gets too old",
        "decoder",
        "elif self.clock() >= attempt.deadline:",
        "elif False:",
        "queueing_is_not_silence",
    ),
    Variant(
        "5: age is not silence",
        "decoder",
        "attempt.deadline = self.clock() + self.config.request_timeout",
        "attempt.deadline = self.clock() + self.config.peer_timeout",
        "queueing_is_not_silence",
    ),
    Variant(
        "6: a lost write is told",
        "prefiller",
        "self._send(attempt.link.peer, stopped)",
        "pass",
        "lost_write_is_told",
    ),
    Variant(
        "6: a refused post is a lost write",
        "prefiller",
        "except TransferError as error:\n",
        "except TransferError as error:\n            return\n",
        "lost_write_is_told",
    ),
    Variant(
        "7: the tail's id is checked",
        "decoder",
        "if found == attempt.fetch.attempt:",
        "if True:",
        "foreign_tail_is_seen",
    ),
    Variant(
        "7: the tail carries the id",
        "prefiller",
        'tail["attempt_id"] = request.attempt_id',
        "pass",
        "without_faults",
    ),
    Variant(
        "8: an epoch has one connection",
        "prefiller",
        "if greeted.epoch == hello.epoch:",
        "if False:",
        "same_process_replaces_its_connection",
    ),
    Variant(
        "8: answers count from the asked peer alone",
        "decoder",
        "or attempt.peer != peer",
        "",
        "answers_of_others_do_not_count",
    ),
    Variant(
        "9: the policy is followed",
        "decoder",
        "else self.config.on_failure",
        "else 'local'",
        "policy_is_followed",
    ),
    Variant(
        "9: decode waits for the whole count",
        "sharding",
        "for n, each in kinds for s in each) + 1",
        "for n, each in kinds for s in each)",
        "queueing_is_not_silence",
    ),
    Variant(
        "9: a retry goes elsewhere first",
        "decoder",
        "key=lambda p: (p.num_failures, load[p.peer])",
        "key=lambda p: (-p.num_failures, load[p.peer])",
        "policy_is_followed",
    ),
    Variant(
        "10: a limit of now is no refusal for ever",
        "prefiller",
        "permanent=False",
        "permanent=True",
        "a_limit_of_now_is_not_never",
    ),
    Variant(
        "10: the engine's refusal is passed on",
        "prefiller",
        "except ValueError as error:",
        "except KeyError as error:",
        "what_the_engine_refuses_is_told",
        ValueError,
    ),
    Variant(
        "10: what never fits is refused by the decoder",
        "decoder",
        "permanent = len(pools) == len(self._prefillers)",
        "permanent = False",
        "never_is_not_later",
    ),
    Variant(
        "a layer is posted when the counter has passed it",
        "prefiller",
        "min(counter - pace.base, num_layers + 1)",
        "min(counter - pace.base + 1, num_layers + 1)",
        "without_faults",
    ),
    Variant(
        "every layer between is posted when the counter jumps",
        "prefiller",
        "range(pace.counter - pace.base, num_finished)",
        "range(max(pace.counter - pace.base, num_finished - 1), num_finished)",
        "without_faults",
    ),
    Variant(
        "the tail waits for its own increment",
        "prefiller",
        "counter - pace.base, num_layers + 1)",
        "counter - pace.base + (counter == pace.base + num_layers), num_layers + 1)",
        "cancels_cross_everything",
    ),
    Variant(
        "a page goes with the chunk that fills it",
        "prefiller",
        "end = (chunk.first_token + len(chunk.token_ids)) // layout.page_size",
        "end = -(-(chunk.first_token + len(chunk.token_ids)) // layout.page_size)",
        "without_faults",
    ),
    Variant(
        "the last chunk sends a partly filled page",
        "prefiller",
        "end = len(request.page_indices)",
        "pass",
        "without_faults",
    ),
    Variant(
        "a chunk starts at the page of its first token",
        "prefiller",
        "first = chunk.first_token // layout.page_size",
        "first = -(-chunk.first_token // layout.page_size)",
        "without_faults",
    ),
    Variant(
        "both chunks of a step are posted",
        "prefiller",
        "                for chunk in chunks:\n",
        "                for chunk in chunks[:1]:\n",
        "without_faults",
    ),
    Variant(
        "a probe gets what it asked for and no more",
        "prefiller",
        "if num_pages > (most := messages.MAX_PROBE_PAGES):",
        "if num_pages < (most := 0):",
        "probe_is_served",
    ),
    Variant(
        "5: a starved look is not silence",
        "messenger",
        "observed = min(now - self._last_look, interval)",
        "observed = now - self._last_look",
        "starved_is_not_silence",
    ),
    Variant(
        "5: a fence that takes long is told",
        "decoder",
        "self.post(KVStuck(attempt=attempt.fetch.attempt))",
        "pass",
        "cancelled_while_stopped",
    ),
    Variant(
        "5: a fence that takes long is told once",
        "decoder",
        "attempt.deadline = math.inf",
        "pass",
        "cancelled_while_stopped",
    ),
    Variant(
        "5: a Hello is due",
        "messenger",
        "isinstance(message, Hello) or not is_greeted:",
        "isinstance(message, Hello):",
        "beats_are_no_greeting",
    ),
    Variant(
        "5: who was refused and goes on is not waited for",
        "messenger",
        'self._close_peer(event.peer, "it goes on")',
        "pass",
        "another_release_is_refused_at_once",
    ),
    Variant(
        "5: an unanswered Cancel ends",
        "decoder",
        "elif attempt.state in (AttemptState.CANCELLING, AttemptState.DRAINING):",
        "elif attempt.state is AttemptState.DRAINING:",
        "unanswered_cancel_ends_with_a_fence",
    ),
    Variant(
        "3: an unanswered Cancel ends with a fence",
        "decoder",
        'self._close_peer(attempt.peer, "no answer to a Cancel in time")',
        "self._end(attempt)",
        "unanswered_cancel_ends_with_a_fence",
    ),
    Variant(
        "5: draining ends",
        "decoder",
        "elif attempt.state in (AttemptState.CANCELLING, AttemptState.DRAINING):",
        "elif attempt.state is AttemptState.CANCELLING:",
        "writes_that_never_arrive_end_with_a_fence",
    ),
    Variant(
        "3: a rejection after posting frees nothing",
        "decoder",
        " or attempt.state >= AttemptState.DRAINING:",
        ":",
        "rejected_after_posting_is_fenced",
    ),
    Variant(
        "3: a peer that was given up says no more",
        "messenger",
        "case MessageReceived() if event.peer in self._closed:",
        "case MessageReceived() if False:",
        "rejected_after_posting_is_fenced",
    ),
    Variant(
        "5: a late Cancel has time",
        "decoder",
        "attempt.deadline = max(attempt.deadline, self.clock() + self.config.peer_timeout)",
        "pass",
        "a_cancel_near_the_deadline_has_time",
    ),
    Variant(
        "3: finished is not 'nothing posted'",
        "prefiller",
        "if attempt is not None and attempt.link is link:\n                    self._stop(",
        "if attempt is None:\n"
        "                    lie = PrefillStopped(attempt_id=message.attempt_id, why='')\n"
        "                    self._send(peer, lie)\n"
        "                else:\n                    self._stop(",
        "finished_still_waits_for_the_count",
    ),
    Variant(
        "3: no more is posted than was asked for",
        "decoder",
        "if message.posted > attempt.count or ",
        "if ",
        "lies_about_posted_end_the_connection_alone",
        AssertionError,
    ),
    Variant(
        "8: a lost decoder is forgotten",
        "prefiller",
        "self._links.pop(peer, None)",
        "self._links.get(peer)",
        "lost_peers_leave_nothing",
    ),
    Variant(
        "8: one process has one connection, under two names too",
        "decoder",
        "if twin is not prefiller:",
        "if False:",
        "a_second_name_is_not_a_second_prefiller",
    ),
    Variant(
        "2: page indices are in range",
        "prefiller",
        "max(pages, default=0) < theirs.num_pages",
        "True",
        "requests_that_make_no_sense_are_rejected",
    ),
    Variant(
        "2: another count is refused",
        "prefiller",
        "request.expected_count == count",
        "True",
        "requests_that_make_no_sense_are_rejected",
    ),
    Variant(
        "1: an id is asked for once",
        "prefiller",
        "if request.attempt_id in self._attempts:",
        "if False:",
        "requests_that_make_no_sense_are_rejected",
    ),
    Variant(
        "8: one Hello a connection",
        "messenger",
        "case Hello() if not is_greeted:",
        "case Hello():",
        "requests_that_make_no_sense_are_rejected",
    ),
    Variant(
        "9: decode waits for the last write",
        "decoder",
        "self.transfer.expect(attempt.peer, attempt.imm, count)",
        "self.transfer.expect(attempt.peer, attempt.imm, max(1, count - 1))",
        "without_faults",
    ),
    Variant(
        "5: both halves beat",
        "messenger",
        "if now >= self._next_beat:",
        "if False:",
        "without_faults",
    ),
    Variant(
        "5: a decoder beats",
        "messenger",
        "if now >= self._next_beat:",
        "if now >= self._next_beat and self.hello.role == 'prefiller':",
        "queueing_is_not_silence",
    ),
    Variant(
        "3: a fence is one connection's",
        "decoder",
        "if attempt.state is AttemptState.FENCING and attempt.peer == event.peer:",
        "if attempt.state is AttemptState.FENCING:",
        "cancelled_while_stopped",
    ),
    Variant(
        "9: retries end",
        "decoder",
        "again = attempt.imm and attempt.fetch.retries < len(self._prefillers)",
        "again = True",
        "retries_end",
    ),
    Variant(
        "a malformed message is nobody's crash",
        "messages",
        "(msgspec.DecodeError, ValueError, RecursionError)",
        "(msgspec.DecodeError, ValueError)",
        "deeply_nested_message_is_malformed",
        RecursionError,
    ),
    Variant(
        "the fastest beat tells the clocks' difference",
        "decoder",
        "min(prefiller.clock_lag, lag)",
        "lag",
        "exposed_transfer_is_told",
    ),
    Variant(
        "times of a tail are on the prefiller's clock",
        "decoder",
        "now - lag - forward_end_ns",
        "now - forward_end_ns",
        "exposed_transfer_is_told",
    ),
    Variant(
        "a tail tells when the first write was posted",
        "prefiller",
        "attempt.first_post = min(attempt.first_post, now)",
        "attempt.first_post = now",
        "exposed_transfer_is_told",
    ),
    Variant(
        "a clock is told before the first tail",
        "prefiller",
        "        self._beat(peer)",
        "        pass",
        "exposed_transfer_is_told",
    ),
    Variant(
        "2: ranks that cannot share the heads are refused",
        "messenger",
        "(heads % tp and tp % heads) or",
        "",
        "ranks_that_cannot_share_are_refused",
        ValueError,
    ),
    Variant(
        "2: each rank has a region",
        "messenger",
        " or not num_ranks or num_ranks % tp",
        "",
        "ranks_that_cannot_share_are_refused",
        ValueError,
    ),
    Variant(
        "a group's pages go to it alone",
        "prefiller",
        "[request.dp_rank * link.hello.tp :]",
        "",
        "ranks_that_shard_differently",
    ),
    Variant(
        "a group that is not there is refused",
        "prefiller",
        "request.dp_rank < num_groups",
        "True",
        "requests_that_make_no_sense_are_rejected",
    ),
    Variant(
        "each rank reads its own region",
        "prefiller",
        "ours[s.source_rank]",
        "ours[0]",
        "ranks_that_shard_differently",
    ),
    Variant(
        "a peer's pages have its own size",
        "prefiller",
        "num_kv_heads=len(heads_of_rank(heads, tp, 0))",
        "num_kv_heads=ours.num_kv_heads",
        "ranks_that_shard_differently",
    ),
    Variant(
        "all ranks that hold the same take part",
        "prefiller",
        "self.rng.choice(plan)",
        "plan[0]",
        "ranks_that_shard_differently",
    ),
    Variant(
        "of ranks that hold the same one writes",
        "sharding",
        "num_replicas = max(1, source_tp // num_heads)",
        "num_replicas = 1",
        "ranks_that_shard_differently",
    ),
    Variant(
        "runs are one only where both sides are contiguous",
        "sharding",
        "end - first == len(here) == len(there)",
        "end - first == len(here)",
        "ranks_that_shard_differently",
    ),
    Variant(
        "what came is told by its bytes on all ranks",
        "decoder",
        "self.hello.tp * len(fetch.page_indices)",
        "len(fetch.page_indices)",
        "ranks_that_shard_differently",
    ),
    Variant(
        "ended tickets are settled before anything is withdrawn",
        "prefiller",
        "            if isinstance(event, WritesDone):\n"
        "                self._settle(event.ticket)\n"
        "        for event in events:\n            self._on_event(event)\n",
        "            self._on_event(event)\n"
        "        for event in events:\n            if isinstance(event, WritesDone):\n"
        "                self._settle(event.ticket)\n",
        "cancels_cross_everything",
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
            put(name, module)
            exec(compile(source, f"wrong {path.name}", "exec"), module.__dict__)
        return Code(
            prefiller=sys.modules["disagg.messenger.prefiller"].PrefillerMessenger,
            decoder=sys.modules["disagg.messenger.decoder"].DecoderMessenger,
            imm_counter=sys.modules["disagg.transfer.imm_counter"].ImmCounter,
        )
    finally:
        for name, module in real.items():
            put(name, module)


def put(name: str, module: ModuleType) -> None:
    """Where both ways of importing it look: `from package.module import` and `from package`."""
    package, _, stem = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[package], stem, module)


def test_the_loader_alone_changes_nothing() -> None:
    code = load(Variant("none", "decoder", "import enum", "import enum", "none"))
    for scenario in SCENARIOS[:-1]:
        scenario(code)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.rule)
def test_wrong_variant_is_caught(variant: Variant) -> None:
    code = load(variant)
    scenario = next(s for s in (*SCENARIOS, *RARITIES) if s.__name__ == variant.caught_by)
    with pytest.raises(variant.error) as caught:
        scenario(code)
    print(f"{scenario.__name__}: {caught.value}")
