"""Result table of `spmoe bench`: one row per configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from spmoe.bench.labels import expert_format
from spmoe.cli.output import Console
from spmoe.config import max_draft_tokens
from spmoe.registry import ON_DEMAND

Row = dict[str, Any]
_MAX_WIDTH = 100  # of the table that is not wide, in characters
_LEAST_WIDTH = 80  # the same on a narrower terminal, where columns would lose their content


def print_table(machine: Row, rows: list[Row], *, legend: bool, wide: bool) -> None:
    """Print the results of one workload: ten columns, or with `wide` all of them, one line per row."""
    console = Console(highlight=False, markup=False, emoji=False)
    table = _wide_table(rows) if wide else _table(rows)
    link = "emulated link" if machine["link_source"] == "emulated" else f"link ({machine['link_source']})"
    link_speed, memory_speed = machine["link_bytes_per_second"] / 1e9, machine["memory_bytes_per_second"] / 1e9
    name = f"{machine['matrix']}: " if machine.get("matrix") else ""
    in_format = f"experts in {found}, " if (found := expert_format(machine)) else ""
    console.print(
        f"{name}{machine['device']}, {machine['dtype']}, {in_format}{machine['shape'] or machine['model']}; {link} "
        f"{link_speed:.3g} GB/s, memory {memory_speed:.3g} GB/s; {_count(machine['prompts'], 'prompt')}, "
        f"{_count(machine['repeat'], 'repeat')}, {_count(machine['output_len'], 'output token')}",
        soft_wrap=True,
    )
    if machine.get("weights_note"):
        console.print(machine["weights_note"], soft_wrap=True)
    most = None if wide else _LEAST_WIDTH if console.is_terminal else _MAX_WIDTH
    console.print_whole(table, most)
    if legend:
        console.print(_WIDE_LEGEND if wide else _LEGEND, style="dim", soft_wrap=True)
    steps = {k: row for row in rows if (k := row["num_speculative_tokens"]) != "auto"}  # auto has steps of many lengths
    times = [
        f"{1e3 * row['all_resident_step_seconds']:.3g} ms at K={k} ({row['all_resident_source']}{_host_time(row)})"
        for k, row in sorted(steps.items())
    ]
    if times:
        console.print(f"step with all experts in slots: {', '.join(times)}", style="dim", soft_wrap=True)
    if wide:
        target, draft = (1e3 * machine[f"{name}_read_seconds"] for name in ("active", "draft"))
        read = f"reading weights once: {target:.3g} ms for one row of the target, {draft:.3g} ms for the draft"
        console.print(read, style="dim", soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _host_time(row: Row) -> str:
    seconds = row["host_seconds_per_layer"]
    return "" if seconds is None else f", {1e6 * seconds:.3g} us per layer of it outside of CUDA graphs"


def _table(rows: list[Row]) -> Table:
    """Return the table that fits a terminal; the configuration is one column, which may be folded."""
    shown = [
        text
        for name, text in _CONFIGURATION.items()
        if name in ("memory", "prefetch") or len({text(row) for row in rows}) > 1
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("configuration", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    for row in rows:
        parts = [text(row) for text in shown]
        cells = [text(row) for text in _COLUMNS.values()]
        speedup = _baseline(row, rows)["tpot_seconds"]["median"] / row["tpot_seconds"]["median"]
        table.add_row(", ".join(part for part in parts if part != "-"), *cells, f"{speedup:.2f}x")
    return table


def _baseline(row: Row, rows: list[Row]) -> Row:
    """Return the row that speed-ups refer to: of the same memory, on demand, with the smallest K."""
    same = [one for one in rows if one["expert_memory"] == row["expert_memory"]]
    on_demand = [one for one in same if one["prefetch"] == ON_DEMAND] or same[:1]
    return min(on_demand, key=lambda one: max_draft_tokens(one["num_speculative_tokens"]))


def _wide_table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    optional = [(name, text) for name, text in _OPTIONAL_COLUMNS.items() if len({text(row) for row in rows}) > 1]
    columns = [*_WIDE_COLUMNS.items()]
    columns = [*columns[:3], *optional, *columns[3:]]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(text(row) for _, text in columns))
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _ms_of(key: str) -> Callable[[Row], str]:
    return lambda row: _ms(row[key])


def _percent_of(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else f"{100 * row[key]:.0f}"


def _megabytes_of(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / 1e6:.1f}"


_LEGEND = (
    "TPOT: ms per output token (median; 10th to 90th percentile); acc: tokens per speculative step; hit: % of routed "
    "experts found in a slot; stall: ms per token that compute waits for experts; MB/tok: moved per token; eff: "
    "pipeline efficiency in %, the best step that link and compute allow over the measured one; speed-up: in TPOT, "
    "over on-demand with the smallest K and the same memory. --wide shows more."
)
_WIDE_LEGEND = (
    "TPOT: ms per output token (median; 10th to 90th percentile); TTFT: ms to the first token; acc: tokens per "
    "speculative step; step, draft, verify, stall: ms per step (stall is part of verify); hit: % of routed experts "
    "found in a slot; MB/tok: moved per token; useful: MB moved and used per step; GB/s: moved over time; used, late, "
    "waste: % of prefetched bytes; same: % of prompts with the first row's tokens; eff: pipeline efficiency in %, "
    "max(useful / link, step with all experts in slots) / step"
)
_WIDE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "memory": lambda row: str(row["expert_memory"]),
    "prefetch": lambda row: str(row["prefetch"]),
    "K": lambda row: str(row["num_speculative_tokens"]),
    "TPOT": lambda row: _ms(row["tpot_seconds"]["median"]),
    "10-90%": lambda row: "-".join(_ms(row["tpot_seconds"][key]) for key in ("p10", "p90")),
    "TTFT": lambda row: _ms(row["ttft_seconds"]["median"]),
    "tok/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "acc": lambda row: "-" if row["mean_acceptance_length"] is None else f"{row['mean_acceptance_length']:.2f}",
    "steps": lambda row: str(row["steps"]),
    "step": _ms_of("step_seconds"),
    "draft": _ms_of("draft_seconds_per_step"),
    "verify": _ms_of("verify_seconds_per_step"),
    "stall": _ms_of("stall_seconds_per_step"),
    "hit": _percent_of("hit_rate"),
    "MB/tok": _megabytes_of("bytes_moved_per_token"),
    "useful": _megabytes_of("useful_bytes_per_step"),
    "GB/s": lambda row: f"{row['link_bytes_per_second'] / 1e9:.3g}",
    "used": _percent_of("prefetch_used_share"),
    "late": _percent_of("prefetch_late_share"),
    "waste": _percent_of("prefetch_wasted_share"),
    "same": _percent_of("identical_share"),
    "eff": _percent_of("pipeline_efficiency"),
}
_OPTIONAL_COLUMNS: dict[str, Callable[[Row], str]] = {  # shown if rows differ in them
    "system": lambda row: row["system"] or "-",
    "eviction": lambda row: str(row["eviction"]),
    "cutoff": lambda row: str(row["cutoff"]),
    "ablation": lambda row: row["ablation"] or "-",
}
_CONFIGURATION: dict[str, Callable[[Row], str]] = {  # of the narrow table; the first two always, others if rows differ
    "memory": _WIDE_COLUMNS["memory"],
    "prefetch": _WIDE_COLUMNS["prefetch"],
    "eviction": _OPTIONAL_COLUMNS["eviction"],
    "cutoff": lambda row: "-" if row["cutoff_layers"] is None else f"cutoff {row['cutoff']}",
    "ablation": _OPTIONAL_COLUMNS["ablation"],
    "system": lambda row: f"({row['system']})" if row["system"] else "-",
}
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "K": _WIDE_COLUMNS["K"],
    "TPOT": _WIDE_COLUMNS["TPOT"],
    "10-90%": _WIDE_COLUMNS["10-90%"],
    "acc": _WIDE_COLUMNS["acc"],
    "hit": _WIDE_COLUMNS["hit"],
    "stall": lambda row: _ms(row["stall_seconds_per_step"] * row["steps"] / max(1, row["output_tokens"])),
    "MB/tok": _WIDE_COLUMNS["MB/tok"],
    "eff": _WIDE_COLUMNS["eff"],
}
