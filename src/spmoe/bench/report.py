"""HTML report: stored results as one self-contained page of charts and tables (needs the extra `report`).

`templates/report.html.j2` has the structure and the text of the page and escapes all values; `Report` computes its
charts and tables. A colour stands for one configuration in all charts, or for one part of a step; fills (solid, pale,
hatched) distinguish parts within the colour of a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from math import log2
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

from spmoe.bench.charts import (
    SERIES,
    Bar,
    Fill,
    Line,
    LineChart,
    Part,
    TimelineGroup,
    bar_chart,
    css_colours,
    line_chart,
    ratio_chart,
    require_report_extra,
    timeline_chart,
)
from spmoe.bench.comparison import (
    Column,
    Comparison,
    SweepKey,
    floor_tpot,
    format_range,
    format_speed,
    is_oracle,
    milliseconds,
    paired_speeds,
    quantile,
    resident_tpot,
    tokens_per_step,
    tpot,
)
from spmoe.bench.configs import ABLATIONS, ALL_ON, ablated_record
from spmoe.bench.labels import Row, expert_format, is_plain_decoding, model_name
from spmoe.bench.machine_facts import describe_link, describe_machine, measured
from spmoe.bench.profile import PROFILED_POLICIES, EngineProfile, Predictor
from spmoe.bench.results import WorkloadResults
from spmoe.bench.timeline_figure import TIMELINE_HEAD, rows_to_draw, stored_timeline, timeline_values, tracks
from spmoe.config import format_bytes
from spmoe.errors import UsageError

_IMPLAUSIBLE_EFFICIENCY = 1.05  # more than this means that the machine's speed changed between measurements
_NEUTRAL = SERIES[-1]  # plain decoding, the oracle, and configurations beyond the other colours
_MAX_COLUMNS = 10  # of a table, with the names of its rows
_MIN_PAIRS = 3  # runs of two configurations that tell a difference from noise
_MAX_BARS = 12  # of a chart; slower configurations are in a second one that is folded
_MAX_NAMED = 6  # configurations that the summary compares with by name


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
    return template.render(report=Report(comparison, profile), light=light, dark=dark) + "\n"


class Cell(NamedTuple):
    """A table cell with a note in small print; the best of its column stands out."""

    text: str
    note: str
    best: bool = False


class Table(NamedTuple):
    """Rows whose first cell is their name."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    highlighted: str | None = None  # name of a row
    facts: bool = False  # text instead of numbers

    def split(self) -> Iterator[Table]:
        """Yield tables of at most ten columns, each with the names of the rows."""
        step = _MAX_COLUMNS - 1
        for start in range(1, max(2, len(self.head)), step):
            columns = slice(start, start + step)
            rows = [[row[0], *row[columns]] for row in self.rows]
            yield self._replace(head=[self.head[0], *self.head[columns]], rows=rows)


class Key(NamedTuple):
    """An entry of a legend."""

    name: str
    colour: str = "ink"
    style: str = "solid"  # a Fill; or mark, spread, rule, dashes, upright


class Figure(NamedTuple):
    """A chart with the table of its values."""

    caption: str
    svg: str
    table: Table
    legend: Sequence[Key] = ()
    more: str = ""  # chart of further, slower configurations, if there are many
    num_more: int = 0  # configurations in it


_SPREAD = Key("10th to 90th percentile of runs", style="spread")


