"""When the stations of one request were reached, and the times between them.

    submitted --queued--> started --prefill--> prefilled --decode--> ended
                                                        '-> first token, and more

What each time means is said once, in `request.Timings`. The clock is the engine's.
"""

from itertools import pairwise

from disagg.request import Timings, TransferStats
from disagg.trace import Trace


class Stopwatch:
    """Seconds on one clock."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._tokens: list[float] = []

    def reach(self, station: str, now: float) -> None:
        """Only the first time counts."""
        self._times.setdefault(station, now)

    def on_token(self, now: float) -> None:
        """A token was sampled, which nothing does before the prompt's KV is whole."""
        self.reach("prefilled", now)
        self.reach("first token", now)
        self._tokens.append(now)

    def timings(self, transfer: TransferStats | None) -> Timings:
        """The times between the stations so far."""
        gaps = sorted(b - a for a, b in pairwise(self._tokens))
        return Timings(
            queue=self._between("submitted", "started"),
            prefill=self._between("started", "prefilled"),
            transfer=None if transfer is None else transfer.exposed,
            first_token=self._between("submitted", "first token"),
            inter_token_mean=sum(gaps) / len(gaps) if gaps else None,
            inter_token_p99=gaps[-(-99 * len(gaps) // 100) - 1] if gaps else None,
        )

    def record(self, trace: Trace, track: str, now: float, **details: float) -> None:
        """The request has ended: what it spent its time with, as spans."""
        self.reach("ended", now)
        spans = {"queued": "started", "prefill": "prefilled", "decode": "ended"}
        for name, (start, end) in zip(spans, pairwise(["submitted", *spans.values()]), strict=True):
            if self._between(start, end) is not None:
                trace.span(track, name, self._times[start], self._times[end], **details)

    def _between(self, start: str, end: str) -> float | None:
        known = start in self._times and end in self._times
        return self._times[end] - self._times[start] if known else None
