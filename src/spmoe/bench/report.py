"""HTML report: stored results as one self-contained page of charts and tables (needs the extra `report`).

The functions below turn results into blocks (texts, tables, figures); `templates/report.html.j2` renders them and
escapes all text. A section without results says which command measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

from spmoe.bench.charts import (
    NUM_COLOURS,
    Bar,
    Line,
    LineChart,
    bar_chart,
    css_colours,
    line_chart,
    require_report_extra,
)
from spmoe.bench.comparison import (
    Column,
    Comparison,
    SweepKey,
    floor_tpot,
    format_range,
    is_oracle,
    milliseconds,
    resident_tpot,
    tokens_per_step,
    tpot,
)
from spmoe.bench.configs import ABLATIONS, ALL_ON, ablated_record
from spmoe.bench.labels import Row, is_plain_decoding, model_name
from spmoe.bench.profile import PROFILED_POLICIES, EngineProfile, Predictor
from spmoe.bench.results import WorkloadResults
from spmoe.config import format_bytes
from spmoe.errors import UsageError

_IMPLAUSIBLE_EFFICIENCY = 1.05  # more than this means that the machine's speed changed between measurements
_GREY = 7


def html_report(results: Sequence[WorkloadResults], profile: EngineProfile | None = None) -> str:
    """Return a complete HTML document.

    With a profile, its predictions are drawn into the cutoff sweeps; UsageError if it matches none of them.
    """
    require_report_extra()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    comparison = Comparison(results)
    if profile is not None:
        require_matching_profile(comparison, profile)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    light, dark = css_colours()
    template = environment.get_template("report.html.j2")
    return template.render(report=_PageBuilder(comparison, profile).build(), light=light, dark=dark) + "\n"


# ---- blocks of the template


class Cell(NamedTuple):
    """A table cell with a note in small print; the best of its column stands out."""

    text: str
    note: str
    best: bool = False


class LegendEntry(NamedTuple):
    """A colour, or a symbol ("mark" or "spread"), with its meaning."""

    name: str
    colour: int | None = None
    symbol: str = ""


class Card(NamedTuple):
    """A headline figure."""

    value: str
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar = "text"
    text: str


@dataclass(frozen=True)
class Missing:
    """A note that results are missing, with the command that measures them."""

    kind: ClassVar = "missing"
    text: str
    command: str


@dataclass(frozen=True)
class Table:
    """Rows whose first cell is their name."""

    kind: ClassVar = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    highlighted: str | None = None
    facts: bool = False  # text instead of numbers


@dataclass(frozen=True)
class Legend:
    """A legend that several figures share."""

    kind: ClassVar = "legend"
    entries: Sequence[LegendEntry]


@dataclass(frozen=True)
class Figure:
    """A chart with the table of its values."""

    kind: ClassVar = "figure"
    caption: str
    svg: str
    table: Table
    legend: Sequence[LegendEntry] = ()


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    kind: ClassVar = "code"
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class WorkloadPart:
    """Blocks of one workload, foldable."""

    kind: ClassVar = "workload"
    name: str
    open: bool
    parts: Sequence[Block]


Block = Text | Missing | Table | Legend | Figure | Code | WorkloadPart


@dataclass(frozen=True)
class Section:
    """A titled part of the page that links can point to."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """Everything that the template renders."""

    title: str
    subtitle: str
    notes: Sequence[str]
    highlighted: str | None
    summary: str
    cards: Sequence[Card]
    sections: Sequence[Section] = field(default_factory=list)


# ---- profiles


def require_matching_profile(comparison: Comparison, profile: EngineProfile) -> None:
    """Raise UsageError unless the profile fits the machine and model of at least one cutoff sweep."""
    machines = [_machine_of(comparison, key) for key in comparison.cutoff_sweeps]
    if not machines:
        raise UsageError(
            "these results contain no cutoff sweep to draw the profile's predictions in; leave out --profile, or run "
            "`spmoe bench --scenario scenarios/ushape.toml`"
        )
    mismatches = [found for machine in machines if (found := _mismatch(profile, machine)) is not None]
    if len(mismatches) == len(machines):
        of_profile, of_results = mismatches[0]
        raise UsageError(
            f"the profile is of {of_profile}, and these results are of {of_results}; make a profile with "
            "`spmoe profile -o FILE` and the options of the benchmark, or leave out --profile"
        )


def _machine_of(comparison: Comparison, key: SweepKey) -> Row:
    return comparison.results[comparison.workloads.index(key.workload)].machine


def _mismatch(profile: EngineProfile, machine: Row) -> tuple[str, str] | None:
    """Return the first property in which they differ, as text for the profile and for the results."""
    own, other = str(profile.machine.get("device")), str(machine["device"])
    if own != other:
        return f"the device {own}", f"the device {other}"
    expected = {name: machine[name] for name in ("shape", "dtype", "layers", "top_k", "expert_bytes")}
    return profile.subject.difference({**expected, "emulated_link_gbps": machine["link_gbps"]})


def _predicted_line(profile: EngineProfile, sweep: dict[int, Row]) -> list[Line]:
    """Return the latency model's prediction for every cutoff, if it models the policy of the sweep."""
    row = sweep[min(sweep)]
    if row["prefetch"] not in PROFILED_POLICIES or row["num_speculative_tokens"] == "auto":
        return []
    predictor, k = Predictor(profile), row["num_speculative_tokens"]
    points = []
    for depth in range(row["layers"] + 1):
        step = predictor.step(row["prefetch"], k, depth, row["slots"])
        points.append((float(depth), 1e3 * step.seconds / tokens_per_step(row)))
    return [Line("predicted", tuple(points), 1)]


# ---- the page


class _PageBuilder:
    """Builds the blocks of a page; numbers its charts."""

    def __init__(self, comparison: Comparison, profile: EngineProfile | None) -> None:
        self.found = comparison
        self.profile = profile
        self._numbers = count(1)

    def build(self) -> Page:
        found, machines = self.found, [one.machine for one in self.found.results]
        emulated = any(machine["link_source"] == "emulated" for machine in machines)
        device = f"{machines[0]['device']}, {machines[0]['dtype']}" + (", emulated link" if emulated else "")
        interrupted = any(machine.get("interrupted") for machine in machines)
        note = "This benchmark was interrupted; some configurations have fewer runs."
        sections: dict[str, tuple[str, Callable[[], Iterable[Block]]]] = {
            "speedups": ("Speed-ups", self._speedups),
            "tpot": ("Time per output token", self._tpot),
            "time": ("Time by stage", self._time_by_stage),
            "hits": ("Hit rate", self._hit_rate),
            "bytes": ("Bytes moved", self._bytes_moved),
            "acceptance": ("Accepted draft tokens", self._acceptance),
            "cutoff": ("Cutoff", self._cutoff_sweeps),
            "ablation": ("Ablation", self._ablation),
            "efficiency": ("Pipeline efficiency", self._efficiency),
            "machine": ("Machine and commands", self._machines),
        }
        return Page(
            title="spmoe: " + ", ".join(dict.fromkeys(model_name(machine) for machine in machines)),
            subtitle=f"{device}. {self._exactness()}",
            notes=[note] if interrupted else [],
            highlighted=found.highlighted,
            summary="; ".join(found.summary()) if found.highlighted is not None else "",
            cards=list(self._cards()),
            sections=[Section(key, title, list(make())) for key, (title, make) in sections.items()],
        )

    def _chart_id(self) -> str:
        return f"chart{next(self._numbers)}"

    # -- header

    def _cards(self) -> Iterator[Card]:
        found = self.found
        rows = [row for _, row in found.main_rows if not is_oracle(row)] or [row for _, row in found.main_rows]
        fastest = min(rows, key=tpot)
        conditions = f"{found.labels.label(fastest)}, {_budget(fastest['expert_memory'])}"
        yield Card(milliseconds(tpot(fastest)), f"least time per output token: {conditions}")
        if (name := found.highlighted) is not None:
            pairs = [(found.cells[name, column], column) for column in found.columns if (name, column) in found.cells]
            gains = [(plain, row, column) for row, column in pairs if (plain := found.plain_row(column)) is not None]
            if gains:
                plain, row, column = max(gains, key=lambda one: tpot(one[0]) / tpot(one[1]))
                yield Card(f"{tpot(plain) / tpot(row):.2f}x", f"best speed-up over plain decoding ({column})")
            rates = [row["pipeline_efficiency"] for row, _ in pairs if row["pipeline_efficiency"] is not None]
            if rates:
                yield Card(_percent(median(rates)), f"median pipeline efficiency of {name} ({len(rates)} comparisons)")
        accepted = [row["mean_acceptance_length"] for row in rows if row["mean_acceptance_length"] is not None]
        if accepted:
            yield Card(f"{max(accepted):.2f}", "tokens per speculative step, at most")

    def _exactness(self) -> str:
        rows = [row for _, row in self.found.rows()]
        same = sum(row["identical_share"] == 1 for row in rows)
        if same == len(rows):
            return f"All configurations generated the same tokens, in all {sum(row['runs'] for row in rows)} runs."
        wrong = any(
            row["identical_share"] < 1
            for one in self.found.results
            if one.machine["dtype"] == "float32"
            for row in one.rows
        )
        reason = "in float32 they must not differ" if wrong else "16-bit forwards of other sizes may round differently"
        return f"{same} of {len(rows)} configurations generated the same tokens as the first one; {reason}."

    # -- systems and budgets

    def _speedups(self) -> Iterator[Block]:
        found, name = self.found, self.found.highlighted
        if len(found.systems) < 2:
            yield Missing(
                "There is only one system, so there is nothing to compare it with.",
                "spmoe bench --scenario scenarios/paper.toml --json results.jsonl",
            )
            return
        workloads = found.columns_by_workload()
        if len(workloads) > 1 and name is not None:
            yield from self._overview(name, workloads)
        text = "Time per output token and, below it, the ratio to the fastest system of the column (green)."
        if name is not None:
            text += f" {name} is highlighted. The oracle knows the routing in advance and is not ranked."
        yield Text(text)
        yield from self._by_workload(
            (workload, [self._speedup_table(columns, name)]) for workload, columns in workloads.items()
        )

    def _speedup_table(self, columns: Sequence[Column], name: str | None) -> Table:
        def cell(value: Row | str | None, column: Column) -> str | Cell:
            if isinstance(value, dict):
                ratio = tpot(value) / self.found.best_tpot(column)
                return Cell(milliseconds(tpot(value)), f"{ratio:.2f}x", ratio == 1)
            return value or "-"

        rows = [
            [system, *(cell(value, column) for value, column in zip(values, columns, strict=True))]
            for system, values in self.found.speedup_table(columns)
        ]
        return Table(["", *(column.short_name for column in columns)], rows, name)

    def _overview(self, name: str, workloads: dict[str, list[Column]]) -> Iterator[Block]:
        others = [system for system in self.found.systems if system != name]
        rows = []
        for workload, columns in workloads.items():
            ranges = [format_range(one) if (one := self.found.speedups(other, columns)) else "-" for other in others]
            ranks = self.found.highlighted_ranks(columns)
            rows.append([workload, *ranges, f"{ranks.count(1)} of {len(ranks)}" if ranks else "-"])
        yield Text(f"Speed of {name} relative to each other system, over all budgets and K of a workload.")
        yield Table(["", *others, "fastest speculating system in"], rows)

    def _tpot(self) -> Iterator[Block]:
        def bar(row: Row) -> Bar:
            spread = (row["tpot_seconds"]["p10"], row["tpot_seconds"]["p90"])
            parts = ((tpot(row), self._colour(row)),)
            return Bar(self.found.labels.label(row), parts, milliseconds(tpot(row)), spread, floor_tpot(row))

        def values(row: Row) -> list[str]:
            return [*_quantiles(row), milliseconds(floor_tpot(row)), milliseconds(resident_tpot(row)), str(row["runs"])]

        yield Text(
            "Median over prompts and repeats, after the first token. The floor is the best time that this machine "
            "allows: the larger of useful bytes over link bandwidth, and the step with all experts in slots."
        )
        yield Legend([LegendEntry("floor", symbol="mark"), LegendEntry("10th to 90th percentile", symbol="spread")])
        head = ["10 %", "median", "90 %", "floor", "all in slots", "runs"]
        yield from self._by_budget("Time per output token", bar, head, values)

    def _time_by_stage(self) -> Iterator[Block]:
        def stages(row: Row) -> list[float]:
            tokens, stall = tokens_per_step(row), row["stall_seconds_per_step"]
            draft, verify = row["draft_seconds_per_step"], max(0.0, row["verify_seconds_per_step"] - stall)
            other = max(0.0, row["step_seconds"] - draft - verify - stall)
            return [seconds / tokens for seconds in (draft, verify, stall, other)]

        legend = [("draft", 0), ("verify (compute)", 2), ("stall (waiting for experts)", 1), ("other", _GREY)]
        yield Text("Mean time of each stage per output token.")
        yield from self._stacked("Time by stage", legend, stages, milliseconds)

    def _bytes_moved(self) -> Iterator[Block]:
        def kinds(row: Row) -> list[float]:
            c = row["counters"]
            moved = (c["demand_bytes"], c["used_bytes"] - c["late_bytes"], c["late_bytes"], c["wasted_bytes"])
            return [max(0, one) / max(1, row["output_tokens"]) for one in moved]

        legend = [
            ("loaded on demand", 1),
            ("prefetched, in time", 2),
            ("prefetched, late", 4),
            ("prefetched, wasted", 5),
        ]
        yield Text("Bytes per output token, without prefetched experts that are still unused in slots when a run ends.")
        yield from self._stacked("Bytes moved", legend, kinds, format_bytes)

    def _stacked(
        self,
        title: str,
        legend: Sequence[tuple[str, int]],
        lengths: Callable[[Row], list[float]],
        text: Callable[[float], str],
    ) -> Iterator[Block]:
        def bar(row: Row) -> Bar:
            parts = [(length, colour) for length, (_, colour) in zip(lengths(row), legend, strict=True)]
            return Bar(self.found.labels.label(row), tuple(parts), text(sum(lengths(row))))

        def values(row: Row) -> list[str]:
            return [text(length) for length in lengths(row)]

        yield Legend([LegendEntry(name, colour) for name, colour in legend])
        yield from self._by_budget(title, bar, [name for name, _ in legend], values)

    def _hit_rate(self) -> Iterator[Block]:
        def bar(row: Row) -> Bar:
            rate = row["hit_rate"] or 0.0
            return Bar(self.found.labels.label(row), ((rate, self._colour(row)),), _percent(row["hit_rate"]))

        def values(row: Row) -> list[str]:
            counts = [row["counters"][name] for name in ("hits", "late", "demand_loads")]
            return [*(_percent(one / max(1, sum(counts))) for one in counts), str(sum(counts))]

        yield Text(
            "Share of routed experts, counted once per layer and pass, that were in a slot when they were needed. It "
            "does not show how many bytes were moved for that."
        )
        head = ["hit", "late", "loaded on demand", "routed experts"]
        yield from self._by_budget("Hit rate", bar, head, values, x_max=1.0)

    def _efficiency(self) -> Iterator[Block]:
        def bar(row: Row) -> Bar:
            rate = row["pipeline_efficiency"] or 0.0
            return Bar(self.found.labels.label(row), ((rate, self._colour(row)),), _percent(rate), mark=1.0)

        def values(row: Row) -> list[str]:
            times = [row["step_seconds"], row["ideal_step_seconds"], row["all_resident_step_seconds"]]
            useful = format_bytes(row["useful_bytes_per_step"])
            return [*map(milliseconds, times), str(row["all_resident_source"]), useful]

        yield Text(
            "max(useful bytes / link bandwidth, step with all experts in slots) / step: 100 % is perfect overlap. If "
            "copies take far longer than compute, every policy is near 100 %; only moving fewer bytes helps then."
        )
        if any((row["pipeline_efficiency"] or 0.0) > _IMPLAUSIBLE_EFFICIENCY for _, row in self.found.main_rows):
            yield Text(
                "Above 100 %: the machine was slower while the step with all experts in slots was measured. Measure "
                "again on an idle machine."
            )
        head = ["step", "best possible", "all in slots", "source", "useful bytes per step"]
        yield from self._by_budget("Pipeline efficiency", bar, head, values)

    def _by_budget(
        self,
        title: str,
        bar: Callable[[Row], Bar],
        head: Sequence[str],
        values: Callable[[Row], list[str]],
        x_max: float | None = None,
    ) -> Iterator[Block]:
        """Yield a chart for every workload and memory budget, with a bar for each configuration."""
        label = self.found.labels.label
        rows_of: dict[str, dict[str, list[Row]]] = {}
        for workload, row in self.found.main_rows:
            rows_of.setdefault(workload, {}).setdefault(row["expert_memory"], []).append(row)
        parts: list[tuple[str, list[Block]]] = []
        for workload, budgets in rows_of.items():
            end = x_max or max(bar(row).end for rows in budgets.values() for row in rows)  # one scale for all budgets
            figures: list[Block] = []
            for memory, rows in budgets.items():
                name = _budget(memory)
                full_title = ", ".join(word for word in (title, workload, name) if word)
                svg = bar_chart(full_title, [bar(row) for row in rows], end, self._chart_id())
                figures.append(Figure(name, svg, Table(["", *head], [[label(row), *values(row)] for row in rows])))
            parts.append((workload, figures))
        yield from self._by_workload(parts)

    def _by_workload(self, parts: Iterable[tuple[str, Sequence[Block]]]) -> Iterator[Block]:
        """Yield the blocks of each workload, foldable under its name if it has one; the first is open."""
        for number, (workload, blocks) in enumerate(parts):
            if workload:
                yield WorkloadPart(workload, number == 0, blocks)
            else:
                yield from blocks

    def _colour(self, row: Row) -> int:
        """Return the colour of a row's system: 0 for the highlighted one, grey for the oracle and plain decoding."""
        found, system = self.found, self.found.labels.system(row)
        if system == found.highlighted:
            return 0
        if is_plain_decoding(row) or is_oracle(row):
            return _GREY
        names = dict.fromkeys(found.labels.system(one) for _, one in found.main_rows)
        return 1 + [name for name in names if name != found.highlighted].index(system) % 6

    # -- sections that need runs of their own

    def _acceptance(self) -> Iterator[Block]:
        lines: dict[str, Line] = {}
        rows = []
        for workload, row in self.found.main_rows:
            shares = row["acceptance_by_position"]
            name = ", ".join(part for part in (workload, f"K={row['num_speculative_tokens']}") if part)
            if not shares or name in lines:  # acceptance does not depend on the policy
                continue
            points = tuple((position + 1.0, 100 * share) for position, share in enumerate(shares))
            lines[name] = Line(name, points, len(lines))
            rows.append([name, *(f"{100 * share:.1f} %" for share in shares)])
        if not lines:
            yield Missing("No configuration speculated.", "spmoe bench -k 4 --json results.jsonl")
            return
        width = max(len(row) for row in rows)
        table = Table(["", *map(str, range(1, width))], [row + [""] * (width - len(row)) for row in rows])
        title = "Accepted draft tokens"
        chart = LineChart(title, "position in the draft", "% accepted", tuple(lines.values()), 0.0, 100.0)
        legend = (
            [LegendEntry(line.name, line.colour % NUM_COLOURS) for line in lines.values()] if len(lines) > 1 else []
        )
        caption = "Share of drafts that were accepted up to and including this position."
        yield Figure(caption, line_chart(chart, self._chart_id()), table, legend)

    def _cutoff_sweeps(self) -> Iterator[Block]:
        if not self.found.cutoff_sweeps:
            yield Missing(
                "These runs contain no cutoff sweep.",
                "spmoe bench --scenario scenarios/ushape.toml --json results.jsonl",
            )
            return
        yield Text(
            "The draft stage prefetches for this many layers, counted from the first. The dashed line is the cutoff "
            "that the latency model selects (auto)."
        )
        for key, sweep in self.found.cutoff_sweeps.items():
            yield self._cutoff_figure(key, sweep)

    def _cutoff_figure(self, key: SweepKey, sweep: dict[int, Row]) -> Figure:
        modes = self.found.cutoff_modes.get(key, {})
        automatic, depths = modes.get("auto"), sorted(sweep)
        points = tuple((depth, 1e3 * tpot(sweep[depth])) for depth in depths)
        lines = [Line("measured", points, 0, (automatic["cutoff_layers"],) if automatic is not None else ())]
        best = min(depths, key=lambda depth: tpot(sweep[depth]))
        caption = f"{key}. Best: {milliseconds(tpot(sweep[best]))} at {best} layers."
        if automatic is not None:
            caption += f" Auto: {automatic['cutoff_layers']} layers, {milliseconds(tpot(automatic))}."
        if self.profile is not None:
            if (mismatch := _mismatch(self.profile, _machine_of(self.found, key))) is not None:
                caption += f" Not predicted: the profile is of {mismatch[0]}."
            else:
                lines += _predicted_line(self.profile, sweep)
        legend = [LegendEntry("measured", 0), LegendEntry("predicted from the profile", 1)] if len(lines) > 1 else []
        rows = [[f"{depth} layers", *_quantiles(sweep[depth])] for depth in depths]
        rows += [[f"{mode} ({row['cutoff_layers']} layers)", *_quantiles(row)] for mode, row in modes.items()]
        title = f"Time per output token by cutoff, {key}"
        svg = line_chart(LineChart(title, "layers prefetched for", "ms per token", tuple(lines)), self._chart_id())
        return Figure(caption, svg, Table(["", "10 %", "median", "90 %"], rows), legend)

    def _ablation(self) -> Iterator[Block]:
        groups = self._find_ablations()
        if not groups:
            yield Missing(
                "These runs contain no ablation.", "spmoe bench --scenario scenarios/ablation.toml --json results.jsonl"
            )
            return
        yield Text(
            "The same system with one part switched off. No overlap: the engine waits for every prefetch after the "
            "draft stage. No batching: one copy per submission. No cutoff: all layers are prefetched for."
        )
        for name, rows in groups.items():
            reference = tpot(rows[ALL_ON])
            bars, values = [], []
            for ablation in (one for one in ABLATIONS if one in rows):
                row, is_reference = rows[ablation], ablation == ALL_ON
                change = "" if is_reference else f" ({100 * (tpot(row) / reference - 1):+.1f} %)"
                spread = (row["tpot_seconds"]["p10"], row["tpot_seconds"]["p90"])
                parts = ((tpot(row), 0 if is_reference else 6),)
                bars.append(Bar(ablation, parts, milliseconds(tpot(row)) + change, spread, reference))
                values.append([ablation, *_quantiles(row), f"{tpot(row) / reference:.3f}x"])
            table = Table(["", "10 %", "median", "90 %", "relative to all on"], values)
            yield Figure(name, bar_chart(f"Ablation, {name}", bars, chart_id=self._chart_id()), table)

    def _find_ablations(self) -> dict[str, dict[str, Row]]:
        """Return rows by ablation for each configuration that was also run with everything on, by its name."""
        groups: dict[str, dict[str, Row]] = {}
        for workload, results in zip(self.found.workloads, self.found.results, strict=True):
            for full in (row for row in results.rows if row["ablation"] == ALL_ON):
                wanted = {name: ablated_record(full, name) for name in ABLATIONS}
                rows = {name: row for name, one in wanted.items() for row in results.rows if one.items() <= row.items()}
                if len(rows) > 1:
                    name = ", ".join(
                        part for part in (workload, self.found.labels.label(full), full["expert_memory"]) if part
                    )
                    groups[name] = rows
        return groups

    # -- machine

    def _machines(self) -> Iterator[Block]:
        machines = [one.machine for one in self.found.results]
        facts: dict[str, list[str]] = {}
        for machine in machines:
            for name, value in _facts(machine).items():
                facts.setdefault(name, []).append(value)
        equal = [name for name, values in facts.items() if len(set(values)) == 1]
        yield Table(["", ""], [[name, facts[name][0]] for name in equal], facts=True)
        if different := [name for name in facts if name not in equal]:
            names = [workload or "measured" for workload in self.found.workloads]
            yield Table(["", *names], [[name, *facts[name]] for name in different], facts=True)
        commands = dict.fromkeys(str(machine["command"]) for machine in machines if machine.get("command"))
        if commands:
            yield Code("Commands", "\n".join(commands))
        scenarios = {str(one["scenario"]): str(one["scenario_text"]) for one in machines if one.get("scenario_text")}
        for name, text in scenarios.items():
            yield Code(f"Scenario: {name}", text, folded=True)


def _facts(machine: Row) -> dict[str, str]:
    memory = machine["device_memory_bytes"]
    versions = f"spmoe {machine['spmoe']}, torch {machine['torch']}, transformers {machine['transformers']}"
    return {
        "device": str(machine["device"]) + (f", {format_bytes(memory)}" if memory else ""),
        "driver": str(machine["driver"] or "-"),
        "processor": str(machine["processor"]),
        "system": str(machine["platform"]),
        "versions": f"{versions}, Python {machine['python']}",
        "commit": str(machine["commit"] or "-"),
        "model": model_name(machine),
        "experts": f"{machine['experts']} in {machine['layers']} layers, top {machine['top_k']}, "
        f"{format_bytes(machine['expert_bytes'])} each, {machine['dtype']}",
        "link bandwidth": f"{machine['link_bytes_per_second'] / 1e9:.3g} GB/s ({machine['link_source']})",
        "memory bandwidth": f"{machine['memory_bytes_per_second'] / 1e9:.3g} GB/s",
        "reading the weights of one row": milliseconds(machine["active_read_seconds"]),
        "reading the draft's weights": milliseconds(machine["draft_read_seconds"]),
        "prompts": f"{machine['prompts']} ({machine.get('prompt_set')}, {machine.get('prompt_format')}), "
        f"{machine['repeat']} repeats after {machine['warmup']} warm-up runs, {machine['output_len']} output tokens",
    }


def _quantiles(row: Row) -> list[str]:
    return [milliseconds(row["tpot_seconds"][key]) for key in ("p10", "median", "p90")]


def _budget(memory: str) -> str:
    return f"{memory} of the experts in slots" if memory.endswith("%") else f"{memory} of slots"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
