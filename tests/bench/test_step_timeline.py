"""Timeline of one step: which step is chosen, how much is stored, and records that are not timelines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spmoe.bench.step_timeline import MAX_SPANS, StepTimeline
from spmoe.observe.timeline import Activity, Span, Timeline


def steps(*seconds: float) -> list[Span]:
    """Return draft and verify spans of steps that take this long, one after the other, half of it drafting."""
    spans, start = [], 100.0
    for one in seconds:
        spans.append(Span(Activity.DRAFT, start, start + one / 2))
        spans.append(Span(Activity.VERIFY, start + one / 2, start + one))
        start += one
    return spans


def test_step_of_median_duration_is_chosen_without_the_prompt() -> None:
    found = StepTimeline.of_median_step(steps(8.0, 4.0, 1.0, 2.0))
    assert found is not None
    assert (found.step, found.steps, found.seconds) == (3, 3, 2.0), "of 4, 1 and 2; the first one reads the prompt"
    assert found.spans == (Span(Activity.DRAFT, 0.0, 1.0), Span(Activity.VERIFY, 1.0, 2.0))
    assert StepTimeline.of_median_step(steps(8.0)) is None
    assert StepTimeline.of_median_step([]) is None


def test_spans_are_cut_to_the_step() -> None:
    verify = [Span(Activity.VERIFY, start, start + 2.0) for start in (0.0, 2.0)]  # without a draft
    copies = [
        Span(Activity.PREFETCH, 0.5, 2.5, "1.0"),
        Span(Activity.COPY, 3.0, 5.0, "2.0"),
        Span(Activity.COPY, 0.0, 2.0, "before"),
        Span(Activity.COPY, 4.0, 5.0, "after"),
    ]
    found = StepTimeline.of_median_step([*copies, *verify])
    assert found is not None
    assert found.spans == (
        Span(Activity.PREFETCH, 0.0, 0.5, "1.0"),
        Span(Activity.VERIFY, 0.0, 2.0),
        Span(Activity.COPY, 1.0, 2.0, "2.0"),
    )


def test_size_is_bounded() -> None:
    copies = [Span(Activity.COPY, 101.0 + 1e-4 * n, 101.0001 + 2e-4 * n, "x" * 500) for n in range(2 * MAX_SPANS)]
    found = StepTimeline.of_median_step([*steps(1.0, 2.0), *copies])
    assert found is not None
    assert (len(found.spans), found.omitted) == (MAX_SPANS, MAX_SPANS + 2)
    assert {Activity.DRAFT, Activity.VERIFY} <= {span.activity for span in found.spans}, "the longest are kept"
    assert len(json.dumps(found.to_record())) < 100 * MAX_SPANS


def test_record_is_read_back() -> None:
    found = StepTimeline.of_median_step([*steps(1.0, 2.0), Span(Activity.STALL, 101.5, 101.6, "a")])
    assert found is not None
    assert StepTimeline.from_record(json.loads(json.dumps(found.to_record()))) == found


GOOD: dict[str, Any] = {"step": 1, "steps": 2, "seconds": 0.5, "omitted": 0, "spans": [["draft", 0.0, 0.1, ""]]}


@pytest.mark.parametrize(
    "record",
    [
        None, 3, [], "x", {}, {**GOOD, "seconds": "1"}, {**GOOD, "seconds": 0}, {**GOOD, "seconds": float("inf")},
        {**GOOD, "step": -1}, {**GOOD, "step": 10**400}, {**GOOD, "step": True}, {**GOOD, "spans": 3},
        {**GOOD, "spans": "abc"}, {**GOOD, "spans": [["dance", 0, 1, ""]]}, {**GOOD, "spans": [["draft", 1, 0, ""]]},
        {**GOOD, "spans": [["draft", 0, float("nan"), ""]]}, {**GOOD, "spans": [["draft", 0, 1, 5]]},
        {**GOOD, "spans": [["draft", 0, 1]]}, {**GOOD, "spans": [["draft", 0.0, 0.1, ""]] * (MAX_SPANS + 1)},
        {**GOOD, "spans": [[["draft"], 0, 1, ""]]},
    ],
)  # fmt: skip
def test_other_record_is_rejected(record: Any) -> None:
    assert StepTimeline.from_record(GOOD).seconds == 0.5
    with pytest.raises(ValueError, match=r"not a |is not a valid|values to unpack"):
        StepTimeline.from_record(record)


def test_recording_is_limited_to_the_block() -> None:
    timeline = Timeline()
    timeline.add(Activity.DRAFT, 0.0, 1.0)
    with timeline.record() as spans:
        timeline.add(Activity.VERIFY, 1.0, 2.0)
    timeline.add(Activity.DRAFT, 2.0, 3.0)
    assert spans == [Span(Activity.VERIFY, 1.0, 2.0)]
    assert timeline.spans == []
    timeline.recording = True
    timeline.add(Activity.DRAFT, 3.0, 4.0)
    with pytest.raises(KeyboardInterrupt), timeline.record():
        raise KeyboardInterrupt
    assert timeline.recording
    assert timeline.spans == [Span(Activity.DRAFT, 3.0, 4.0)], "an outer recording goes on"
