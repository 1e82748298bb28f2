"""A timeline of what a process did, as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

    span(track, name, start, end)    or, of what goes on one after another, lap(track, name)
    tracks    forward | ###0##1##2##3..  |        a track is a thread of the file; spans of one that
              layer writes | #0## #2##   |        overlap go to further lanes ("layer writes 2")
              layer writes 2 |  #1##     |

Times are seconds of `time.monotonic`, one clock for all processes of a host; a span is kept by one
append. `python -m disagg.trace` joins files and draws them: `trace_picture.py`.
"""

import itertools
import os
import time
from pathlib import Path

import msgspec

Details = dict[str, str | float]
#: Start and end, track, name, details.
Span = tuple[float, float, str, str, Details]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Of a trace file, by Chrome's names: "X" is a span (`ts`, `dur` in us), "M" names a track."""

    ph: str
    name: str
    tid: int
    pid: int = msgspec.field(default_factory=os.getpid)
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: Details = msgspec.field(default_factory=dict)


class Timeline(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A trace file. `other_data` has the `epoch` of its process, and `clock lag of EPOCH` of each
    prefiller that a decoder has talked to: how many seconds its own clock is ahead."""

    trace_events: list[Event]
    other_data: Details


class Trace:
    """Spans of one process, from any of its threads. If it is not `on`, all calls do nothing.

    `facts` become the file's `other_data`.
    """

    def __init__(self, process: str = "", *, on: bool = False) -> None:
        self.on = on
        self.facts: Details = {}
        self._process = process
        self._spans: list[Span] = []
        self._laps: dict[str, float] = {}

    def span(self, track: str, name: str, start: float, end: float, **details: str | float) -> None:
        """Something went on from `start` to `end`."""
        if self.on:
            self._spans.append((start, end, track, name, details))

    def lap(self, track: str, name: str = "") -> None:
        """What went on since the last lap of this track is `name`; without, it is left out."""
        if self.on:
            start, self._laps[track] = self._laps.get(track, 0.0), time.monotonic()
            if name:
                self.span(track, name, start, self._laps[track])

    def take(self) -> list[Span]:
        """The spans that have ended, for another process to `add`; they are no longer here."""
        taken, self._spans = self._spans, []
        return taken

    def add(self, spans: list[Span]) -> None:
        """Take over spans of another process of this host."""
        self._spans += spans

    def write(self, path: Path) -> None:
        """Write the spans that have ended. OSError."""
        try:
            path.write_bytes(msgspec.json.encode(self.timeline()))
        except OSError as error:  # that of a full disk does not say which file
            raise OSError(error.errno, error.strerror, str(path)) from error

    def timeline(self) -> Timeline:
        """The spans that have ended, as a file holds them."""
        busy_until: dict[tuple[str, int], float] = {}  # of each lane of each track
        tids: dict[tuple[str, int], int] = {}
        events = [Event(ph="M", name="process_name", tid=0, args={"name": self._process})]
        for start, end, track, name, details in sorted(self._spans, key=lambda span: span[0]):
            lane = next(n for n in itertools.count() if busy_until.get((track, n), 0.0) <= start)
            busy_until[track, lane] = end
            tid = tids.setdefault((track, lane), len(tids) + 1)
            ts, dur = start * 1e6, (end - start) * 1e6
            event = Event(ph="X", name=name, tid=tid, cat=track, ts=ts, dur=dur, args=details)
            events.append(event)
        for (track, lane), tid in tids.items():
            track_name = f"{track} {lane + 1}" if lane else track
            events.append(Event(ph="M", name="thread_name", tid=tid, args={"name": track_name}))
        return Timeline(trace_events=events, other_data=self.facts)


if __name__ == "__main__":
    # Here, so that a node loads no matplotlib.
    from disagg.trace_picture import main

    main()
