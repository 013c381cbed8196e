"""Write timelines as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each activity has its own track. Demand loads and prefetches are on separate tracks. Times are microseconds since the
first span.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmoe.files import write_text
from spmoe.observe.timeline import Activity, Span

# process and thread of each activity, in display order
_TRACKS: dict[Activity, tuple[str, str]] = {
    Activity.DRAFT: ("compute", "draft"),
    Activity.VERIFY: ("compute", "verify"),
    Activity.LAYER: ("compute", "layers"),
    Activity.STALL: ("compute", "stall"),
    Activity.REQUEST: ("compute", "prefetch requests"),
    Activity.COPY: ("link", "demand loads"),
    Activity.PREFETCH: ("link", "prefetches"),
}

_OVERLAPPING = {Activity.COPY, Activity.PREFETCH}  # several may overlap, so they are written as asynchronous events


def chrome_events(spans: Sequence[Span], run: str = "spmoe", first_process: int = 1) -> list[dict[str, Any]]:
    """Return the events of one run: the names of its tracks, then its spans."""
    start = min((span.start for span in spans), default=0.0)
    processes = {name: first_process + i for i, name in enumerate(dict.fromkeys(p for p, _ in _TRACKS.values()))}
    tracks = {activity: (processes[p], i) for i, (activity, (p, _)) in enumerate(_TRACKS.items(), start=1)}
    events = [_name("process_name", pid, 0, f"{run}: {process}") for process, pid in processes.items()]
    for activity, (_, track) in _TRACKS.items():
        events.append(_name("thread_name", *tracks[activity], track))
    for number, span in enumerate(sorted(spans, key=lambda span: span.start)):
        pid, tid = tracks[span.activity]
        event = {"name": span.detail or span.activity.value, "cat": span.activity.value, "pid": pid, "tid": tid}
        begin, end = 1e6 * (span.start - start), 1e6 * (span.end - start)
        if span.activity in _OVERLAPPING:
            identity = f"{first_process}.{number}"
            events.append({**event, "ph": "b", "id": identity, "ts": begin})
            events.append({**event, "ph": "e", "id": identity, "ts": end})
        else:
            events.append({**event, "ph": "X", "ts": begin, "dur": end - begin})
    return events


def write_chrome(path: Path, runs: Mapping[str, Sequence[Span]]) -> None:
    """Write several named runs into one file, each as its own pair of processes."""
    width = len({process for process, _ in _TRACKS.values()})
    events = [
        event
        for number, (name, spans) in enumerate(runs.items())
        for event in chrome_events(spans, name, 1 + number * width)
    ]
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
