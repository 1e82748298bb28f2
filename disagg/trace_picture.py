"""Join the timelines of several processes, and draw them, for those without a trace viewer.

    python -m disagg.trace out.json out.prefiller.json --picture timeline.svg -o merged.json

Times are shifted to the first file's clock: that of a decoder, which has measured how far those of
its prefillers are behind (by the travel of a heartbeat on one host). Others are taken as they are.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from disagg.trace import Event, Timeline

#: Larger than any process id, so that processes of two hosts stay apart.
MAX_PID = 1 << 22


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; ends with code 2 and one line if a file is not what it should be."""
    parser = argparse.ArgumentParser(prog="python -m disagg.trace")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --trace wrote")
    parser.add_argument("-o", type=Path, metavar="FILE", help="write all of them as one file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them: .svg, .png, .pdf")
    flags = parser.parse_args(arguments)
    try:
        if flags.o is None and flags.picture is None:
            raise ValueError("nothing to do; give -o or --picture")
        merged = merge([read(path) for path in flags.files])
        if flags.o is not None:
            flags.o.write_bytes(msgspec.json.encode(merged))
        if flags.picture is not None:
            draw(merged).savefig(flags.picture)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")


def read(path: Path) -> Timeline:
    """A trace file. ValueError if it is none, OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Timeline)
    except ValueError as error:
        raise ValueError(f"{path}: expected a file that --trace wrote: {error}") from error


def merge(timelines: Sequence[Timeline]) -> Timeline:
    """All events on the clock of the first, as far as it knows the others'."""
    first, events = timelines[0], []
    for number, timeline in enumerate(timelines):
        lag = first.other_data.get(f"clock lag of {timeline.other_data.get('epoch')}", 0.0)
        for event in timeline.trace_events:
            pid, ts = event.pid + number * MAX_PID, event.ts + float(lag) * 1e6
            events.append(msgspec.structs.replace(event, pid=pid, ts=ts))
    return Timeline(trace_events=events, other_data=first.other_data)


def draw(timeline: Timeline) -> Figure:
    """Rows of tracks over milliseconds. ValueError if there is nothing to draw."""
    spans = [event for event in timeline.trace_events if event.ph == "X"]
    writers = {event.pid for event in spans if event.cat == "layer writes"}
    rows: dict[tuple[bool, int, str], list[Event]] = {}
    for event in spans:
        # Layers where they are written from, whole steps elsewhere.
        if event.cat not in ("prefills", "steps" if event.pid in writers else "forward"):
            rows.setdefault((event.pid not in writers, event.pid, event.cat), []).append(event)
    if not rows:
        raise ValueError("the trace holds no spans; expected some, got a process without work")
    layers = {event.name: int(event.name[6:]) for event in spans if event.name[:6] == "layer "}
    last = max([1, *layers.values()])
    scale = ScalarMappable(Normalize(0, last), "viridis")
    colours: dict[str, Any] = {name: scale.cmap(layer / last) for name, layer in layers.items()}
    figure = Figure(figsize=(11, 1.6 + 0.55 * len(rows)), layout="constrained")
    title = "KV leaves layer by layer while the next layers are computed"
    axes = figure.add_subplot(xmargin=0.01, xlabel="time (ms)", title=title)
    start = min(event.ts for event in spans)
    for row, key in enumerate(sorted(rows)):
        lanes = sorted({event.tid for event in rows[key]})
        height = 0.8 / len(lanes)
        for event in rows[key]:
            kind = event.cat if event.cat in ("steps", "KV transfer") else event.name
            colour = colours.setdefault(kind, f"C{len(colours) - len(layers)}")
            where = ((event.ts - start) / 1e3, event.dur / 1e3)
            lane = (row + lanes.index(event.tid) * height, height)
            # Edges make short spans wide enough to be seen, and tell steps from each other.
            edge = "white" if kind == "steps" else colour
            axes.broken_barh([where], lane, facecolor=colour, edgecolor=edge, linewidth=0.6)
    names = {e.pid: e.args["name"] for e in timeline.trace_events if e.name == "process_name"}
    tracks = [f"{names.get(pid, pid)}: {cat}" for _, pid, cat in sorted(rows)]
    axes.set_yticks([row + 0.4 for row in range(len(rows))], tracks)
    axes.invert_yaxis()
    if writers:
        figure.colorbar(scale, ax=axes, label="layer")
    handles = [Patch(color=colours[kind], label=kind) for kind in colours if kind not in layers]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
    return figure
