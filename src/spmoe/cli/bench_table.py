"""What `spmoe bench` prints: a table, a row for each configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(machine: dict[str, Any], rows: list[dict[str, Any]], legend: bool) -> None:
    """Show the figures of one case."""
    table, console = _table(rows), Console(highlight=False, markup=False, emoji=False)
    wide = Console(width=10 * sum(map(len, _COLUMNS)) + 10 * sum(map(len, _WHERE_THEY_DIFFER)))
    console.width = max(console.width, wide.measure(table).maximum)  # a row is one line, also where that is too long
    link = "emulated link" if machine["link_source"] == "emulated" else f"link ({machine['link_source']})"
    link_speed, memory_speed = machine["link_bytes_per_second"] / 1e9, machine["memory_bytes_per_second"] / 1e9
    case = f"{machine['matrix']}: " if machine.get("matrix") else ""
    console.print(
        f"{case}{machine['device']}, {machine['dtype']}, {machine['shape'] or machine['model']}; {link} "
        f"{link_speed:.3g} GB/s, memory {memory_speed:.3g} GB/s; prompts: {machine['prompts']}, each "
        f"{machine['repeat']} times, {machine['output_len']} tokens",
        soft_wrap=True,
    )
    console.print(table)
    if legend:
        console.print(_LEGEND, style="dim", soft_wrap=True)
    steps = {k: row for row in rows if (k := row["num_speculative_tokens"]) != "auto"}  # whose steps differ row by row
    told = [
        f"{1e3 * row['all_resident_step_seconds']:.3g} ms at K={k} ({row['resident_source']}{_host(row)})"
        for k, row in sorted(steps.items())
    ]
    if told:
        console.print(f"step with all experts in slots: {', '.join(told)}", style="dim", soft_wrap=True)
    target, draft = (1e3 * machine[f"{name}_read_seconds"] for name in ("active", "draft"))
    read = f"reading weights once: {target:.3g} ms those of one row, {draft:.3g} ms the draft's"
    console.print(read, style="dim", soft_wrap=True)


def _host(row: dict[str, Any]) -> str:
    seconds = row["host_seconds_per_layer"]
    return "" if seconds is None else f", of it {1e6 * seconds:.3g} us per layer outside of recorded forwards"


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    extra = {name: show for name, show in _WHERE_THEY_DIFFER.items() if len({show(row) for row in rows}) > 1}
    columns = [*_COLUMNS.items()]
    columns = [*columns[:3], *extra.items(), *columns[3:]]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def _milliseconds_of(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _milliseconds(row[key])


def _percent_of(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _percent(row[key])


def _millions_of(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key] / 1e6:.1f}"


_LEGEND = (
    "TPOT, TTFT, step: ms per output token (median; 10th to 90th percentile), to the first token, per step, and of a "
    "step draft, verify and, within it, stall; acc: tokens per drafted step; hit: % of experts that were there; "
    "MB/tok: moved; useful: MB per step moved and used; GB/s: moved, over the time; used, late, waste: % of what was "
    "prefetched; same: % of prompts with the first row's tokens; eff: max(useful / link, step with all experts in "
    "slots) / step, in %"
)
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "memory": lambda row: str(row["expert_memory"]),
    "prefetch": lambda row: str(row["prefetch"]),
    "K": lambda row: str(row["num_speculative_tokens"]),
    "TPOT": lambda row: _milliseconds(row["tpot_seconds"]["median"]),
    "10-90%": lambda row: "-".join(_milliseconds(row["tpot_seconds"][key]) for key in ("p10", "p90")),
    "TTFT": lambda row: _milliseconds(row["ttft_seconds"]["median"]),
    "tok/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "acc": lambda row: "-" if row["mean_acceptance_length"] is None else f"{row['mean_acceptance_length']:.2f}",
    "steps": lambda row: str(row["steps"]),
    "step": _milliseconds_of("step_seconds"),
    "draft": _milliseconds_of("draft_seconds_per_step"),
    "verify": _milliseconds_of("verify_seconds_per_step"),
    "stall": _milliseconds_of("stall_seconds_per_step"),
    "hit": _percent_of("hit_rate"),
    "MB/tok": _millions_of("bytes_moved_per_token"),
    "useful": _millions_of("useful_bytes_per_step"),
    "GB/s": lambda row: f"{row['link_bytes_per_second'] / 1e9:.3g}",
    "used": _percent_of("prefetch_used_share"),
    "late": _percent_of("prefetch_late_share"),
    "waste": _percent_of("prefetch_wasted_share"),
    "same": _percent_of("identical_share"),
    "eff": _percent_of("pipeline_efficiency"),
}
_WHERE_THEY_DIFFER: dict[str, Callable[[dict[str, Any]], str]] = {
    "system": lambda row: row["system"] or "-",
    "eviction": lambda row: str(row["eviction"]),
    "cutoff": lambda row: str(row["cutoff"]),
    "ablation": lambda row: row["ablation"] or "-",
}
