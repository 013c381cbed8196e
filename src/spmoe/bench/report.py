"""The report: stored results as one page of plots and tables, with what to run for those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from statistics import median

from spmoe.bench import page
from spmoe.bench.comparison import (
    Column,
    Comparison,
    floor,
    is_bound,
    milliseconds,
    resident_floor,
    span,
    tokens_per_step,
    tpot,
)
from spmoe.bench.labels import Row, is_plain, model_name
from spmoe.bench.plot import Bar, bar_chart
from spmoe.bench.profile import EngineProfile
from spmoe.bench.report_extras import (
    ablation_section,
    acceptance_section,
    cutoff_section,
    machine_section,
    require_profile_of,
)
from spmoe.bench.results import Group
from spmoe.config import format_bytes

_TOO_GOOD = 1.05  # efficiency that only a machine that drifts can have
_SECTIONS = {
    "table": "Speed-ups",
    "speed": "Time per output token",
    "time": "Where the time went",
    "hits": "Hit rates",
    "ledger": "What was moved, and what for",
    "acceptance": "Accepted draft tokens",
    "cutoff": "The cutoff",
    "ablation": "What each part is worth",
    "efficiency": "Pipeline efficiency",
    "machine": "Machine, and how to repeat it",
}


def html_report(groups: Sequence[Group], profile: EngineProfile | None = None) -> str:
    """One document; with a profile, what the latency model predicts from it is drawn beside swept cutoffs.

    A profile of another machine, model or link than all that was swept is refused.
    """
    found = Comparison(groups)
    if profile is not None:
        require_profile_of(found, profile)
    model = ", ".join(dict.fromkeys(model_name(group.machine) for group in groups))
    title = f"spmoe: {model}"
    sections: dict[str, Callable[[Comparison], str]] = {
        "table": _speedups,
        "speed": _speed,
        "time": _time,
        "hits": _hits,
        "ledger": _ledger,
        "acceptance": acceptance_section,
        "cutoff": partial(cutoff_section, profile=profile),
        "ablation": ablation_section,
        "efficiency": _efficiency,
        "machine": machine_section,
    }
    links = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name in _SECTIONS.items())
    body = (page.section(key, _SECTIONS[key], make(found)) for key, make in sections.items())
    return page.page(title, [_head(found, model), f"<nav>{links}</nav>", *body])


# ---- the top


def _head(found: Comparison, model: str) -> str:
    machine = found.groups[0].machine
    emulated = any(group.machine["link_source"] == "emulated" for group in found.groups)
    words = f"{machine['device']}, {machine['dtype']}" + (", emulated link" if emulated else "")
    parts = [f'<header><h1>spmoe: {escape(model)}</h1><p class="dim">{escape(words)}. {escape(_exactness(found))}</p>']
    if any(group.machine.get("interrupted") for group in found.groups):
        parts.append('<p class="note">This benchmark was interrupted; some configurations have fewer runs.</p>')
    if (said := found.headline()) and found.ours is not None:
        parts.append(f"<p><b>{escape(found.ours)}</b>: {escape('; '.join(said))}.</p>")
    return "".join([*parts, page.cards(_cards(found)), "</header>"])


def _cards(found: Comparison) -> Iterable[tuple[str, str]]:
    rows = [row for _, row in found.main_rows() if not is_bound(row)] or [row for _, row in found.main_rows()]
    fastest = min(rows, key=tpot)
    where = f"{found.label(fastest)}, {fastest['expert_memory']} of the experts"
    yield milliseconds(tpot(fastest)), f"least time per output token: {where}"
    ours = found.ours
    if ours is not None:
        pairs = [(found.cells[ours, column], column) for column in found.columns if (ours, column) in found.cells]
        gains = [(plain, row, c) for row, c in pairs if (plain := found.plain(c)) is not None]
        if gains:
            plain, row, column = max(gains, key=lambda one: tpot(one[0]) / tpot(one[1]))
            yield f"{tpot(plain) / tpot(row):.2f}x", f"the speed of plain decoding, at best ({column})"
        rates = [row["pipeline_efficiency"] for row, _ in pairs if row["pipeline_efficiency"] is not None]
        if rates:
            yield f"{100 * median(rates):.0f} %", f"of the machine's best step: {ours}, median of {len(rates)}"
    accepted = [row["mean_acceptance_length"] for row in rows if row["mean_acceptance_length"] is not None]
    if accepted:
        yield f"{max(accepted):.2f}", "tokens per drafted step, at most"


def _exactness(found: Comparison) -> str:
    shares = [row["identical_share"] for _, row in found.rows()]
    runs = sum(row["runs"] for _, row in found.rows())
    if all(share == 1 for share in shares):
        return f"Every configuration wrote the same tokens, in all {runs} runs."
    exact = any(row["identical_share"] < 1 for group in found.groups for row in group.rows if _is_exact(group))
    why = "in float32 they must not differ" if exact else "forwards of other sizes round otherwise in a short dtype"
    same = sum(share == 1 for share in shares)
    return f"In {same} of {len(shares)} configurations all tokens are the first one's; {why}."


def _is_exact(group: Group) -> bool:
    return bool(group.machine["dtype"] == "float32")


# ---- by system and budget


def _speed(found: Comparison) -> str:
    marks = [("floor: the machine's best with the same useful bytes", "mark"), ("10th to 90th percentile", "spread")]
    intro = page.paragraph(
        "Median over prompts and repeats, after the first token. The floor is the longer of the useful bytes over the "
        "link's speed and of a step with every expert in a slot."
    )

    def bar(row: Row) -> Bar:
        spread = (row["tpot_seconds"]["p10"], row["tpot_seconds"]["p90"])
        return Bar(
            found.label(row), ((tpot(row), _colour(found, row)),), milliseconds(tpot(row)), spread, floor(row)
        )  # fmt: skip

    def data(row: Row) -> list[str]:
        times = [milliseconds(row["tpot_seconds"][key]) for key in ("p10", "median", "p90")]
        return [*times, milliseconds(floor(row)), milliseconds(resident_floor(row)), str(row["runs"])]

    head = ["", "10 %", "median", "90 %", "floor", "all in slots", "runs"]
    return intro + _by_budget(found, "Time per output token", bar, head, data, page.legend(marks))


def _speedups(found: Comparison) -> str:
    columns, ours = found.columns, found.ours
    if len(found.systems) < 2 or not columns:
        return page.missing(
            "There is one system only, so there is nothing to compare it with.",
            "spmoe bench --scenario scenarios/paper.toml --json results.jsonl",
        )
    text = "Time per output token and, below it, how many times that of the fastest of its column."
    if ours is not None:
        text += (
            f" The fastest is green; the bound that knows the future is not ranked. Rows are ordered, {ours} is marked."
        )
    cases = found.by_case()
    parts = [_overview(found, cases) if len(cases) > 1 and ours is not None else "", page.paragraph(text)]
    for number, (case, columns) in enumerate(cases.items()):
        rows = [[system, *(_cell(found, system, column) for column in columns)] for system in found.systems]
        rows = [one for one in rows if set(one[1:]) != {"-"}]
        if ours is not None:
            rows.append([f"rank of {ours}", *(_rank(found, ours, column) for column in columns)])
            if any(found.bound(column) for column in columns):
                rows.append([f"{ours} / oracle", *(_to_bound(found, ours, column) for column in columns)])
        grid = page.table(["", *(column.within for column in columns)], rows, ours, raw=True)
        parts.append(page.folded(case, grid, pinned=number == 0))
    return "".join(parts)


def _overview(found: Comparison, cases: dict[str, list[Column]]) -> str:
    """What ours gains over each of the others, case by case."""
    others = [system for system in found.systems if system != found.ours]
    rows = []
    for case, columns in cases.items():
        spans = [span(ratios) if (ratios := found.ratios(system, columns)) else "-" for system in others]
        ranks = found.ranks(columns)
        rows.append([case, *spans, f"{ranks.count(1)} of {len(ranks)}" if ranks else "-"])
    words = f"How many times the speed of each other system {found.ours} has, over all budgets and K of a case."
    return page.paragraph(words) + page.table(["", *others, "fastest, of those that speculate, in"], rows)


def _cell(found: Comparison, system: str, column: Column) -> str:
    if (row := found.cells.get((system, column))) is None:
        return "-"
    ratio = tpot(row) / found.best(column)
    shown = milliseconds(tpot(row))
    return (
        f'<span class="best">{shown}</span><small>1.00x</small>'
        if ratio == 1
        else f"{shown}<small>{ratio:.2f}x</small>"
    )


def _rank(found: Comparison, ours: str, column: Column) -> str:
    rank = found.rank(ours, column)
    return "-" if rank is None else f"{rank[0]} of {rank[1]}"


def _to_bound(found: Comparison, ours: str, column: Column) -> str:
    row, bound = found.cells.get((ours, column)), found.bound(column)
    return "-" if row is None or bound is None else f"{tpot(row) / tpot(bound):.2f}x"


def _time(found: Comparison) -> str:
    names = [("draft", 0), ("verify, computing", 2), ("stall: waiting for experts", 1), ("the rest", 7)]

    def parts(row: Row) -> list[float]:
        tokens = tokens_per_step(row)
        stall = row["stall_seconds_per_step"]
        draft, verify = row["draft_seconds_per_step"], max(0.0, row["verify_seconds_per_step"] - stall)
        rest = max(0.0, row["step_seconds"] - draft - verify - stall)
        return [part / tokens for part in (draft, verify, stall, rest)]

    def bar(row: Row) -> Bar:
        values = parts(row)
        colours = tuple((value, colour) for value, (_, colour) in zip(values, names, strict=True))
        return Bar(found.label(row), colours, milliseconds(sum(values)))

    def data(row: Row) -> list[str]:
        return [milliseconds(value) for value in parts(row)]

    intro = page.paragraph("Mean time of each stage per output token.")
    return intro + _by_budget(
        found, "Time by stage", bar, ["", *(name for name, _ in names)], data, page.legend(names)
    )  # fmt: skip


def _hits(found: Comparison) -> str:
    def bar(row: Row) -> Bar:
        rate = row["hit_rate"] or 0.0
        return Bar(found.label(row), ((rate, _colour(found, row)), (1 - rate, 99)), _percent(row["hit_rate"]))

    def data(row: Row) -> list[str]:
        asked = row["ledger"]["hits"] + row["ledger"]["late"] + row["ledger"]["demand_loads"]
        shares = [row["ledger"][name] / max(1, asked) for name in ("hits", "late", "demand_loads")]
        return [*map(_percent, shares), str(asked)]

    intro = page.paragraph(
        "Share of the experts that routers asked for, once per layer and pass, that were in a slot by then. It says "
        "how much was there in time, not how much was moved for it."
    )
    return intro + _by_budget(found, "Hit rate", bar, ["", "there", "on their way", "absent", "asked for"], data)


def _ledger(found: Comparison) -> str:
    names = [("demanded", 1), ("prefetched, in time", 2), ("prefetched, late", 4), ("prefetched, wasted", 5)]

    def parts(row: Row) -> list[float]:
        c = row["ledger"]
        moved = (c["demand_bytes"], c["used_bytes"] - c["late_bytes"], c["late_bytes"], c["wasted_bytes"])
        return [max(0, one) / max(1, row["output_tokens"]) for one in moved]

    def bar(row: Row) -> Bar:
        values = parts(row)
        colours = tuple((value, colour) for value, (_, colour) in zip(values, names, strict=True))
        return Bar(found.label(row), colours, f"{format_bytes(sum(values))} per token")

    def data(row: Row) -> list[str]:
        return [format_bytes(value) for value in parts(row)]

    intro = page.paragraph(
        "Bytes per output token. What was prefetched and is still held when a run ends is in none of the parts."
    )
    return intro + _by_budget(
        found, "Bytes moved", bar, ["", *(name for name, _ in names)], data, page.legend(names)
    )  # fmt: skip


def _efficiency(found: Comparison) -> str:
    def bar(row: Row) -> Bar:
        rate = row["pipeline_efficiency"] or 0.0
        return Bar(found.label(row), ((rate, _colour(found, row)),), _percent(rate), mark=1.0)

    def data(row: Row) -> list[str]:
        times = [row["step_seconds"], row["ideal_step_seconds"], row["all_resident_step_seconds"]]
        return [*map(milliseconds, times), str(row["resident_source"]), f"{format_bytes(row['useful_bytes_per_step'])}"]

    intro = page.paragraph(
        "max(useful bytes / link, step with every expert in a slot) / step: 100 % is perfect overlap. Where bytes take "
        "far longer than computing, every policy is near it, and only fewer bytes help."
    )
    if any((row["pipeline_efficiency"] or 0.0) > _TOO_GOOD for _, row in found.main_rows()):
        intro += page.paragraph(
            "Above 100 %: the machine was slower when the step with every expert in a slot was measured. Measure again "
            "on a quiet machine."
        )
    head = ["", "step", "at best", "all in slots", "which is", "useful bytes per step"]
    return intro + _by_budget(found, "Pipeline efficiency", bar, head, data)


# ---- what they share


def _by_budget(
    found: Comparison,
    what: str,
    bar: Callable[[Row], Bar],
    head: Sequence[str],
    data: Callable[[Row], list[str]],
    legend: str = "",
) -> str:
    """A chart for every case and budget, with a row for each configuration."""
    rows_of: dict[str, dict[str, list[Row]]] = {}
    for case, row in found.main_rows():
        rows_of.setdefault(case, {}).setdefault(row["expert_memory"], []).append(row)
    parts = [legend]
    for number, (case, budgets) in enumerate(rows_of.items()):
        end = max(bar(row).end for rows in budgets.values() for row in rows)  # budgets share a scale
        figures = []
        for memory, rows in budgets.items():
            name = f"{memory} of the experts in slots" if memory.endswith("%") else f"{memory} of slots"
            numbers = page.table(head, ([found.label(row), *data(row)] for row in rows))
            title = ", ".join(word for word in (what, case, name) if word)
            figures.append(page.figure(bar_chart(title, [bar(row) for row in rows], end), name, data=numbers))
        parts.append(page.folded(case, "".join(figures), pinned=number == 0))
    return "".join(parts)


def _colour(found: Comparison, row: Row) -> int:
    """Ours is the first colour, everywhere; plain decoding and bounds are grey."""
    system = found.system(row)
    if system == found.ours:
        return 0
    if is_plain(row) or is_bound(row):
        return 7
    others = [name for name in dict.fromkeys(found.system(one) for _, one in found.main_rows()) if name != found.ours]
    return 1 + others.index(system) % 6


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
