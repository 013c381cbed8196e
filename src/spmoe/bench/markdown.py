"""Stored results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmoe.bench.comparison import Column, Comparison, floor_tpot, format_speed, milliseconds, tpot
from spmoe.bench.labels import Row, expert_format, model_name
from spmoe.bench.machine_facts import format_cores, format_date, format_host_memory
from spmoe.bench.results import WorkloadResults

_HEAD = (
    "", "memory", "K", "TPOT (10-90 %)", "runs", "floor", "stall per step", "hits", "moved per token", "efficiency",
)  # fmt: skip
_MAX_COLUMNS = 10  # of a table, with the names of its rows


def markdown_report(results: Sequence[WorkloadResults]) -> str:
    """Return machines, speed-ups, metrics of every configuration and commands."""
    found = Comparison(results)
    parts = list(dict.fromkeys(_machine(one.machine) for one in results))
    if summary := found.summary():
        parts.append(f"{found.highlighted}: {'; '.join(summary)}.")
    if len(found.systems) > 1:
        for workload, columns in found.columns_by_workload().items():
            starts = range(0, len(columns), _MAX_COLUMNS - 1)
            parts += [_speedups(found, workload, columns[start : start + _MAX_COLUMNS - 1]) for start in starts]
    parts.append(_metrics(found))
    commands = dict.fromkeys(str(one.machine["command"]) for one in results if one.machine.get("command"))
    if commands:
        parts.append("```bash\n" + "\n".join(commands) + "\n```")
    return "\n\n".join(parts) + "\n"


def _machine(m: Row) -> str:
    link = f"{m['link_bytes_per_second'] / 1e9:.3g} GB/s ({m['link_source']})"
    commit = f" at {m['commit'][:12]}" if m["commit"] else ""
    facts = [format_date(m["date"])] if m.get("date") else []
    facts += [str(m["device"])] + ([] if m["device"] == m["processor"] else [str(m["processor"])])
    facts += [text for text in (format_cores(m), format_host_memory(m)) if text]
    in_format = f", experts in {found}" if (found := expert_format(m)) else ""
    return (
        f"{', '.join(facts)}, torch {m['torch']}, transformers {m['transformers']}, spmoe {m['spmoe']}{commit}, "
        f"{m['dtype']}{in_format}; {model_name(m)}; link {link}, "
        f"memory {m['memory_bytes_per_second'] / 1e9:.3g} GB/s; "
        f"{m['prompts']} prompts ({m.get('prompt_set')}), {_plural(m['repeat'], 'repeat')}, "
        f"{m['output_len']} output tokens." + (f" Note: {m['weights_note']}." if m.get("weights_note") else "")
    )


def _speedups(found: Comparison, workload: str, columns: Sequence[Column]) -> str:
    def cell(value: Row | str | None, column: Column) -> str:
        if isinstance(value, dict):
            is_baseline = value is found.baseline(column.workload, column.memory)
            speed = "baseline" if is_baseline else format_speed(found.speed(value, column.workload))
            return f"{milliseconds(tpot(value))}, {speed}"
        return value or "-"

    lines = [
        [name, *(cell(value, column) for value, column in zip(values, columns, strict=True))]
        for name, values in found.speedup_table(columns)
    ]
    return _table([workload or "time per output token", *(column.short_name for column in columns)], lines)


def _metrics(found: Comparison) -> str:
    lines = []
    for workload, row in found.rows():
        spread = " to ".join(milliseconds(row["tpot_seconds"][key]) for key in ("p10", "p90"))
        lines.append(
            [
                ", ".join(part for part in (workload, found.labels.system(row)) if part),
                row["expert_memory"],
                str(row["num_speculative_tokens"]),
                milliseconds(tpot(row)) + (f" ({spread})" if row["runs"] > 1 else ""),
                str(row["runs"]) if row["runs"] > 1 else "one run",
                milliseconds(floor_tpot(row)),
                milliseconds(row["stall_seconds_per_step"]),
                _percent(row["hit_rate"]),
                f"{row['bytes_moved_per_token'] / 1e6:.1f} MB",
                _percent(row["pipeline_efficiency"]),
            ]
        )
    return _table(_HEAD, lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |" for line in every
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