class Report:
    """Charts and tables of a page. Attributes and public methods are what the template uses."""

    speed_keys: ClassVar = [
        Key("faster than the baseline"),
        Key("slower than the baseline", style="hatched"),
        Key("the baseline, 1x", "rule", "mark"),
        Key("10th to 90th percentile of paired runs", style="spread"),
    ]
    tpot_keys: ClassVar = [
        Key("floor: max(useful bytes / link bandwidth, compute)"),
        Key("above the floor: stalls and overhead", style="pale"),
        Key("floor", style="mark"),
        _SPREAD,
    ]
    stages: ClassVar = [
        Key("draft", "draft"),
        Key("verify (compute)", "verify"),
        Key("stall (waiting for experts)", "stall"),
        Key("other", "other"),
    ]
    hit_keys: ClassVar = [
        Key("hit: in a slot"),
        Key("late: its copy was in flight", style="pale"),
        Key("miss: loaded on demand", "absent", "hatched"),
    ]
    kinds_of_bytes: ClassVar = [
        Key("prefetched, in time", "prefetch"),
        Key("prefetched, late", "late"),
        Key("loaded on demand", "demand"),
        Key("prefetched, wasted", "absent", "hatched"),
    ]
    efficiency_keys: ClassVar = [Key("floor / measured step"), Key("100 %: perfect overlap", style="mark")]
    timeline_keys: ClassVar = [
        Key("draft", "draft"),
        Key("verify; experts of a layer", "verify"),
        Key("stall", "stall"),
        Key("prefetch, and its request", "prefetch"),
        Key("demand load", "demand"),
        Key("end of the step", "rule", "mark"),
    ]

    def __init__(self, comparison: Comparison, profile: EngineProfile | None) -> None:
        machines = [one.machine for one in comparison.results]
        emulated = any(machine["link_source"] == "emulated" for machine in machines)
        self.models = list(dict.fromkeys(model_name(machine) for machine in machines))
        formats = dict.fromkeys(expert_format(machine) for machine in machines)
        facts = [machines[0]["device"], machines[0]["dtype"], *formats, "emulated link" if emulated else ""]
        facts += ["random weights"] if any(machine.get("weights") == "random" for machine in machines) else []
        self.device = ", ".join(str(fact) for fact in facts if fact)
        self.measured = measured(machines)
        self.interrupted = any(machine.get("interrupted") for machine in machines)
        self.systems = comparison.systems
        self.highlighted = comparison.highlighted
        self.summary = comparison.summary()
        if len(self.summary) > _MAX_NAMED:
            self.summary = [*self.summary[:_MAX_NAMED], "and more below"]
        self.commands = list(dict.fromkeys(str(one["command"]) for one in machines if one.get("command")))
        self.scenarios = {
            str(one["scenario"]): str(one["scenario_text"]) for one in machines if one.get("scenario_text")
        }
        self.implausible_efficiency = any(
            (row["pipeline_efficiency"] or 0.0) > _IMPLAUSIBLE_EFFICIENCY for _, row in comparison.main_rows
        )
        self._found = comparison
        self._label = comparison.labels.label
        self._profile = profile
        self._chart_numbers = count(1)
        self._colours = _choose_colours(comparison)

    @property
    def exactness(self) -> str:
        """Sentence that says whether all configurations generated the same tokens."""
        rows = [row for _, row in self._found.rows()]
        same = sum(row["identical_share"] == 1 for row in rows)
        if same == len(rows):
            return f"All configurations generated the same tokens, in all {sum(row['runs'] for row in rows)} runs."
        exact = [one for one in self._found.results if one.machine["dtype"] == "float32"]
        wrong = any(row["identical_share"] < 1 for one in exact for row in one.rows)
        reason = "in float32 they must not differ" if wrong else "16-bit forwards of other sizes may round differently"
        return f"{same} of {len(rows)} configurations generated the same tokens as the first one; {reason}."

    def cards(self) -> Iterator[tuple[str, str]]:
        """Yield the most important values, each with its meaning."""
        found, name = self._found, self.highlighted
        rows = [row for _, row in found.main_rows if not is_oracle(row)] or [row for _, row in found.main_rows]
        fastest = min(rows, key=tpot)
        conditions = f"{self._label(fastest)}, {_budget(fastest['expert_memory'])}"
        yield milliseconds(tpot(fastest)), f"least time per output token: {conditions}"
        if name is not None:
            pairs = [(found.cells[name, column], column) for column in found.columns if (name, column) in found.cells]
            gains = [(plain, row, column) for row, column in pairs if (plain := found.plain_row(column)) is not None]
            if gains:
                plain, row, column = max(gains, key=lambda one: tpot(one[0]) / tpot(one[1]))
                speed = tpot(plain) / tpot(row)
                yield format_speed(speed), f"best speed of {name} relative to plain decoding ({column})"
            rates = [row["pipeline_efficiency"] for row, _ in pairs if row["pipeline_efficiency"] is not None]
            if rates:
                yield _percent(median(rates)), f"median pipeline efficiency of {name} ({len(rates)} comparisons)"
        accepted = [row["mean_acceptance_length"] for row in rows if row["mean_acceptance_length"] is not None]
        if accepted:
            yield f"{max(accepted):.2f}", "tokens per speculative step, at most"

    # ---- colours

    def colour_keys(self) -> list[Key]:
        """Return the legend of the colours that stand for configurations."""
        keys = [Key(name, colour) for name, colour in self._colours.items() if colour != _NEUTRAL]
        neutral = [name for name, colour in self._colours.items() if colour == _NEUTRAL]
        if len(neutral) > 2:
            neutral = [*neutral[:1], f"and {len(neutral) - 1} others, named in the charts"]
        return keys + ([Key(", ".join(neutral), _NEUTRAL)] if neutral else [])

    def _colour(self, row: Row) -> str:
        """Return the colour of a row's configuration; rows of sweeps and ablations have that of their system."""
        if (name := self._found.labels.system(row)) in self._colours:
            return self._colours[name]
        same = (one for _, one in self._found.main_rows if _policies(one) == _policies(row))
        return next((self._colours[self._found.labels.system(one)] for one in same), SERIES[0])

    # ---- systems and budgets

    def overview(self) -> Table | None:
        """Return relative speeds of the highlighted system by workload, if there are several workloads."""
        workloads = self._found.columns_by_workload()
        if len(workloads) < 2 or self.highlighted is None:
            return None
        speeds = [
            [
                other,
                *(
                    format_range(one) if (one := self._found.speedups(other, columns)) else "-"
                    for columns in workloads.values()
                ),
            ]
            for other in self.systems
            if other != self.highlighted
        ]
        ranks = [self._found.highlighted_ranks(columns) for columns in workloads.values()]
        first = [f"{one.count(1)} of {len(one)}" if one else "-" for one in ranks]
        return Table(["", *workloads], [*speeds, ["fastest speculating system in", *first]])

    @property
    def baselines(self) -> str:
        """Names of the configurations that speeds are relative to."""
        budgets = dict.fromkeys((workload, row["expert_memory"]) for workload, row in self._found.main_rows)
        names = dict.fromkeys(self._label(self._found.baseline(*budget)) for budget in budgets)
        return " or ".join(names) + (", as the chart says" if len(names) > 1 else "")

    def speedups(self) -> dict[str, list[Table]]:
        """Return the speed-up table of each workload."""

        def cell(value: Row | str | None, column: Column) -> str | Cell:
            if isinstance(value, dict):
                is_baseline = value is self._found.baseline(column.workload, column.memory)
                note = "baseline" if is_baseline else format_speed(self._found.speed(value, column.workload))
                return Cell(milliseconds(tpot(value)), note, tpot(value) == self._found.best_tpot(column))
            return value or "-"

        tables = {}
        for workload, columns in self._found.columns_by_workload().items():
            rows = [
                [system, *(cell(value, column) for value, column in zip(values, columns, strict=True))]
                for system, values in self._found.speedup_table(columns)
            ]
            tables[workload] = [Table(["", *(column.short_name for column in columns)], rows, self.highlighted)]
        return tables

    def speedup_charts(self) -> dict[str, list[Figure]]:
        """Return charts of the speed relative to the baseline of each budget."""

        def paired(workload: str, row: Row) -> list[float]:
            return paired_speeds(row, self._found.baseline(workload, row["expert_memory"]))

        def bar(workload: str, row: Row) -> Bar:
            if row is self._found.baseline(workload, row["expert_memory"]):
                return Bar(self._label(row), (), "1.00x (baseline)")
            speed, pairs = self._found.speed(row, workload), paired(workload, row)
            spread = (quantile(pairs, 0.1), quantile(pairs, 0.9)) if len(pairs) > 1 else None
            tip = f"{self._label(row)}: {format_speed(speed)}"
            if spread is not None:
                tip += f"; {spread[0]:.2f}x to {spread[1]:.2f}x in {len(pairs)} paired runs"
            fill = Fill.HATCHED if speed < 1 else Fill.SOLID
            ends = None if spread is None else (log2(spread[0]), log2(spread[1]))
            return Bar(
                self._label(row), (Part(log2(speed), self._colour(row), fill, tip),), format_speed(speed), ends, tip=tip
            )

        def values(workload: str, row: Row) -> list[str]:
            pairs = paired(workload, row)
            spread = f"{quantile(pairs, 0.1):.2f}x to {quantile(pairs, 0.9):.2f}x" if len(pairs) > 1 else "-"
            return [milliseconds(tpot(row)), format_speed(self._found.speed(row, workload)), spread, str(len(pairs))]

        head = ["time per output token", "relative speed", "10 to 90 % of pairs", "pairs"]
        return self._by_budget("Relative speed", bar, head, values, ratios=True)

    def tpot(self) -> dict[str, list[Figure]]:
        """Return charts of the time per output token: its floor, and the rest."""

        def bar(workload: str, row: Row) -> Bar:
            label, time, floor = self._label(row), tpot(row), floor_tpot(row)
            above = max(0.0, time - floor)
            parts = (
                Part(time - above, self._colour(row), Fill.SOLID, f"{label}: floor {milliseconds(floor)}"),
                Part(
                    above,
                    self._colour(row),
                    Fill.PALE,
                    f"{label}: {milliseconds(above)} above the floor (stalls and overhead)",
                ),
            )
            return Bar(label, parts, _time(row), _spread(row), floor, _time_tip(label, row))

        def values(workload: str, row: Row) -> list[str]:
            return [
                *_quantiles(row),
                milliseconds(floor_tpot(row)),
                milliseconds(max(0.0, tpot(row) - floor_tpot(row))),
                milliseconds(resident_tpot(row)),
                str(row["runs"]),
            ]

        head = ["10 %", "median", "90 %", "floor", "above the floor", "all in slots", "runs"]
        return self._by_budget("Time per output token", bar, head, values)

    def time_by_stage(self) -> dict[str, list[Figure]]:
        """Return charts of the time per output token, by stage."""

        def stages(row: Row) -> list[float]:
            tokens, stall = tokens_per_step(row), row["stall_seconds_per_step"]
            draft, verify = row["draft_seconds_per_step"], max(0.0, row["verify_seconds_per_step"] - stall)
            other = max(0.0, row["step_seconds"] - draft - verify - stall)
            return [seconds / tokens for seconds in (draft, verify, stall, other)]

        return self._stacked("Time by stage", self.stages, stages, milliseconds)

    def bytes_moved(self) -> dict[str, list[Figure]]:
        """Return charts of the bytes moved per output token, by kind."""

        def kinds(row: Row) -> list[float]:
            c = row["counters"]
            moved = (c["used_bytes"] - c["late_bytes"], c["late_bytes"], c["demand_bytes"], c["wasted_bytes"])
            return [max(0, one) / max(1, row["output_tokens"]) for one in moved]

        return self._stacked("Bytes moved", self.kinds_of_bytes, kinds, format_bytes)

    def hit_rate(self) -> dict[str, list[Figure]]:
        """Return charts of hits, late experts and misses."""

        def shares(row: Row) -> list[float]:
            counts = [row["counters"][name] for name in ("hits", "late", "demand_loads")]
            return [one / max(1, sum(counts)) for one in counts]

        def bar(workload: str, row: Row) -> Bar:
            label, colour = self._label(row), self._colour(row)
            parts = tuple(
                Part(share, "absent" if key.colour == "absent" else colour, Fill(key.style), tip)
                for share, key in zip(shares(row), self.hit_keys, strict=True)
                if (tip := f"{label}: {_percent(share)} {key.name}")
            )
            return Bar(label, parts, _percent(row["hit_rate"]))

        def values(workload: str, row: Row) -> list[str]:
            routed = sum(row["counters"][name] for name in ("hits", "late", "demand_loads"))
            return [*map(_percent, shares(row)), str(routed)]

        return self._by_budget("Hit rate", bar, ["hit", "late", "miss", "routed experts"], values, x_max=1.0)

    def efficiency(self) -> dict[str, list[Figure]]:
        """Return charts of the pipeline efficiency."""

        def bar(workload: str, row: Row) -> Bar:
            label, rate = self._label(row), row["pipeline_efficiency"] or 0.0
            tip = f"{label}: {_percent(rate)} of a step of {milliseconds(row['step_seconds'])}"
            return Bar(label, (Part(rate, self._colour(row), tip=tip),), _percent(rate), mark=1.0, tip=tip)

        def values(workload: str, row: Row) -> list[str]:
            times = [row["step_seconds"], row["ideal_step_seconds"], row["all_resident_step_seconds"]]
            useful = format_bytes(row["useful_bytes_per_step"])
            return [*map(milliseconds, times), str(row["all_resident_source"]), useful]

        head = ["step", "floor", "all in slots", "source", "useful bytes per step"]
        return self._by_budget("Pipeline efficiency", bar, head, values)

    def _stacked(
        self,
        title: str,
        legend: Sequence[Key],
        lengths: Callable[[Row], list[float]],
        text: Callable[[float], str],
    ) -> dict[str, list[Figure]]:
        def bar(workload: str, row: Row) -> Bar:
            label = self._label(row)
            parts = tuple(
                Part(length, key.colour, Fill(key.style), f"{label}: {key.name}, {text(length)}")
                for length, key in zip(lengths(row), legend, strict=True)
            )
            return Bar(label, parts, text(sum(lengths(row))))

        def values(workload: str, row: Row) -> list[str]:
            return [text(length) for length in lengths(row)]

        return self._by_budget(title, bar, [key.name for key in legend], values)

    def _by_budget(
        self,
        title: str,
        bar: Callable[[str, Row], Bar],
        head: Sequence[str],
        values: Callable[[str, Row], list[str]],
        x_max: float | None = None,
        ratios: bool = False,
    ) -> dict[str, list[Figure]]:
        """Return, for each workload, a chart per memory budget with a bar per configuration, the fastest first."""
        rows_of: dict[str, dict[str, list[Row]]] = {}
        for workload, row in self._found.main_rows:
            rows_of.setdefault(workload, {}).setdefault(row["expert_memory"], []).append(row)
        figures: dict[str, list[Figure]] = {}
        for workload, budgets in rows_of.items():
            bars = {
                memory: [(row, bar(workload, row)) for row in sorted(rows, key=tpot)]
                for memory, rows in budgets.items()
            }
            every = [one for drawn in bars.values() for _, one in drawn]  # one scale for all budgets
            low, high = min(one.start for one in every), x_max or max(one.end for one in every)

            def draw(title: str, drawn: Sequence[Bar], low: float = low, high: float = high) -> str:
                number = self._chart_id()
                if ratios:
                    return ratio_chart(title, drawn, number, (low, high))
                return bar_chart(title, drawn, high, number)

            for memory, drawn in bars.items():
                baseline = self._found.baseline(workload, memory)
                kept = [row is baseline or self._found.labels.system(row) == self.highlighted for row, _ in drawn]
                first = [one for number, (_, one) in enumerate(drawn) if number < _MAX_BARS or kept[number]]
                rest = [one for number, (_, one) in enumerate(drawn) if number >= _MAX_BARS and not kept[number]]
                full_title = ", ".join(part for part in (title, workload, _budget(memory)) if part)
                figures.setdefault(workload, []).append(
                    Figure(
                        _budget(memory) + (f"; baseline: {self._label(baseline)}" if ratios else ""),
                        draw(full_title, first),
                        Table(["", *head], [[self._label(row), *values(workload, row)] for row, _ in drawn]),
                        more=draw(f"{full_title}, further configurations", rest) if rest else "",
                        num_more=len(rest),
                    )
                )
        return figures

    def _chart_id(self) -> str:
        return f"chart{next(self._chart_numbers)}"

    def runs_text(self) -> str:
        """Return how many runs the main charts' medians and spreads are of."""
        return _runs_text([row for _, row in self._found.main_rows], self._found.results)

    # ---- one step

    def timelines(self) -> dict[str, list[Figure]]:
        """Return the timeline of one step of the fastest prefetching configuration and of loading on demand."""
        figures: dict[str, list[Figure]] = {}
        for workload in dict.fromkeys(self._found.workloads):
            rows = [row for one, row in self._found.main_rows if one == workload and stored_timeline(row)]
            if shown := rows_to_draw(rows):
                figures[workload] = [self._timeline(workload, shown)]
        return figures

    def _timeline(self, workload: str, rows: Sequence[Row]) -> Figure:
        drawn = [(self._label(row), timeline) for row in rows if (timeline := stored_timeline(row)) is not None]
        groups = [
            TimelineGroup(f"{name}: {milliseconds(one.seconds)}", 1e3 * one.seconds, tracks(one)) for name, one in drawn
        ]
        names = " and ".join(name for name, _ in drawn)
        title = ", ".join(part for part in ("One step", workload, names, rows[0]["expert_memory"]) if part)
        table = Table(["", *TIMELINE_HEAD], [[name, *timeline_values(one)] for name, one in drawn])
        machine = self._found.results[self._found.workloads.index(workload)].machine
        caption = (
            f"{_budget(rows[0]['expert_memory'])}; copies over the {describe_link(machine)}. The step of median "
            "duration in the first counted run of each configuration."
        )
        if omitted := sum(one.omitted for _, one in drawn):
            caption += f" {omitted} of the shortest spans are left out."
        return Figure(caption, timeline_chart(title, groups, self._chart_id()), table)

    # ---- acceptance, cutoff and ablation

    def acceptance(self) -> dict[str, list[Figure]]:
        """Return a chart of accepted draft tokens by position for each workload that speculates."""
        by_workload: dict[str, dict[str, list[float]]] = {}
        for workload, row in self._found.main_rows:
            if shares := row["acceptance_by_position"]:  # they do not depend on the policy
                lines = by_workload.setdefault(workload, {})
                lines.setdefault(f"K={row['num_speculative_tokens']}", [100 * share for share in shares])
        return {workload: [self._acceptance(workload, lines)] for workload, lines in by_workload.items()}

    def _acceptance(self, workload: str, shares: dict[str, list[float]]) -> Figure:
        markers = "os^Dv*"
        lines = tuple(
            Line(
                name,
                tuple((position + 1.0, share) for position, share in enumerate(values)),
                "draft",
                tips=tuple(f"{name}, position {n}: {share:.1f} % accepted" for n, share in enumerate(values, 1)),
                dashed=bool(number % 2),
                marker=markers[number % len(markers)],
            )
            for number, (name, values) in enumerate(shares.items())
        )
        width = max(len(values) for values in shares.values())
        rows = [
            [name, *(f"{share:.1f} %" for share in values), *[""] * (width - len(values))]
            for name, values in shares.items()
        ]
        title = ", ".join(part for part in ("Accepted draft tokens", workload) if part)
        chart = LineChart(title, "position in the draft", "% accepted", lines, 0.0, 100.0, label_ends=len(lines) > 1)
        caption = "Share of drafts that were accepted up to and including this position."
        svg = line_chart(chart, self._chart_id())
        return Figure(caption, svg, Table(["", *map(str, range(1, width + 1))], rows))

    def cutoff_sweeps(self) -> list[Figure]:
        """Return a chart for each sweep over cutoffs."""
        return [self._cutoff_sweep(key, sweep) for key, sweep in self._found.cutoff_sweeps.items()]

    def _cutoff_sweep(self, key: SweepKey, sweep: dict[int, Row]) -> Figure:
        modes = self._found.cutoff_modes.get(key, {})
        automatic, depths = modes.get("auto"), sorted(sweep)
        rows, colour = [sweep[depth] for depth in depths], self._colour(sweep[depths[0]])
        has_spread = any(_spread(row) for row in rows)
        ends = [_spread(row) or (tpot(row), tpot(row)) for row in rows] if has_spread else []
        lines = [
            Line(
                "measured (median)",
                tuple((depth, 1e3 * tpot(sweep[depth])) for depth in depths),
                colour,
                (automatic["cutoff_layers"],) if automatic is not None else (),
                tuple((1e3 * low, 1e3 * high) for low, high in ends),
                tuple(_time_tip(f"{depth} layers", sweep[depth]) for depth in depths),
                dashed_colour="rule",
            )
        ]
        best = min(depths, key=lambda depth: tpot(sweep[depth]))
        caption = f"{key}. Best: {milliseconds(tpot(sweep[best]))} at {best} layers."
        if automatic is not None:
            caption += f" Auto: {automatic['cutoff_layers']} layers, {milliseconds(tpot(automatic))}."
        close = [depth for depth in depths if depth != best and not _differs(sweep[depth], sweep[best])]
        if close and has_spread:
            caption += f" No clear difference from the best: {', '.join(map(str, close))} layers."
        caption += f" {_runs_text(rows, self._results_of(key.workload))}"
        if self._profile is not None:
            if (mismatch := _mismatch(self._profile, _machine_of(self._found, key))) is not None:
                caption += f" Not predicted: the profile is of {mismatch[0]}."
            else:
                lines += _predicted_line(self._profile, sweep)
        legend = [Key(lines[0].name, colour, "rule")]
        legend += [Key(line.name, "rule", "dashes") for line in lines[1:]]
        legend += [_SPREAD] if has_spread else []
        legend += [Key("auto: chosen by the latency model", "rule", "upright")] if automatic is not None else []
        values = [[f"{depth} layers", *_quantiles(sweep[depth]), str(sweep[depth]["runs"])] for depth in depths]
        values += [
            [f"{mode} ({row['cutoff_layers']} layers)", *_quantiles(row), str(row["runs"])]
            for mode, row in modes.items()
        ]
        title = f"Time per output token by cutoff, {key}"
        svg = line_chart(LineChart(title, "layers prefetched for", "ms per token", tuple(lines)), self._chart_id())
        return Figure(caption, svg, Table(["", "10 %", "median", "90 %", "runs"], values), legend)

    def ablations(self) -> list[Figure]:
        """Return a chart for each configuration that also ran with one part switched off."""
        figures = []
        for workload, results in zip(self._found.workloads, self._found.results, strict=True):
            for full in (row for row in results.rows if row["ablation"] == ALL_ON):
                wanted = {name: ablated_record(full, name) for name in ABLATIONS}
                rows = {name: row for name, one in wanted.items() for row in results.rows if one.items() <= row.items()}
                if len(rows) > 1:
                    parts = (workload, self._label(full), full["expert_memory"])
                    name = ", ".join(part for part in parts if part)
                    figures.append(self._ablation(name, rows, [results]))
        return figures

    def _ablation(self, name: str, rows: dict[str, Row], results: Sequence[WorkloadResults]) -> Figure:
        full, colour = rows[ALL_ON], self._colour(rows[ALL_ON])
        reference = tpot(full)
        bars, values = [], []
        for ablation, row in rows.items():
            change = "" if ablation == ALL_ON else f" ({100 * (tpot(row) / reference - 1):+.1f} %)"
            fill, tip = Fill.SOLID if ablation == ALL_ON else Fill.PALE, _time_tip(ablation, row)
            part = Part(tpot(row), colour, fill, tip)
            bars.append(Bar(ablation, (part,), milliseconds(tpot(row)) + change, _spread(row), reference, tip))
            pairs = [] if ablation == ALL_ON else [1 / one for one in reversed(paired_speeds(row, full))]
            spread = f"{quantile(pairs, 0.1):.3f}x to {quantile(pairs, 0.9):.3f}x" if len(pairs) > 1 else "-"
            values.append([ablation, *_quantiles(row), f"{tpot(row) / reference:.3f}x", spread, str(row["runs"])])
        unclear = [one for one, row in rows.items() if one != ALL_ON and not _differs(row, full)]
        caption = f"{name}. {_runs_text(rows.values(), results)}"
        if unclear and any(_spread(row) for row in rows.values()):
            caption += f" No clear difference from all on: {', '.join(unclear)}."
        legend = [
            Key(ALL_ON, colour),
            Key("one part switched off", colour, "pale"),
            Key(f"time of {ALL_ON}", style="mark"),
            _SPREAD,
        ]
        head = ["", "10 %", "median", "90 %", "time relative to all on", "10 to 90 % of pairs", "runs"]
        svg = bar_chart(f"Ablation, {name}", bars, chart_id=self._chart_id())
        return Figure(caption, svg, Table(head, values), legend)

    def _results_of(self, workload: str) -> list[WorkloadResults]:
        return [self._found.results[self._found.workloads.index(workload)]]

    # ---- machine

    def facts(self) -> Iterator[Table]:
        """Yield a table of facts about all workloads, then one of the facts in which they differ."""
        facts: dict[str, list[str]] = {}
        for one in self._found.results:
            for name, value in describe_machine(one.machine).items():
                facts.setdefault(name, []).append(value)
        equal = [name for name, values in facts.items() if len(set(values)) == 1]
        yield Table(["", ""], [[name, facts[name][0]] for name in equal], facts=True)
        if different := [name for name in facts if name not in equal]:
            names = [workload or "measured" for workload in self._found.workloads]
            yield Table(["", *names], [[name, *facts[name]] for name in different], facts=True)


