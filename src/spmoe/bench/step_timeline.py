"""Timeline of one step of a benchmark run: chosen from its spans, stored in result files, read without torch.

A record is bounded in size: `MAX_SPANS` spans of at most `_MAX_DETAIL` characters, times rounded to microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from spmoe.observe.timeline import Activity, Span

MAX_SPANS = 600  # of a step; the shortest ones beyond it are left out
_MAX_DETAIL = 40  # characters
_MICROSECOND = 6  # decimal places of a second
_MAX_NUMBER = 1e9  # in a record; refuses infinity and NaN too


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Spans of one step, in seconds since its begin, by start; spans that began earlier or ended later are cut."""

    step: int  # its number in the run, from 1; step 0 reads the prompt
    steps: int  # of the run, without the one that reads the prompt
    seconds: float
    spans: tuple[Span, ...]
    omitted: int = 0  # spans left out to bound the size

    @classmethod
    def of_median_step(cls, spans: Sequence[Span]) -> Self | None:
        """Return the timeline of the step with the median duration; None if a run has no step after the prompt."""
        drafts = {span.end: span.start for span in spans if span.activity is Activity.DRAFT}
        verified = sorted((span for span in spans if span.activity is Activity.VERIFY), key=lambda span: span.start)
        windows = [(drafts.get(span.start, span.start), span.end) for span in verified][1:]
        if not windows:
            return None
        by_duration = sorted(range(len(windows)), key=lambda number: windows[number][1] - windows[number][0])
        number = by_duration[(len(windows) - 1) // 2]
        start, end = windows[number]
        inside = [
            Span(
                one.activity,
                round(max(one.start, start) - start, _MICROSECOND),
                round(min(one.end, end) - start, _MICROSECOND),
                one.detail[:_MAX_DETAIL],
            )
            for one in spans
            if one.start < end and one.end > start
        ]
        kept = sorted(inside, key=lambda one: one.start - one.end)[:MAX_SPANS]
        kept.sort(key=lambda one: (one.start, one.end))
        seconds = round(end - start, _MICROSECOND)
        return cls(number + 1, len(windows), seconds, tuple(kept), len(inside) - len(kept))

    def to_record(self) -> dict[str, Any]:
        """Return JSON values; each span is a list of activity, start, end and detail."""
        spans = [[one.activity.value, one.start, one.end, one.detail] for one in self.spans]
        return {
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "omitted": self.omitted,
            "spans": spans,
        }

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Restore a timeline; raise ValueError if the record is not one."""
        try:
            numbers = [record[name] for name in ("step", "steps", "seconds", "omitted")]
            spans = tuple(_read_span(one) for one in record["spans"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError("not a timeline") from error
        if len(spans) > MAX_SPANS or not all(_is_time(one) for one in numbers) or not numbers[2]:
            raise ValueError("not a timeline")
        step, steps, seconds, omitted = numbers
        return cls(int(step), int(steps), float(seconds), spans, int(omitted))


def _read_span(record: Any) -> Span:
    activity, start, end, detail = record
    if not (_is_time(start) and _is_time(end) and start <= end and isinstance(detail, str)):
        raise ValueError("not a span")
    return Span(Activity(activity), float(start), float(end), detail[:_MAX_DETAIL])


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER
