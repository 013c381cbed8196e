"""Chrome trace events, in the form that viewers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmoe.errors import UsageError
from spmoe.observe.chrome import write_chrome
from spmoe.observe.timeline import Activity, Span

SPANS = [
    Span(Activity.DRAFT, 10.0, 10.5, "step 0"),
    Span(Activity.VERIFY, 10.5, 12.0),
    Span(Activity.LAYER, 10.5, 11.0, "layer 0"),
    Span(Activity.STALL, 10.75, 11.0),
    Span(Activity.COPY, 10.2, 11.0, "0.3"),
    Span(Activity.PREFETCH, 10.1, 11.5, "1.7"),
    Span(Activity.PREFETCH, 10.3, 11.2, "1.2"),
]


def check(event: dict[str, Any]) -> None:
    """Assert that an event follows the trace event format."""
    assert isinstance(event["name"], str)
    assert event["name"]
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name")
        assert isinstance(event["args"]["name"], str)
        return
    assert event["ts"] >= 0
    assert isinstance(event["cat"], str)
    if event["ph"] == "X":
        assert event["dur"] >= 0
    else:
        assert event["ph"] in ("b", "e")
        assert isinstance(event["id"], str)


def test_file_follows_the_trace_event_format(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_chrome(path, {"one": SPANS, "two": SPANS[:2]})
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    events = document["traceEvents"]
    for event in events:
        check(event)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    shown = [event for event in events if event["ph"] != "M"]
    assert {(event["pid"], event["tid"]) for event in shown} <= named, "every track has a name"
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert len(set(processes.values())) == len(processes) == 4, "two for each run"
    begun = {event["id"]: event for event in shown if event["ph"] == "b"}
    ended = {event["id"]: event for event in shown if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == 3
    assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)


def test_times_are_microseconds_since_the_first_span(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_chrome(path, {"run": SPANS})
    events = {event["name"]: event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"}
    assert events["step 0"]["ts"] == 0
    assert events["step 0"]["dur"] == pytest.approx(0.5e6)
    assert events["layer 0"]["ts"] == pytest.approx(0.5e6)


def test_unwritable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_chrome(tmp_path / "none" / "a.json", {"run": SPANS})