# ---- colours and spreads


def _policies(row: Row) -> tuple[object, ...]:
    return row["system"], row["prefetch"], row["eviction"]


def _choose_colours(found: Comparison) -> dict[str, str]:
    """Return a colour for each configuration: the highlighted one first, then by speed; references are neutral."""
    rows = {found.labels.system(row): row for _, row in found.main_rows}
    order = [*(name for name in found.systems if name in rows), *rows]
    names = list(dict.fromkeys(sorted(order, key=lambda name: name != found.highlighted)))
    hues = iter(SERIES[:-1])
    return {
        name: _NEUTRAL if is_plain_decoding(rows[name]) or is_oracle(rows[name]) else next(hues, _NEUTRAL)
        for name in names
    }


def _differs(row: Row, other: Row) -> bool:
    """Return whether two configurations differ by more than the spread of their runs."""
    pairs = paired_speeds(row, other)
    if len(pairs) >= _MIN_PAIRS:
        return not quantile(pairs, 0.1) <= 1 <= quantile(pairs, 0.9)
    own, others = _spread(row), _spread(other)
    return own is not None and others is not None and (own[1] < others[0] or others[1] < own[0])


def _runs_text(rows: Iterable[Row], results: Sequence[WorkloadResults]) -> str:
    """Return a sentence about the number of runs and what their spread means."""
    counts = sorted({row["runs"] for row in rows})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts == [1]:
        return "One run each: there is no spread, and small differences may be noise."
    if {one.machine["repeat"] for one in results} == {1}:
        return f"n = {number} runs each, one run of each prompt: error bars show how prompts differ, not noise."
    return f"n = {number} runs each: all prompts and repeats."


