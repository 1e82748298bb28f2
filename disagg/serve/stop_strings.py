"""Finding stop strings in text that comes in pieces, and never showing a part of one.

    stop "END"      pushed   "the E"   "N"    "emy EN"    "D of"
                    shown    "the "    ""     "ENemy "    ""  and `stopped`

A stop string may lie over any number of pieces. What could be the beginning of one is held back,
and shown when it turns out not to be. Where two stop strings are found, the one that is complete
first ends the text; of two that end at the same character, the longer one. So what is shown does
not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """Watches one text; `stopped` once a stop string was found, after which nothing is shown."""

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty string would end every text"
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """More text; returns what may be shown now."""
        if self.stopped:
            return ""
        text = self._held + text
        starts = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if starts:
            self.stopped = True
            _, start = min((start + len(stop), start) for start, stop in starts)
            return text[:start]
        num_shown = len(text) - self._num_to_hold(text)
        self._held = text[num_shown:]
        return text[:num_shown]

    def finish(self) -> str:
        """The text is over: what was held back is no stop string."""
        return "" if self.stopped else self._held

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        starts = (stop[:count] for stop in self._stop for count in range(1, len(stop)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)
