"""Stored results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmoe.bench.comparison import Column, Comparison, floor_tpot, milliseconds, tpot
from spmoe.bench.labels import Row, model_name
from spmoe.bench.results import WorkloadResults

_HEAD = (
    "",
    "memory",
    "K",
    "TPOT",
    "10-90 %",
    "floor",
    "step",
    "draft",
    "stall",
    "hits",
    "moved per token",
    "efficiency",
)


def markdown_report(results: Sequence[WorkloadResults]) -> str:
    """Return machines, speed-ups, metrics of every configuration and commands."""
    found = Comparison(results)
    parts = list(dict.fromkeys(_machine(one.machine) for one in results))
    if summary := found.summary():
        parts.append(f"{found.highlighted}: {'; '.join(summary)}.")
    if len(found.systems) > 1:
        parts += [_speedups(found, workload, columns) for workload, columns in found.columns_by_workload().items()]
    parts.append(_metrics(found))
    commands = dict.fromkeys(str(one.machine["command"]) for one in results if one.machine.get("command"))
    if commands:
        parts.append("```bash\n" + "\n".join(commands) + "\n```")
    return "\n\n".join(parts) + "\n"


def _machine(m: Row) -> str:
    link = f"{m['link_bytes_per_second'] / 1e9:.3g} GB/s ({m['link_source']})"
    commit = f" at {m['commit'][:12]}" if m["commit"] else ""
    return (
        f"{m['device']}, torch {m['torch']}, transformers {m['transformers']}, spmoe {m['spmoe']}{commit}, "
        f"{m['dtype']}; {model_name(m)}; link {link}, memory {m['memory_bytes_per_second'] / 1e9:.3g} GB/s; "
        f"{m['prompts']} prompts ({m.get('prompt_set')}), {m['repeat']} repeats, {m['output_len']} output tokens."
    )


def _speedups(found: Comparison, workload: str, columns: Sequence[Column]) -> str:
    def cell(value: Row | str | None, column: Column) -> str:
        if isinstance(value, dict):
            return f"{milliseconds(tpot(value))} ({tpot(value) / found.best_tpot(column):.2f}x)"
        return value or "-"

    lines = [
        [name, *(cell(value, column) for value, column in zip(values, columns, strict=True))]
        for name, values in found.speedup_table(columns)
    ]
    return _table([workload or "time per output token", *(column.short_name for column in columns)], lines)


def _metrics(found: Comparison) -> str:
    lines = []
    for workload, row in found.rows():
        steps = [milliseconds(row[key]) for key in ("step_seconds", "draft_seconds_per_step", "stall_seconds_per_step")]
        lines.append(
            [
                ", ".join(part for part in (workload, found.labels.system(row)) if part),
                row["expert_memory"],
                str(row["num_speculative_tokens"]),
                milliseconds(tpot(row)),
                " to ".join(milliseconds(row["tpot_seconds"][key]) for key in ("p10", "p90")),
                milliseconds(floor_tpot(row)),
                *steps,
                _percent(row["hit_rate"]),
                f"{row['bytes_moved_per_token'] / 1e6:.1f} MB",
                _percent(row["pipeline_efficiency"]),
            ]
        )
    return _table(_HEAD, lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