def _time(row: Row) -> str:
    return milliseconds(tpot(row)) + (" (one run)" if row["runs"] == 1 else "")


def _time_tip(label: str, row: Row) -> str:
    low, middle, high = _quantiles(row)
    runs = "one run" if row["runs"] == 1 else f"10 to 90 %: {low} to {high}, {row['runs']} runs"
    return f"{label}: {middle} ({runs})"


def _quantiles(row: Row) -> list[str]:
    return [milliseconds(row["tpot_seconds"][key]) for key in ("p10", "median", "p90")]


def _spread(row: Row) -> tuple[float, float] | None:
    """Return the ends of the error bar of a row's TPOT; None for a single run."""
    return None if row["runs"] == 1 else (row["tpot_seconds"]["p10"], row["tpot_seconds"]["p90"])


def _budget(memory: str) -> str:
    return f"{memory} of the experts in slots" if memory.endswith("%") else f"{memory} of slots"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


# ---- predictions from a profile


def require_matching_profile(comparison: Comparison, profile: EngineProfile) -> None:
    """Raise UsageError unless the profile fits the machine and model of at least one cutoff sweep."""
    machines = [_machine_of(comparison, key) for key in comparison.cutoff_sweeps]
    if not machines:
        raise UsageError(
            "these results contain no cutoff sweep to draw the profile's predictions in; leave out --profile, or run "
            "`spmoe bench --scenario ushape`"
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
    return [Line("predicted from the profile", tuple(points), "rule", dashed=True, marker="s")]
