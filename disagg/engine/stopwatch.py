"""When the stations of one request were reached, and the times between them.

What each time means is said once, in `request.Timings`. The clock is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.hooks import TransferStats
from disagg.request import Timings
from disagg.trace import Trace


@dataclass(kw_only=True, eq=False)
class Stopwatch:
    """All in seconds on one clock. `tokens` has a time for each output token delivered."""

    submitted: float | None = None
    started: float | None = None
    prefilled: float | None = None
    tokens: list[float] = field(default_factory=list)

    def on_start(self, now: float) -> None:
        """The prefill begins; only the first time counts."""
        if self.started is None:
            self.started = now

    def on_prefilled(self, now: float) -> None:
        """The prompt's KV is whole; only the first time counts."""
        if self.prefilled is None:
            self.prefilled = now

    def on_tokens(self, now: float, count: int) -> None:
        """Tokens were sampled, which nothing does before the prompt's KV is whole."""
        self.on_prefilled(now)
        self.tokens += [now] * count

    def timings(self, transfer: TransferStats | None) -> Timings:
        """The times between the stations so far."""
        gaps = sorted(b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        return Timings(
            queue=_between(self.submitted, self.started),
            prefill=_between(self.started, self.prefilled),
            transfer=None if transfer is None else transfer.exposed,
            first_token=_between(self.submitted, self.tokens[0] if self.tokens else None),
            inter_token_mean=sum(gaps) / len(gaps) if gaps else None,
            inter_token_p99=gaps[-(-99 * len(gaps) // 100) - 1] if gaps else None,
        )

    def record(self, trace: Trace, track: str, now: float) -> None:
        """The request has ended: what it spent its time with, as spans."""
        names = ("queued", "prefill", "decode")
        times = (self.submitted, self.started, self.prefilled, now)
        for name, start, end in zip(names, times, times[1:], strict=False):
            if start is not None and end is not None:
                trace.span(track, name, start, end)


def _between(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start
