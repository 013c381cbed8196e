"""The demonstration: one prompt, three ways, with a quarter of the experts in slots and an emulated link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmoe.config import SamplingParams
from spmoe.engine.llm import LLM, Completion
from spmoe.observe.timeline import Activity, Span

_SLOWEST_LINK = 0.1  # GB/s

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
    hide it behind. On a machine that is busy otherwise it has a lower end, so that a demonstration ends.
    """
    with LLM(**options, **WAYS["speculation, on demand"]) as llm:
        completion = llm.generate(prompt, SamplingParams(max_tokens=tokens))[0]
    counters = completion.stats.counters
    compute = counters.draft_seconds + counters.verify_seconds - counters.stall_seconds
    return max(_SLOWEST_LINK, float(f"{counters.demand_bytes / max(compute, 1e-6) / 1e9:.1g}"))


def run_way(way: str, prompt: str, tokens: int, options: dict[str, Any], on_token: Callable[[int, int], None]) -> Shown:
    """Generate once; progress is reported in tokens."""
    with LLM(**options, **WAYS[way]) as llm:
        # fills the slots, so that all ways start alike, and lets the cutoff learn
        llm.generate(prompt, SamplingParams(max_tokens=tokens))
        llm.engine.source.timeline.recording = True
        generation = llm.stream(prompt, SamplingParams(max_tokens=tokens))
        for _ in generation:
            on_token(len(generation.token_ids), tokens)
        return Shown(generation.completion, llm.engine.source.timeline.spans)


def draw(spans: list[Span], seconds: float, columns: int) -> list[str]:
    """Two rows of characters for the last `seconds`: what compute mostly did in each column, and what the link did."""
    start = max((span.end for span in spans), default=0.0) - seconds
    width = seconds / columns
    shares = {activity: [0.0] * columns for activity in Activity}  # of each column's time
    for span in spans:
        for column in range(max(0, int((span.start - start) / width)), columns):
            overlap = min(span.end, start + (column + 1) * width) - max(span.start, start + column * width)
            if overlap <= 0:
                break
            shares[span.activity][column] += overlap / width
    compute, link = "", ""
    for column in range(columns):
        draft, verify, stall = (shares[kind][column] for kind in (Activity.DRAFT, Activity.VERIFY, Activity.STALL))
        copy = shares[Activity.COPY][column] + shares[Activity.PREFETCH][column]
        signs = {"d": draft, "V": verify - stall, ".": stall}  # stalls lie within verification
        most = max(signs, key=lambda sign: signs[sign])
        compute += most if signs[most] > 0.01 else " "
        link += "#" if copy > 0.5 else "-" if copy > 0.01 else " "
    return [compute, link]
