"""The timeline: when compute ran, copies moved and compute waited. Off unless somebody wants to draw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Activity(Enum):
    """What a span of time was spent on."""

    DRAFT = "draft"
    VERIFY = "verify"
    LAYER = "layer"  # of the target, within VERIFY
    COPY = "copy"  # a copy that was demanded
    PREFETCH = "prefetch"  # a copy for a prefetch request
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Span:
    """From one moment to another, in the engine clock's seconds."""

    activity: Activity
    start: float
    end: float
    detail: str = ""  # which layer, or which expert as layer.expert


@dataclass
class Timeline:
    """Spans in the order in which they ended."""

    recording: bool = False
    spans: list[Span] = field(default_factory=list)

    def add(self, activity: Activity, start: float, end: float, detail: str = "") -> None:
        """Note a span, if recording."""
        if self.recording and end > start:
            self.spans.append(Span(activity, start, end, detail))
