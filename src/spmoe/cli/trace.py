"""`spmoe trace`: record the routing of real generations, and replay it under other policies, budgets and links."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from spmoe.cli.interrupts import import_engine
from spmoe.cli.listed import parse_gbps, parse_list, parse_whole
from spmoe.cli.options import Json, ctrl_c_stops, load, require_writable, stderr, takes_shared_options_except
from spmoe.cli.output import Console, is_quiet, note
from spmoe.config import Cutoff, SamplingParams, Size, parse_num_speculative_tokens
from spmoe.errors import UsageError

if TYPE_CHECKING:
    from spmoe.engine.llm import Generation
    from spmoe.observe.timeline import Timeline
    from spmoe.replay.replay import ReplayConfig, ReplayResult
    from spmoe.replay.trace import Trace

T = TypeVar("T")
_RECORDED_TOKENS = 4  # K of a trace, unless -k is given

trace = typer.Typer(
    name="trace", help="Record the routing of real generations, and replay it without a GPU or weights."
)


@trace.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    """Record the routing of real generations, and replay it without a GPU or weights."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@trace.command("record", short_help="Generate, and write the routing to a file.")
# eager execution is always on, and traces are greedy
@takes_shared_options_except("enforce_eager", "generation_config", "num_speculative_tokens")
def record_trace(
    engine: dict[str, Any],
    params: dict[str, Any],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the trace to.")],
    prompts: Annotated[
        str, typer.Option(help="Prompts: a file (text, or JSON lines), a dataset of the hub, or 'sample'.")
    ] = "sample",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Draft tokens per step, a number; replays may use a smaller one. Default: 4, or 0 with --draft none.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate from prompts, and write routing, predictions and times to a file.

    Generates as `spmoe run` does, but without CUDA graphs, so that each layer can be timed. After Ctrl-C the file holds
    the steps so far.
    """
    if num_speculative_tokens is None:
        num_speculative_tokens = "0" if engine["draft"] == "none" else str(_RECORDED_TOKENS)
    if (k := parse_num_speculative_tokens(num_speculative_tokens)) == "auto":
        raise UsageError(
            "--num-speculative-tokens auto cannot be recorded: every step of a trace must have the same K; give a "
            "number (a replay may use any smaller one)"
        )
    engine["num_speculative_tokens"] = k
    require_writable(output)

    import_engine()
    from spmoe.bench.prompts import find_prompts
    from spmoe.observe.progress import progress_bar
    from spmoe.replay.record import record

    texts, stopped = find_prompts(prompts).first(max_prompts).prompts, False

    @contextmanager
    def stop_on_ctrl_c(generation: Generation) -> Iterator[None]:
        nonlocal stopped
        with ctrl_c_stops(generation):
            yield
        stopped = generation.stopped

    with (
        load({**engine, "enforce_eager": True}) as llm,
        progress_bar("Recording", not is_quiet()) as report,
    ):
        recorded = record(llm, list(texts), SamplingParams(**params), stop_on_ctrl_c, report)
    recorded.save(output)
    size = output.stat().st_size
    facts = {"file": str(output), "bytes": size, "steps": len(recorded), "verified_steps": recorded.verified}
    if as_json:
        print(json.dumps({**facts, "lossless": _is_lossless(recorded), "live": recorded.about["live"]}))
    else:
        counts = f"{len(recorded)} steps ({recorded.verified} with a draft)"
        message = "interrupted; " * stopped + f"wrote {counts} to {output} ({size / 1e6:.1f} MB)"
        stderr().print(message, soft_wrap=True)
        if not recorded.shape.link_bytes_per_second:  # it is measured only for policies that need it
            note("the link was not measured in this run; replay it with --link-gbps")
    if stopped:
        raise typer.Exit(130)


@trace.command("replay", short_help="Replay a trace on a virtual clock.")
def replay_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File written by `spmoe trace record`.")],
    prefetch: Annotated[
        str, typer.Option(help="Prefetch policies, separated by commas; also 'perfect-draft' and 'oracle'.")
    ] = "on-demand,draft-gate",
    eviction: Annotated[
        str,
        typer.Option(
            help="Eviction policies, separated by commas; also 'belady' and 'one-step-perfect'. auto: the one that "
            "belongs to the prefetch policy."
        ),
    ] = "auto",
    num_speculative_tokens: Annotated[
        str | None, typer.Option("--num-speculative-tokens", "-k", help="K, separated by commas; default: as recorded.")
    ] = None,
    cutoff: Annotated[
        str, typer.Option(help="Layers to prefetch for, separated by commas: auto, just-in-time, all, numbers.")
    ] = "auto",
    expert_memory: Annotated[
        str | None,
        typer.Option(help="Memory for experts, separated by commas: sizes or percentages; default: as recorded."),
    ] = None,
    link_gbps: Annotated[
        str | None, typer.Option(help="Link speed in GB/s, separated by commas; default: as recorded.")
    ] = None,
    cpu_gbps: Annotated[
        str | None,
        typer.Option(
            help="Rate at which the CPU computes missing experts beside a busy link, in GB/s of stored weights, "
            "separated by commas; default: they are always moved."
        ),
    ] = None,
    compute_scale: Annotated[float, typer.Option(min=0, help="Multiply all compute times by this factor.")] = 1.0,
    expert_size: Annotated[str | None, typer.Option(help="Assume experts of this size, such as 336MiB.")] = None,
    draft_pass_ms: Annotated[float | None, typer.Option(min=0, help="Assume this time for a draft pass.")] = None,
    verify_layer_ms: Annotated[
        float | None, typer.Option(min=0, help="Assume this time for a target layer with resident experts.")
    ] = None,
    transfer: Annotated[
        str,
        typer.Option(
            help="Kind of transfer: 'recorded', or 'cuda' (prefetches in chunks, which demand loads overtake)."
        ),
    ] = "recorded",
    chrome: Annotated[
        Path | None, typer.Option(help="Write the last steps as Chrome trace events (for Perfetto) to this file.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; default: one per usable core.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per configuration, one per line, best first.")
    ] = False,
) -> None:
    """Replay a trace on a virtual clock, for every combination of the options, best first. No model is loaded."""
    from spmoe.observe.chrome import write_chrome
    from spmoe.observe.progress import progress_bar
    from spmoe.replay.policies import eviction_of
    from spmoe.replay.replay import ComputeTimes, ReplayConfig, Replayer, as_cuda, rank
    from spmoe.replay.trace import Trace
    from spmoe.replay.workers import replay_all
    from spmoe.system.host import allowed_cores

    if transfer not in ("recorded", "cuda"):
        raise UsageError(f"transfer must be recorded or cuda, not {transfer!r}")
    require_writable(chrome)
    recorded = Trace.load(file)
    if expert_size is not None:
        size = Size.parse(expert_size).of(recorded.shape.expert_bytes)
        recorded = replace(recorded, shape=replace(recorded.shape, expert_bytes=size))
    if transfer == "cuda":
        recorded = as_cuda(recorded)
    times = ComputeTimes(compute_scale, _seconds(draft_pass_ms), _seconds(verify_layer_ms))
    configs = [
        ReplayConfig(policy, eviction_of(policy, evicts), k, layers, memory, link, cpu)
        for policy, evicts, k, layers, memory, link, cpu in product(
            parse_list("--prefetch", prefetch, str),
            parse_list("--eviction", eviction, str),
            _values("--num-speculative-tokens", num_speculative_tokens, parse_whole),
            parse_list("--cutoff", cutoff, Cutoff.parse),
            _values("--expert-memory", expert_memory, Size.parse),
            _values("--link-gbps", link_gbps, parse_gbps),
            _values("--cpu-gbps", cpu_gbps, parse_gbps),
        )
    ]
    configs = list(dict.fromkeys(configs))  # an eviction policy may be given by its name and as auto
    replayer = Replayer(recorded, times)
    for config in configs:
        replayer.require(config)
    replayed: list[tuple[ReplayResult, Timeline | None]] = []
    with progress_bar("Replaying", not is_quiet()) as report:
        for one in replay_all(replayer, configs, workers or allowed_cores(), draw=chrome is not None):
            report(len(replayed), len(configs))
            replayed.append(one)
        report(len(replayed), len(configs))
    results = [result for result, _ in replayed]
    if chrome is not None:
        write_chrome(chrome, {_label(result.config): line.spans for result, line in replayed if line is not None})
    ranked = sorted(zip(rank(results), results, strict=True), key=lambda one: one[0])
    if as_json:
        for place, result in ranked:
            print(json.dumps({**result.to_dict(), "rank": place, "lossless": _is_lossless(recorded)}))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        console.print_whole(_table(ranked))
        if live := _recorded_line(recorded):
            console.print(live, soft_wrap=True)


def _table(ranked: list[tuple[int, ReplayResult]]) -> Table:
    columns = (
        "rank", "prefetch", "eviction", "K", "cutoff", "slots", "GB/s", "step ms", "TPOT ms", "stall ms", "loads/token",
        "MB/token", "hits", "used", "late", "wasted", "link busy", "efficiency",
    )  # fmt: skip
    on_cpu = any(result.config.cpu_gbps is not None for _, result in ranked)
    table = Table(*columns, *(["on CPU/token"] if on_cpu else []), box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for place, result in ranked:
        d = result.to_dict()
        prefetches = d["prefetch_loads_per_step"] > 0
        table.add_row(
            str(place), d["prefetch"], d["eviction"], str(d["num_speculative_tokens"]),
            "-" if d["cutoff_layers"] is None else str(d["cutoff_layers"]), str(d["slots"]), f"{d['link_gbps']:.3g}",
            f"{d['step_ms']:.2f}", f"{d['tpot_ms']:.2f}", f"{d['stall_ms_per_step']:.2f}",
            f"{d['loads_per_token']:.2f}", f"{d['bytes_per_token'] / 1e6:.1f}", f"{100 * (d['hit_rate'] or 0):.1f}%",
            *(f"{100 * d[name]:.0f}%" if prefetches else "-" for name in ("used_share", "late_share", "wasted_share")),
            f"{100 * d['link_busy_share']:.0f}%", f"{d['pipeline_efficiency']:.2f}",
            *([f"{d['cpu_experts_per_token']:.2f}"] if on_cpu else []),
        )  # fmt: skip
    return table


def _recorded_line(recorded: Trace) -> str:
    """Describe the recorded run itself."""
    live, options = recorded.about.get("live") or {}, recorded.about.get("options") or {}
    if not live.get("steps"):
        return ""
    loads = live["demand_loads"] + live["prefetch_loads"]
    return (
        f"recorded: {options.get('prefetch')}, {options.get('eviction')}, {recorded.shape.slots} slots: step "
        f"{1e3 * live['seconds'] / live['steps']:.2f} ms, stall {1e3 * live['stall_seconds'] / live['steps']:.2f} ms, "
        f"{loads / max(1, live['tokens']):.2f} loads/token"
        + ("" if _is_lossless(recorded) else f", experts in {options.get('expert_format')} (lossless: no)")
    )


def _is_lossless(recorded: Trace) -> bool:
    """Return whether the recorded run had the checkpoint's weights."""
    return bool((recorded.about.get("options") or {}).get("lossless", True))


def _label(config: ReplayConfig) -> str:
    parts = (
        config.prefetch, config.eviction, config.draft_tokens, config.cutoff, config.memory, config.link_gbps,
        config.cpu_gbps,
    )  # fmt: skip
    return " ".join(str(part) for part in parts if part is not None)


def _values(name: str, text: str | None, convert: Callable[[str], T]) -> Sequence[T | None]:
    """Parse the values of an option; [None] if it was not given."""
    return [None] if text is None else parse_list(name, text, convert)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
