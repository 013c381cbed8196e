"""Timelines of steps in a report: which configurations are shown, their tracks, and the table of their values."""

from __future__ import annotations

from collections.abc import Sequence

from spmoe.bench.charts import Block, Track
from spmoe.bench.comparison import is_oracle, milliseconds, tpot
from spmoe.bench.labels import Row
from spmoe.bench.step_timeline import StepTimeline
from spmoe.observe.timeline import Activity, Span
from spmoe.registry import ON_DEMAND

TIMELINE_HEAD = ("step", "draft", "verify", "stall", "prefetches", "demand loads", "link busy", "step of the run")


def stored_timeline(row: Row) -> StepTimeline | None:
    """Return the timeline of the first run of a row that has one."""
    records = (sample["timeline"] for sample in row.get("samples", ()) if sample.get("timeline") is not None)
    return next((StepTimeline.from_record(record) for record in records), None)


def rows_to_draw(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest prefetching row and, of its budget, the one that loads on demand, with the same K if any."""
    prefetching = [row for row in rows if row["prefetch"] != ON_DEMAND and not is_oracle(row)]
    best = min(prefetching or rows, key=tpot, default=None)
    if best is None:
        return []
    on_demand = [row for row in rows if row["prefetch"] == ON_DEMAND and row["expert_memory"] == best["expert_memory"]]
    k = best["num_speculative_tokens"]
    other = min(on_demand, key=lambda row: (row["num_speculative_tokens"] != k, tpot(row)), default=best)
    return [best] if other is best else [best, other]


_TRACKS = {  # name of a track -> activities drawn in it, later ones over earlier ones, and their colours
    "compute": {Activity.DRAFT: "draft", Activity.VERIFY: "verify", Activity.STALL: "stall"},
    "experts": {Activity.LAYER: "verify"},
    "requests": {Activity.REQUEST: "prefetch"},
    "prefetches": {Activity.PREFETCH: "prefetch"},
    "demand": {Activity.COPY: "demand"},
}


def tracks(timeline: StepTimeline) -> tuple[Track, ...]:
    """Return the tracks of a step; one without spans is left out."""
    found = []
    for name, colours in _TRACKS.items():
        spans = [span for activity in colours for span in timeline.spans if span.activity is activity]
        blocks = tuple(Block(1e3 * one.start, 1e3 * one.end, colours[one.activity], _span_tip(one)) for one in spans)
        if blocks:
            found.append(Track(name, blocks, stacked=len(colours) > 1))
    return tuple(found)


def _span_tip(span: Span) -> str:
    names = {
        Activity.DRAFT: "draft",
        Activity.VERIFY: "verify",
        Activity.STALL: "stall: compute waits for experts",
        Activity.LAYER: span.detail,
        Activity.REQUEST: f"{span.detail} prefetch requests",
        Activity.PREFETCH: f"prefetch of layer.expert {span.detail}",
        Activity.COPY: f"demand load of layer.expert {span.detail}",
    }
    times = f"{1e3 * span.start:.2f} to {1e3 * span.end:.2f} ms ({milliseconds(span.end - span.start)})"
    return f"{names[span.activity]}: {times}"


def timeline_values(timeline: StepTimeline) -> list[str]:
    """Return cells for TIMELINE_HEAD."""

    def seconds(activity: Activity) -> float:
        return sum(span.end - span.start for span in timeline.spans if span.activity is activity)

    copies = [span for span in timeline.spans if span.activity in (Activity.COPY, Activity.PREFETCH)]
    busy, reached = 0.0, 0.0
    for span in sorted(copies, key=lambda one: one.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    counts = [sum(span.activity is kind for span in copies) for kind in (Activity.PREFETCH, Activity.COPY)]
    return [
        milliseconds(timeline.seconds),
        *(milliseconds(seconds(one)) for one in (Activity.DRAFT, Activity.VERIFY, Activity.STALL)),
        *map(str, counts),
        f"{100 * busy / timeline.seconds:.0f} %",
        f"{timeline.step} of {timeline.steps}",
    ]
