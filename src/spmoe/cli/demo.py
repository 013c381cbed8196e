"""`spmoe demo`: what prefetching does, seen in under a minute on any machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spmoe.cli.options import Json, stderr
from spmoe.config import format_bytes
from spmoe.errors import SpmoeError, UsageError

if TYPE_CHECKING:
    from spmoe.bench.demo import Shown


def demo(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="MoE model to show it on; default: the pair that ships.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft, with the same tokenizer.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete.")] = "def fibonacci(n):",
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate each time.")] = 64,
    link_gbps: Annotated[
        float | None, typer.Option(min=0.001, help="Emulated link, in GB/s; default: as fast as this machine computes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Complete one prompt plainly, with speculation, and with prefetching: the same text, at different cost.

    A quarter of the experts in slots, float32, and an emulated link.
    """
    from spmoe.bench.demo import WAYS, balanced_link, run_way
    from spmoe.engine.llm import threads_for
    from spmoe.observe.progress import progress_bar

    if model is not None and draft is None:
        raise UsageError("a demonstration needs a draft as well; give one with --draft")
    options: dict[str, Any] = {"model": model, "draft": draft, "expert_memory": "25%", "dtype": "float32"}
    options["progress"] = not as_json and sys.stderr.isatty()
    shown: dict[str, Shown] = {}
    with threads_for(model):
        if link_gbps is None:
            stderr().print("measuring how fast this machine computes ...")
            link_gbps = balanced_link(prompt, max_tokens, options)
        options["link_gbps"] = link_gbps
        for way in WAYS:
            with progress_bar(way, options["progress"]) as report:
                shown[way] = run_way(way, prompt, max_tokens, options, report)
    texts = {way: one.completion.token_ids for way, one in shown.items()}
    identical = len({tuple(ids) for ids in texts.values()}) == 1
    if as_json:
        runs = {way: one.completion.to_dict() for way, one in shown.items()}
        print(json.dumps({"emulated_link_gbps": link_gbps, "identical": identical, "runs": runs}))
    else:
        _print(prompt, link_gbps, shown, identical)
    if not identical:
        raise SpmoeError("the three texts differ, which must never happen; please report this machine and its versions")


def _print(prompt: str, link_gbps: float, shown: dict[str, Shown], identical: bool) -> None:
    console = Console(highlight=False)
    first = next(iter(shown.values())).completion
    console.print(prompt, style="bold", end="", markup=False, soft_wrap=True)
    console.print(first.text, markup=False, soft_wrap=True)
    console.print()
    if identical:
        console.print(f"All three wrote exactly this, token for token. Emulated link: {link_gbps:g} GB/s.\n")
    console.print(_table(shown))
    console.print()
    _print_timelines(console, shown)


def _table(shown: dict[str, Shown]) -> Table:
    table = Table("emulated link", *shown, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    stats = [one.completion.stats for one in shown.values()]

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    row("time per token", [f"{1e3 * (s.tpot_seconds or 0):.1f} ms" for s in stats])
    row("tokens per step", [f"{s.output_tokens / s.counters.steps:.2f}" for s in stats])
    row("hit rate", [f"{100 * (s.counters.hit_rate or 0):.0f}%" for s in stats])
    row("stall per token", [f"{1e3 * s.counters.stall_seconds / s.output_tokens:.1f} ms" for s in stats])
    row("loaded on demand", [format_bytes(s.counters.demand_bytes) for s in stats])
    row("prefetched", [format_bytes(s.counters.issued_bytes) for s in stats])
    row("  of it used", [format_bytes(s.counters.used_bytes) for s in stats])
    row("  of it late", [format_bytes(s.counters.late_bytes) for s in stats])
    row("  of it wasted", [format_bytes(s.counters.wasted_bytes) for s in stats])
    return table


def _print_timelines(console: Console, shown: dict[str, Shown]) -> None:
    from spmoe.bench.demo import draw

    columns = max(20, min(100, console.width - 10))
    steps = [one.completion.stats for one in shown.values()]
    seconds = 3 * max(s.latency_seconds / max(1, s.counters.steps) for s in steps[1:])
    console.print(f"The last {1e3 * seconds:.0f} ms of each (d draft, V verify, . stall; # - link busy, partly):")
    for way, one in shown.items():
        compute, link = draw(one.spans, seconds, columns)
        console.print(way, style="dim")
        console.print(f"compute |{compute}|", markup=False, soft_wrap=True)
        console.print(f"link    |{link}|", markup=False, soft_wrap=True)
