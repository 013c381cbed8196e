"""`spmoe run`: complete a prompt, streaming, and print statistics."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spmoe.cli.options import (
    Json,
    ctrl_c_stops,
    load,
    read_text,
    read_text_file,
    require_writable,
    sampling_params,
    stderr,
    stream_text,
    takes_shared_options,
)
from spmoe.config import StructuredOutputsParams, format_bytes

if TYPE_CHECKING:
    from spmoe.engine.stats import Stats
    from spmoe.observe.ledger import Counters


@takes_shared_options
def run(
    engine: dict[str, Any],
    params: dict[str, Any],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete; '-' reads standard input.")] = "-",
    chrome: Annotated[
        Path | None, typer.Option(help="Write a timeline to this file, as Chrome trace events (for Perfetto).")
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="Generate JSON that fulfils the JSON schema in this file; needs spmoe[guidance]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Complete a prompt, from --prompt or standard input, and print statistics. Ctrl-C stops and keeps the text."""
    require_writable(chrome)
    if json_schema is not None:
        params = {**params, "structured_outputs": StructuredOutputsParams(json=read_text_file(json_schema))}
    text = read_text(prompt)
    with load(engine) as llm:
        generation = llm.stream(text, sampling_params(llm, params))
        llm.engine.experts.timeline.recording = chrome is not None
        with suppress(KeyboardInterrupt), ctrl_c_stops(generation):
            stream_text(generation, quiet=as_json)
        completion = generation.completion
        if chrome is not None:
            from spmoe.observe.chrome import write_chrome

            write_chrome(chrome, {"run": llm.engine.experts.timeline.spans})
        if as_json:
            print(json.dumps(completion.to_dict()))
        else:
            stderr().print(stats_table(completion.stats))
    if completion.finish_reason == "interrupted":
        raise typer.Exit(130)


def _cpu_path(c: Counters) -> str:
    """Return what the CPU path did: experts and bytes, rates of both paths, choices that were wrong, failures."""
    text = f"{c.cpu_experts} experts, {format_bytes(c.cpu_bytes)}"
    if c.cpu_gbps is not None:
        text += f" in {1e3 * c.cpu_seconds:.1f} ms ({c.cpu_gbps:.3g} GB/s"
        text += f"; link {c.link_gbps:.3g} GB/s)" if c.link_gbps is not None else ")"
    if c.cpu_copies:
        text += f"; {c.cpu_copies} copied in {1e3 * c.cpu_copy_seconds:.1f} ms"
    if c.path_choices:
        text += f"; {100 * c.wrong_path_choices / c.path_choices:.0f}% of {c.path_choices} choices wrong in hindsight"
    return text + (f"; {c.cpu_failures} failed and were moved" if c.cpu_failures else "")


def stats_table(stats: Stats) -> Table:
    """Format one request's statistics as a table."""
    c = stats.counters
    emulated = stats.emulated_link_gbps
    titles = ["random weights; routing is nearly uniform"] if stats.random_weights else []
    titles += [f"emulated link, {emulated:g} GB/s"] if emulated is not None else []
    table = Table(title="; ".join(titles) or None, show_header=False, box=None, pad_edge=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    table.add_row("tokens", f"{stats.prompt_tokens} in{cached}, {stats.output_tokens} out, {c.steps} steps")
    tpot = stats.tpot_seconds
    speed = f", TPOT {1e3 * tpot:.1f} ms ({1 / tpot:.1f} tokens/s)" if tpot else ""
    table.add_row("time", f"TTFT {1e3 * stats.ttft_seconds:.0f} ms{speed}")
    if c.mean_acceptance_length is not None:
        positions = " ".join(f"{100 * share:.0f}%" for share in c.acceptance_by_position)
        length = f"{c.mean_acceptance_length:.2f} tokens per step"
        if stats.draft_tokens == "auto":  # then only some steps have a draft
            length += f" with a draft ({c.verified} steps, {c.drafted / c.verified:.1f} drafted)"
        accepted = f"{length}; by position {positions}"
        table.add_row("acceptance", accepted)
    if stats.speculation is not None and (summary := stats.speculation.summary()) is not None:
        table.add_row("speculation", summary)
    rate = "-" if c.hit_rate is None else f"{100 * c.hit_rate:.1f}%"
    table.add_row("experts", f"hit rate {rate}, {c.demand_loads} demand loads, {c.prefetch_loads} prefetches")
    if c.cpu_experts or c.cpu_failures:
        table.add_row("on the CPU", _cpu_path(c))
    if c.prefetches_requested:
        table.add_row(
            "prefetched",
            f"{format_bytes(c.issued_bytes)} issued, {format_bytes(c.used_bytes)} used "
            f"({format_bytes(c.late_bytes)} of it late), {format_bytes(c.wasted_bytes)} wasted",
        )
    share = c.stall_seconds / stats.latency_seconds if stats.latency_seconds else 0.0
    table.add_row("stall", f"{1e3 * c.stall_seconds:.1f} ms ({100 * share:.1f}% of the time)")
    if not stats.lossless:
        table.add_row("lossless", f"no (experts in {stats.expert_format})")
    table.add_row("slots", f"{stats.slots}, at most {stats.peak_slots} in use")
    table.add_row("prefetch", stats.prefetch)
    if stats.cutoff_layers is not None:
        table.add_row("cutoff", f"{stats.cutoff_layers} of {stats.layers} layers")
    return table
