"""The demonstration: one prompt, three ways, with a quarter of the experts in slots and an emulated link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmoe.config import SamplingParams
from spmoe.engine.llm import LLM, Completion
from spmoe.observe.timeline import Activity, Span

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0, "prefetch": "on-demand"},
    "speculation, on demand": {"num_speculative_tokens": 4, "prefetch": "on-demand"},
    "speculation, prefetched": {"num_speculative_tokens": 4, "prefetch": "draft-gate"},
}


@dataclass(frozen=True)
class Shown:
    """One way's outcome."""

    completion: Completion
    spans: list[Span]  # of the last steps


def balanced_link(prompt: str, tokens: int, options: dict[str, Any]) -> float:
    """GB/s at which moving a step's missing experts takes about as long as computing the step.

    That is where overlap matters most: on a much faster link there is nothing to hide, on a much slower one nothing to
    hide it behind.
    """
    with LLM(**options, **WAYS["speculation, on demand"]) as llm:
        completion = llm.generate(prompt, SamplingParams(max_tokens=tokens))[0]
    counters = completion.stats.counters
    compute = counters.draft_seconds + counters.verify_seconds - counters.stall_seconds
    return float(f"{counters.demand_bytes / max(compute, 1e-6) / 1e9:.1g}")


def run_way(way: str, prompt: str, tokens: int, options: dict[str, Any], on_token: Callable[[int, int], None]) -> Shown:
    """Generate once; progress is reported in tokens."""
    with LLM(**options, **WAYS[way]) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=8))  # fills the slots, so that all ways start alike
        llm.engine.source.timeline.recording = True
        generation = llm.stream(prompt, SamplingParams(max_tokens=tokens))
        for _ in generation:
            on_token(len(generation.token_ids), tokens)
        return Shown(generation.completion, llm.engine.source.timeline.spans)


def draw(spans: list[Span], seconds: float, columns: int) -> list[str]:
    """Two rows of characters for the last `seconds`: what compute did, and what the link did."""
    end = max((span.end for span in spans), default=0.0)
    start = end - seconds
    rows = {"compute": [" "] * columns, "link": [" "] * columns}
    signs = {
        Activity.DRAFT: ("compute", "d"),
        Activity.VERIFY: ("compute", "V"),
        Activity.STALL: ("compute", "."),
        Activity.COPY: ("link", "#"),
    }
    # stalls lie within verification, so they are drawn over it
    for span in sorted(spans, key=lambda s: s.activity is Activity.STALL):
        row, sign = signs[span.activity]
        first = int((span.start - start) / seconds * columns)
        last = int((span.end - start) / seconds * columns)
        for column in range(max(0, first), min(columns, max(last, first + 1))):
            rows[row][column] = sign
    return ["".join(row) for row in rows.values()]
