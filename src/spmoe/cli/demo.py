"""`spmoe demo`: show what prefetching does, in less than a minute on any machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from spmoe.cli.interrupts import import_engine
from spmoe.cli.options import Json, stderr
from spmoe.cli.output import Console, is_quiet
from spmoe.config import ONE_BY_ONE, SamplingParams, format_bytes
from spmoe.errors import SpmoeError, UsageError
from spmoe.observe.timeline import Activity, Span

if TYPE_CHECKING:
    from spmoe.engine.outputs import RequestOutput

_MIN_LINK_GBPS = 0.1  # keeps the demo short on a busy machine
_TIMELINE_STEPS = 3  # steps that the timelines show
MODES: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0, "prefetch": "on-demand"},
    "speculation, on demand": {"num_speculative_tokens": 4, "prefetch": "on-demand"},
    "speculation, prefetched": {"num_speculative_tokens": 4, "prefetch": "draft-gate"},
}


class DemoRun(NamedTuple):
    """Completion of one mode and the timeline of its last steps."""

    completion: RequestOutput
    spans: list[Span]


def demo(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="MoE model to use; default: the shipped pair.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft for MODEL, with the same tokenizer.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete.")] = "def fibonacci(n):",
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate in each mode.")] = 64,
    link_gbps: Annotated[
        float | None,
        typer.Option(min=0.001, help="Emulated link, in GB/s; default: chosen to match this machine's compute speed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Complete one prompt plainly, with speculation, and with prefetching: same text, different cost.

    Uses float32, slots for a quarter of the experts and an emulated link.
    """
    if model is not None and draft is None:
        raise UsageError("the demo needs a draft for this model; give one with --draft")
    options: dict[str, Any] = {"model": model, "draft": draft or "auto", "expert_memory": "25%", "dtype": "float32"}
    options["progress"] = not is_quiet()
    params = SamplingParams(max_tokens=max_tokens)
    import_engine()
    if link_gbps is None:
        stderr().print("measuring the compute speed of this machine ...")
        link_gbps = _balanced_link(prompt, params, options)
    options["link_gbps"] = link_gbps
    runs = {mode: _run(mode, prompt, params, options) for mode in MODES}
    identical = len({tuple(run.completion.token_ids) for run in runs.values()}) == 1
    if as_json:
        completions = {mode: run.completion.to_dict() for mode, run in runs.items()}
        print(json.dumps({"emulated_link_gbps": link_gbps, "identical": identical, "runs": completions}))
    else:
        _print(prompt, link_gbps, runs, identical)
    if not identical:
        raise SpmoeError("the three modes generated different tokens; please report this as a bug")


def _balanced_link(prompt: str, params: SamplingParams, options: dict[str, Any]) -> float:
    """Return GB/s at which moving the missing experts of a step takes about as long as computing it.

    Overlap matters most there: a much faster link leaves nothing to hide, a much slower one nothing to hide it behind.
    """
    from spmoe.engine.llm import LLM

    with LLM(**options, **ONE_BY_ONE, **MODES["speculation, on demand"]) as llm:
        counters = llm.generate(prompt, params)[0].stats.counters
    compute_seconds = counters.draft_seconds + counters.verify_seconds - counters.stall_seconds
    return max(_MIN_LINK_GBPS, float(f"{counters.demand_bytes / max(compute_seconds, 1e-6) / 1e9:.1g}"))


def _run(mode: str, prompt: str, params: SamplingParams, options: dict[str, Any]) -> DemoRun:
    """Generate twice in one mode; the first run fills the slots and lets the cutoff learn."""
    from spmoe.bench.runs import generate_with_timeline
    from spmoe.engine.llm import LLM
    from spmoe.observe.progress import progress_bar

    with progress_bar(mode, options["progress"]) as report, LLM(**options, **ONE_BY_ONE, **MODES[mode]) as llm:
        llm.generate(prompt, params)
        return DemoRun(*generate_with_timeline(llm, prompt, params, lambda done: report(done, params.max_tokens)))


