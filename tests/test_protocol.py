"""The protocol, executed: both messengers over the adversarial transport with a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.protocol_rarities import RARITIES
from tests.protocol_scenarios import SCENARIOS, Scenario
from tests.protocol_world import CONFIG, Code, World


@pytest.mark.parametrize(
    "scenario", (*SCENARIOS, *RARITIES), ids=lambda scenario: scenario.__name__
)
def test_scenario(scenario: Scenario) -> None:
    scenario(Code())


class ProtocolMachine(RuleBasedStateMachine):
    """Any sequence of wishes and faults. The checks of every write and event are `World`'s own."""

    @rule(
        seed=st.integers(0, 2**32),
        policy=st.sampled_from(["local", "retry", "fail"]),
        num_prefillers=st.integers(1, 2),
    )
    @precondition(lambda self: not hasattr(self, "world"))
    def start(self, seed: int, policy: str, num_prefillers: int) -> None:
        self.world = World(seed, on_failure=policy, num_prefillers=num_prefillers)

    def started(self) -> bool:
        return hasattr(self, "world")

    @rule(steps=st.integers(1, 100), tick=st.sampled_from([0.0, 0.02, 0.3]))
    @precondition(started)
    def run(self, steps: int, tick: float) -> None:
        self.world.run(steps, tick=tick)

    @rule(seconds=st.floats(0.1, 2 * CONFIG.peer_timeout))
    @precondition(started)
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(num_tokens=st.integers(2, 14))
    @precondition(started)
    def submit(self, num_tokens: int) -> None:
        self.world.submit(num_tokens)

    @rule(pick=st.integers(0, 50))
    @precondition(started)
    def cancel(self, pick: int) -> None:
        if self.world.clients:
            self.world.cancel(self.world.clients[pick % len(self.world.clients)])

    @rule(
        fault=st.sampled_from(["stop", "wake", "kill", "restart", "reject_write", "fail_write"]),
        pick=st.integers(0, 1),
    )
    @precondition(started)
    def fault(self, fault: str, pick: int) -> None:
        getattr(self.world, fault)(pick % len(self.world.prefill_nodes))

    @rule()
    @precondition(started)
    def cut(self) -> None:
        self.world.cut()

    @invariant()
    def pages_in_use_have_an_owner(self) -> None:
        if not self.started():
            return
        decoder = self.world.decode_node
        owners = {owner for owner in decoder.storage.page_owner if owner is not None}
        known = {*decoder.fetching, *decoder.abandoned, *decoder.decoding}
        assert owners == known, f"pages of {owners - known} leaked, {known - owners} lost theirs"

    def teardown(self) -> None:
        if self.started():
            self.world.heal()


TestProtocolMachine = ProtocolMachine.TestCase
TestProtocolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
