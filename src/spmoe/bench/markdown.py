"""Stored results as Markdown: the tables of a results page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spmoe.bench.comparison import Comparison, floor, milliseconds, tpot
from spmoe.bench.labels import Row, model_name
from spmoe.bench.results import Group


def markdown_report(groups: Sequence[Group]) -> str:
    """Machine, speed-ups and figures by configuration."""
    found = Comparison(groups)
    parts = [_machines(groups)]
    if said := found.headline():
        parts.append(f"{found.ours}: {'; '.join(said)}.")
    if len(found.systems) > 1 and found.columns:
        parts += _speedups(found)
    parts.append(_figures(found))
    commands = dict.fromkeys(str(group.machine.get("command")) for group in groups if group.machine.get("command"))
    if commands:
        parts.append("```bash\n" + "\n".join(commands) + "\n```")
    return "\n\n".join(parts) + "\n"


def _machines(groups: Sequence[Group]) -> str:
    lines = []
    for m in (group.machine for group in groups):
        link = f"{m['link_bytes_per_second'] / 1e9:.3g} GB/s ({m['link_source']})"
        commit = f" at {m['commit'][:12]}" if m["commit"] else ""
        lines.append(
            f"{m['device']}, torch {m['torch']}, transformers {m['transformers']}, spmoe {m['spmoe']}{commit}, "
            f"{m['dtype']}; {model_name(m)}; link {link}, memory "
            f"{m['memory_bytes_per_second'] / 1e9:.3g} GB/s; prompts: {m['prompts']} ({m.get('prompt_set')}), each "
            f"{m['repeat']} times, {m['output_len']} tokens."
        )
    return "\n\n".join(dict.fromkeys(lines))


def _speedups(found: Comparison) -> Iterator[str]:
    """A table for each case."""
    for case, columns in found.by_case().items():
        rows = []
        for system in found.systems:
            cells = [found.cells.get((system, column)) for column in columns]
            if any(cell is not None for cell in cells):
                pairs = zip(cells, columns, strict=True)
                rows.append([system, *("-" if one is None else _ratio(one, found.best(at)) for one, at in pairs)])
        if (ours := found.ours) is not None:
            ranks = (found.rank(ours, column) for column in columns)
            rows.append([f"rank of {ours}", *("-" if rank is None else f"{rank[0]} of {rank[1]}" for rank in ranks)])
            ratios = []
            for column in columns:
                own, bound = found.cells.get((ours, column)), found.bound(column)
                ratios.append("-" if own is None or bound is None else f"{tpot(own) / tpot(bound):.2f}x")
            if any(ratio != "-" for ratio in ratios):
                rows.append([f"{ours} / oracle", *ratios])
        yield _table([case or "time per output token", *(column.within for column in columns)], rows)


def _ratio(row: Row, best: float) -> str:
    return f"{milliseconds(tpot(row))} ({tpot(row) / best:.2f}x)"


def _figures(found: Comparison) -> str:
    head = [
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
    ]
    rows = []
    for case, row in found.rows():
        name = ", ".join(part for part in (case, found.system(row)) if part)
        spread = " to ".join(milliseconds(row["tpot_seconds"][key]) for key in ("p10", "p90"))
        steps = [milliseconds(row[key]) for key in ("step_seconds", "draft_seconds_per_step", "stall_seconds_per_step")]
        rows.append(
            [name, row["expert_memory"], str(row["num_speculative_tokens"]), milliseconds(tpot(row)), spread,
             milliseconds(floor(row)), *steps, _percent(row["hit_rate"]),
             f"{row['bytes_moved_per_token'] / 1e6:.1f} MB", _percent(row["pipeline_efficiency"])]
        )  # fmt: skip
    return _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
