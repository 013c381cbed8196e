"""`spmoe trace`: record what real generations do, and replay it under other policies, budgets and links."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from spmoe.cli.listed import listed, speed, whole
from spmoe.cli.options import Json, ctrl_c_stops, load, require_writable, stderr, takes_shared_options_except
from spmoe.config import Cutoff, SamplingParams, Size, draft_tokens, eviction_policy_for
from spmoe.errors import UsageError
from spmoe.registry import PREFETCH_POLICIES

if TYPE_CHECKING:
    from spmoe.engine.llm import Generation
    from spmoe.replay.replay import Outcome, Setting
    from spmoe.replay.trace import Trace

T = TypeVar("T")

trace = typer.Typer(name="trace", help="Record what real generations do, and replay it without a GPU or weights.")


@trace.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    """Record what real generations do, and replay it without a GPU or weights."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@trace.command("record", short_help="Generate, and write down what was routed.")
@takes_shared_options_except("enforce_eager")  # always
def record_trace(
    engine: dict[str, Any],
    params: SamplingParams,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the trace to.")],
    prompts: Annotated[
        str, typer.Option(help="Prompts: a file (text, or JSON lines), a set of the hub, or 'sample'.")
    ] = "sample",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Take no more prompts than this.")] = None,
    as_json: Json = False,
) -> None:
    """Generate from prompts, and write what was routed, foretold and took how long to a file.

    Generates as `spmoe run` does, except that on CUDA there are no graphs, so that each layer can be timed. Ctrl-C
    keeps what there is.
    """
    if draft_tokens(engine["num_speculative_tokens"]) == "auto":
        raise UsageError("a trace is replayed with any K up to its own, which every step must have had; give a number")
    require_writable(output)

    from spmoe.bench.prompts import find_prompts
    from spmoe.observe.progress import progress_bar
    from spmoe.replay.record import record

    chosen, bar, stopped = find_prompts(prompts).first(max_prompts).prompts, not as_json and sys.stderr.isatty(), False

    @contextmanager
    def observer(generation: Generation) -> Iterator[None]:
        nonlocal stopped
        with ctrl_c_stops(generation):
            yield
        stopped = generation.stopped

    with (
        load({**engine, "enforce_eager": True}, progress=not as_json) as llm,
        progress_bar("Recording", bar) as report,
    ):
        made = record(llm, list(chosen), params, observer, report)
    made.save(output)
    size = output.stat().st_size
    facts = {"file": str(output), "bytes": size, "steps": len(made), "verified_steps": made.verified}
    if as_json:
        print(json.dumps({**facts, "live": made.about["live"]}))
    else:
        kept = "interrupted; " * stopped + f"{len(made)} steps, {made.verified} of them with a draft, in {output}"
        stderr().print(f"{kept} ({size / 1e6:.1f} MB)", soft_wrap=True)
        if not made.shape.link_bytes_per_second:  # which is known from the profile of what prefetches from a draft
            stderr().print("note: the link was not measured in such a run; replay it with --link-gbps", soft_wrap=True)
    if stopped:
        raise typer.Exit(130)


