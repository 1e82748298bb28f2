"""The counter of immediates against a plain model, and its refusals one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.transfer.imm_counter import ImmCounter

PEER, OTHER = 1, 2


class Counter(ImmCounter):
    """Keeps what is reached."""

    def __init__(self):
        self.said = []
        super().__init__(self.said.append)

    def take_reached(self):
        taken = self.said[:]
        self.said.clear()
        return taken


@pytest.fixture
def counter():
    return Counter()


def test_reached_exactly_once_and_surplus_dropped(counter):
    counter.expect(PEER, 7, 3)
    counter.count(PEER, 7, 2)
    assert counter.take_reached() == []
    counter.count(PEER, 7, 5)
    assert counter.take_reached() == [7]
    counter.count(PEER, 7, 3)
    assert counter.take_reached() == []


def test_another_peer_and_unknown_imms_do_not_count(counter):
    counter.expect(PEER, 7, 1)
    counter.count(OTHER, 7)
    counter.count(PEER, 8)
    assert counter.take_reached() == []
    counter.count(PEER, 7)
    assert counter.take_reached() == [7]


def test_an_arrival_before_its_expectation_is_lost(counter):
    counter.count(PEER, 7)
    counter.expect(PEER, 7, 1)
    assert counter.take_reached() == []


@pytest.mark.parametrize("imm", [7, 6, 0, -1, 2**32])
def test_an_imm_is_never_used_twice(counter, imm):
    counter.expect(PEER, 7, 1)
    counter.forget_peer(PEER)
    with pytest.raises(ValueError, match=f"imm {imm}: expected more than the last one"):
        counter.expect(OTHER, imm, 1)


def test_imms_zero_and_largest_are_usable(counter):
    for imm in (0, 2**32 - 1):
        counter.expect(PEER, imm, 1)
        counter.count(PEER, imm)
    assert counter.take_reached() == [0, 2**32 - 1]


@pytest.mark.parametrize("count", [0, -1])
def test_nothing_to_wait_for_is_an_error_and_takes_no_imm(counter, count):
    with pytest.raises(ValueError, match="count of at least 1"):
        counter.expect(PEER, 7, count)
    counter.expect(PEER, 7, 1)


@pytest.mark.parametrize(
    ("arrived", "lowered", "fires"), [(2, 2, True), (2, 3, False), (0, 0, True)]
)
def test_lower(counter, arrived, lowered, fires):
    counter.expect(PEER, 7, 5)
    if arrived:
        counter.count(PEER, 7, arrived)
    counter.lower(7, lowered)
    assert counter.take_reached() == ([7] if fires else [])


def test_lower_after_the_end_is_a_no_op_and_more_is_a_fault_of_ours(counter):
    counter.lower(3, 0)
    counter.expect(PEER, 7, 2)
    for count in (3, -1):
        with pytest.raises(AssertionError, match="is lowered to"):
            counter.lower(7, count)
    counter.count(PEER, 7, 2)
    counter.lower(7, 1)
    assert counter.take_reached() == [7]


def test_forget_peer_drops_its_imms_alone(counter):
    counter.expect(PEER, 1, 1)
    counter.expect(OTHER, 2, 1)
    counter.expect(PEER, 3, 1)
    counter.count(PEER, 3)
    counter.forget_peer(PEER)
    counter.count(PEER, 1)
    counter.count(OTHER, 2)
    assert counter.take_reached() == [3, 2]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["count", "lower", "forget_peer"]),
        st.integers(1, 2),
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    max_size=40,
)


@given(counts=st.lists(st.integers(1, 4), min_size=4, max_size=4), actions=ACTIONS)
def test_agrees_with_a_model(counts, actions):
    """Imm i is expected from peer 1 + i % 2."""
    counter, arrived, wanted, said = Counter(), [0] * 4, dict(enumerate(counts)), []
    for imm, count in enumerate(counts):
        counter.expect(1 + imm % 2, imm, count)
    for action, peer, imm, count in actions:
        if action == "count":
            counter.count(peer, imm, count)
            arrived[imm] += count * (peer == 1 + imm % 2)
        elif action == "lower" and count <= wanted.get(imm, -1):
            counter.lower(imm, count)
            wanted[imm] = count
        elif action == "forget_peer":
            counter.forget_peer(peer)
            wanted = {i: n for i, n in wanted.items() if 1 + i % 2 != peer}
        reached = [i for i, n in wanted.items() if arrived[i] >= n]
        assert counter.take_reached() == reached
        said += reached
        wanted = {i: n for i, n in wanted.items() if i not in reached}
    assert len(said) == len(set(said))