def _print(prompt: str, link_gbps: float, runs: dict[str, DemoRun], identical: bool) -> None:
    console = Console(highlight=False)
    first = next(iter(runs.values())).completion
    console.print(prompt, style="bold", end="", markup=False, soft_wrap=True)
    console.print(first.text, markup=False, soft_wrap=True)
    console.print()
    if identical:
        console.print(f"All three modes generated exactly these tokens. Emulated link: {link_gbps:g} GB/s.\n")
    console.print(_table(runs))
    console.print()
    stats = [run.completion.stats for run in runs.values()]
    before, after = (1e3 * one.counters.stall_seconds / one.output_tokens for one in stats[-2:])
    if after < before:
        console.print(
            f"Prefetching has cut the stall from {before:.1f} to {after:.1f} ms per token. On a CPU, predicting takes "
            "about the time that it saves; on a GPU it runs beside the copies.\n",
            soft_wrap=True,
        )
    columns = max(20, min(100, console.width - 10))
    step_seconds = max(one.latency_seconds / max(1, one.counters.steps) for one in stats[1:])
    seconds = _TIMELINE_STEPS * step_seconds
    console.print(f"Last {1e3 * seconds:.0f} ms of each (d draft, V verify, . stall; link: # busy, - partly busy):")
    for mode, run in runs.items():
        compute, link = draw_timeline(run.spans, seconds, columns)
        console.print(mode, style="dim")
        console.print(f"compute |{compute}|", markup=False, soft_wrap=True)
        console.print(f"link    |{link}|", markup=False, soft_wrap=True)


def _table(runs: dict[str, DemoRun]) -> Table:
    table = Table("emulated link", *runs, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    stats = [run.completion.stats for run in runs.values()]
    rows = {
        "time per token": [f"{1e3 * (s.tpot_seconds or 0):.1f} ms" for s in stats],
        "tokens per step": [f"{s.output_tokens / s.counters.steps:.2f}" for s in stats],
        "hit rate": [f"{100 * (s.counters.hit_rate or 0):.0f}%" for s in stats],
        "stall per token": [f"{1e3 * s.counters.stall_seconds / s.output_tokens:.1f} ms" for s in stats],
        "loaded on demand": [format_bytes(s.counters.demand_bytes) for s in stats],
        "prefetched": [format_bytes(s.counters.issued_bytes) for s in stats],
        "  of it used": [format_bytes(s.counters.used_bytes) for s in stats],
        "  of it late": [format_bytes(s.counters.late_bytes) for s in stats],
        "  of it wasted": [format_bytes(s.counters.wasted_bytes) for s in stats],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def draw_timeline(spans: list[Span], seconds: float, columns: int) -> tuple[str, str]:
    """Return two rows of characters for the last `seconds`: main activity of compute, and load of the link."""
    start = max((span.end for span in spans), default=0.0) - seconds
    width = seconds / columns
    shares = {activity: [0.0] * columns for activity in Activity}  # of the time of each column
    for span in spans:
        for column in range(max(0, int((span.start - start) / width)), columns):
            overlap = min(span.end, start + (column + 1) * width) - max(span.start, start + column * width)
            if overlap <= 0:
                break
            shares[span.activity][column] += overlap / width
    compute, link = "", ""
    for column in range(columns):
        draft, verify, stall = (shares[kind][column] for kind in (Activity.DRAFT, Activity.VERIFY, Activity.STALL))
        copies = shares[Activity.COPY][column] + shares[Activity.PREFETCH][column]
        by_sign = {"d": draft, "V": verify - stall, ".": stall}  # stalls are part of verification
        sign = max(by_sign, key=lambda one: by_sign[one])
        compute += sign if by_sign[sign] > 0.01 else " "
        link += "#" if copies > 0.5 else "-" if copies > 0.01 else " "
    return compute, link
