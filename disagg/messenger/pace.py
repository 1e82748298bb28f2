"""When to look at the layer counter next. A look costs the forward pass that it waits for.

    counter   b ............. b+1 ............. b+2 ...      each layer takes about as long as the
    looks     | ||||||||||||| |            |  | |            one before: pause for most of what is
                                                             left of it, then shortly

Each look takes Python's lock and some time of a CPU (`tests/bench/bench_messenger_cost.py`), so a
fixed short pause would cost a fifth of a core; a long one would leave finished layers lying.
"""

#: Seconds of the shortest pause.
MIN_PAUSE = 100e-6
#: Pause for this share of what is left of a layer; and, since none takes exactly as long as the one
#: before, for that share of its time so far at least.
SHARE_LEFT, SHARE_PASSED = 0.8, 1 / 16


class Pace:
    """Of one step, which starts at the counter `base` and `now`; `counter` is what was seen last.
    Times: seconds on one clock, passed in."""

    def __init__(self, base: int, now: float) -> None:
        self.base = self.counter = base
        self._moved_at = now
        self._layer_seconds = 0.0  # not known

    def pause(self, counter: int, now: float, *, layer_runs: bool) -> float:
        """Until the next look. Without `layer_runs` only the step's end is to come, soon."""
        if counter > self.counter:
            self._layer_seconds = (now - self._moved_at) / (counter - self.counter)
            self.counter, self._moved_at = counter, now
        elapsed = now - self._moved_at
        left = self._layer_seconds - elapsed if layer_runs else 0.0
        return max(MIN_PAUSE, SHARE_LEFT * left, SHARE_PASSED * elapsed)