@trace.command("replay", short_help="Play a trace on a virtual clock.")
def replay_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `spmoe trace record` wrote.")],
    prefetch: Annotated[
        str, typer.Option(help="Prefetch policies, with commas; also 'perfect-draft' and 'oracle'.")
    ] = "on-demand,draft-gate",
    eviction: Annotated[
        str, typer.Option(help="Eviction rules, with commas; also 'belady' and 'one-step-perfect'; auto: the policy's.")
    ] = "auto",
    num_speculative_tokens: Annotated[
        str | None, typer.Option("--num-speculative-tokens", "-k", help="K, with commas; default: as recorded.")
    ] = None,
    cutoff: Annotated[
        str, typer.Option(help="Layers to prefetch for, with commas: auto, just-in-time, none, numbers.")
    ] = "auto",
    expert_memory: Annotated[
        str | None, typer.Option(help="Memory for experts, with commas: sizes or shares; default: as recorded.")
    ] = None,
    link_gbps: Annotated[
        str | None, typer.Option(help="Gigabytes per second of the link, with commas; default: as recorded.")
    ] = None,
    compute_scale: Annotated[float, typer.Option(min=0, help="Compute takes this many times as long.")] = 1.0,
    expert_size: Annotated[str | None, typer.Option(help="As if an expert had this size, such as 336MiB.")] = None,
    draft_pass_ms: Annotated[float | None, typer.Option(min=0, help="As if a draft pass took this long.")] = None,
    verify_layer_ms: Annotated[
        float | None, typer.Option(min=0, help="As if a layer of the target took this long, its experts resident.")
    ] = None,
    transfer: Annotated[
        str,
        typer.Option(
            help="How copies move: 'recorded', or 'cuda' (prefetch requests in chunks that a demand overtakes)."
        ),
    ] = "recorded",
    chrome: Annotated[
        Path | None, typer.Option(help="Write the last steps as Chrome trace events (for Perfetto) to this file.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that replay at once; default: one for each usable core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per configuration and line.")] = False,
) -> None:
    """Play a recorded trace on a virtual clock: every combination of what is given, with nothing loaded."""
    from spmoe.observe.chrome import write_chrome
    from spmoe.replay.replay import Replayer, Setting, Times, as_cuda, rank
    from spmoe.replay.trace import Trace
    from spmoe.replay.workers import replay_all, usable_cores

    if transfer not in ("recorded", "cuda"):
        raise UsageError(f"transfer must be recorded or cuda, not {transfer!r}")
    require_writable(chrome)
    recorded = Trace.load(file)
    if expert_size is not None:
        size = Size.parse(expert_size).of(recorded.shape.expert_bytes)
        recorded = replace(recorded, shape=replace(recorded.shape, expert_bytes=size))
    if transfer == "cuda":
        recorded = as_cuda(recorded)
    times = Times(compute_scale, _seconds(draft_pass_ms), _seconds(verify_layer_ms))
    settings = [
        Setting(policy, eviction_policy_for(policy if policy in PREFETCH_POLICIES else "on-demand", rule), k, depth, memory, link)
        for policy, rule, k, depth, memory, link in product(
            parse_list("--prefetch", prefetch, str),
            parse_list("--eviction", eviction, str),
            _each("--num-speculative-tokens", num_speculative_tokens, parse_whole),
            parse_list("--cutoff", cutoff, Cutoff.parse),
            _each("--expert-memory", expert_memory, Size.parse),
            _each("--link-gbps", link_gbps, speed),
        )
    ]
    settings = list(dict.fromkeys(settings))  # a rule may be named twice, by its name and as auto
    replayer = Replayer(recorded, times)
    for setting in settings:
        replayer.require(setting)
    replayed = list(replay_all(replayer, settings, workers or usable_cores(), draw=chrome is not None))
    outcomes = [outcome for outcome, _ in replayed]
    if chrome is not None:
        write_chrome(chrome, {_label(made.setting): line.spans for made, line in replayed if line is not None})
    places = rank(outcomes)
    if as_json:
        for outcome, place in zip(outcomes, places, strict=True):
            print(json.dumps({**outcome.to_dict(), "rank": place}))
    else:
        table, console = _table(outcomes, places), Console(highlight=False, markup=False, emoji=False)
        console.width = max(console.width, Console(width=1000).measure(table).maximum)  # a row is one line
        console.print(table)
        console.print(_recorded_line(recorded), soft_wrap=True)


def _table(outcomes: list[Outcome], places: list[int]) -> Table:
    columns = (
        "rank", "prefetch", "eviction", "K", "cutoff", "slots", "GB/s", "step ms", "TPOT ms", "stall ms", "loads/token",
        "MB/token", "hits", "used", "late", "wasted", "link busy", "efficiency",
    )  # fmt: skip
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for outcome, place in zip(outcomes, places, strict=True):
        d = outcome.to_dict()
        prefetches = d["prefetch_loads_per_step"] > 0
        table.add_row(
            str(place), d["prefetch"], d["eviction"], str(d["num_speculative_tokens"]),
            "-" if d["cutoff_layers"] is None else str(d["cutoff_layers"]), str(d["slots"]), f"{d['link_gbps']:.3g}",
            f"{d['step_ms']:.2f}", f"{d['tpot_ms']:.2f}", f"{d['stall_ms_per_step']:.2f}",
            f"{d['loads_per_token']:.2f}", f"{d['bytes_per_token'] / 1e6:.1f}", f"{100 * (d['hit_rate'] or 0):.1f}%",
            *(f"{100 * d[name]:.0f}%" if prefetches else "-" for name in ("used_share", "late_share", "wasted_share")),
            f"{100 * d['link_busy_share']:.0f}%", f"{d['pipeline_efficiency']:.2f}",
        )  # fmt: skip
    return table


def _recorded_line(recorded: Trace) -> str:
    """What the recorded run itself came to."""
    live, options = recorded.about.get("live") or {}, recorded.about.get("options") or {}
    if not live.get("steps"):
        return ""
    loads = live["demand_loads"] + live["prefetch_loads"]
    return (
        f"recorded: {options.get('prefetch')}, {options.get('eviction')}, {recorded.shape.slots} slots: step "
        f"{1e3 * live['seconds'] / live['steps']:.2f} ms, stall {1e3 * live['stall_seconds'] / live['steps']:.2f} ms, "
        f"{loads / max(1, live['tokens']):.2f} loads/token"
    )


def _label(setting: Setting) -> str:
    parts = (
        setting.prefetch,
        setting.eviction,
        setting.draft_tokens,
        setting.cutoff,
        setting.memory,
        setting.link_gbps,
    )
    return " ".join(str(part) for part in parts if part is not None)


def _each(name: str, text: str | None, convert: Callable[[str], T]) -> Sequence[T | None]:
    """The values of an option that takes several; None where it was not given."""
    return [None] if text is None else listed(name, text, convert)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
