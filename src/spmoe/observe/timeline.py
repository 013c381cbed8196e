"""The timeline: spans of compute, copies and stalls. Recording is off unless a timeline is to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum


class Activity(Enum):
    """Kind of a span."""

    DRAFT = "draft"
    VERIFY = "verify"
    LAYER = "layer"  # of the target, within VERIFY: from its router's result to the end of its experts
    REQUEST = "request"  # the queuing of prefetch requests that a policy predicted
    COPY = "copy"  # a demand load
    PREFETCH = "prefetch"  # a load for a prefetch request
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Span:
    """An activity from `start` to `end`, in seconds of the engine's clock."""

    activity: Activity
    start: float
    end: float
    detail: str = ""  # the layer, the expert as layer.expert, or the number of requests


@dataclass
class Timeline:
    """Spans in the order in which they ended."""

    recording: bool = False
    spans: list[Span] = field(default_factory=list)

    def add(self, activity: Activity, start: float, end: float, detail: str = "") -> None:
        """Append a span if recording is on and the span is not empty."""
        if self.recording and end > start:
            self.spans.append(Span(activity, start, end, detail))

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        """Record the spans that end inside the block into the list that it yields."""
        before = self.recording, self.spans
        self.recording, self.spans = True, []
        try:
            yield self.spans
        finally:
            self.recording, self.spans = before
