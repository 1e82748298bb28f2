"""How often the layer counter is looked at, and how late a layer is seen."""

import pytest

from disagg.messenger.pace import MIN_PAUSE, SHARE_PASSED, Pace


def looks_and_delays(layer_seconds, num_layers=30):
    """Of one step: looks after the first layer, and how late each layer was seen."""
    now, counter, looks, delays = 50.0, 7, 0, []
    pace = Pace(counter, now)
    ends = [now + sum(layer_seconds[: n + 1]) for n in range(num_layers)]
    while counter < 7 + num_layers:
        now += pace.pause(counter, now, layer_runs=True)
        passed = 7 + sum(end <= now for end in ends)
        delays += [now - end for end in ends[counter - 7 : passed - 7]]
        counter = passed
        looks += counter > 7
    return looks, delays


@pytest.mark.parametrize("seconds", [0.0002, 0.005, 0.04, 0.5])
def test_even_layers_are_seen_soon_by_few_looks(seconds):
    looks, delays = looks_and_delays([seconds] * 30)
    assert looks <= 30 * 6
    assert max(delays) <= MIN_PAUSE + 2 * SHARE_PASSED * seconds


def test_a_layer_quicker_than_the_one_before_is_seen_within_that_ones_time():
    _, delays = looks_and_delays([0.04, 0.04] + [0.001] * 28)
    assert max(delays) <= 0.033
    assert max(delays[-10:]) <= 0.001


def test_the_first_layer_is_awaited_by_short_pauses_that_grow():
    pace = Pace(1, 9.0)
    assert pace.pause(1, 9.0, layer_runs=True) == MIN_PAUSE
    assert pace.pause(1, 10.0, layer_runs=True) == SHARE_PASSED


def test_the_end_of_a_step_is_near():
    pace = Pace(0, 0.0)
    assert pace.pause(1, 1.0, layer_runs=True) == 0.8
    assert pace.pause(1, 1.0, layer_runs=False) == MIN_PAUSE


def test_layers_seen_at_once_share_the_time():
    pace = Pace(0, 0.0)
    assert pace.pause(4, 1.0, layer_runs=True) == 0.2
