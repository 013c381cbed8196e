"""HTML report: stored results as one self-contained page of charts and tables (needs the extra `report`).

`templates/report.html.j2` has the structure and the text of the page and escapes all values; `Report` computes its
charts and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


class Figure(NamedTuple):
    """A chart with the table of its values."""

    caption: str
    svg: str
    table: Table
    legend: Sequence[tuple[str, int]] = ()  # names and colours


class Report:
    """Charts and tables of a page. Attributes and public methods are what the template uses."""

    stages: ClassVar = [("draft", 0), ("verify (compute)", 2), ("stall (waiting for experts)", 1), ("other", _GREY)]
    kinds_of_bytes: ClassVar = [
        ("loaded on demand", 1),
        ("prefetched, in time", 2),
        ("prefetched, late", 4),
        ("prefetched, wasted", 5),
    ]

    def __init__(self, comparison: Comparison, profile: EngineProfile | None) -> None:
        machines = [one.machine for one in comparison.results]
        emulated = any(machine["link_source"] == "emulated" for machine in machines)
        self.models = list(dict.fromkeys(model_name(machine) for machine in machines))
        self.device = f"{machines[0]['device']}, {machines[0]['dtype']}" + (", emulated link" if emulated else "")
        self.interrupted = any(machine.get("interrupted") for machine in machines)
        self.systems = comparison.systems
        self.highlighted = comparison.highlighted
        self.summary = comparison.summary()
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
                yield f"{tpot(plain) / tpot(row):.2f}x", f"best speed-up over plain decoding ({column})"
            rates = [row["pipeline_efficiency"] for row, _ in pairs if row["pipeline_efficiency"] is not None]
            if rates:
                yield _percent(median(rates)), f"median pipeline efficiency of {name} ({len(rates)} comparisons)"
        accepted = [row["mean_acceptance_length"] for row in rows if row["mean_acceptance_length"] is not None]
        if accepted:
            yield f"{max(accepted):.2f}", "tokens per speculative step, at most"

    # ---- systems and budgets

    def overview(self) -> Table | None:
        """Return speed-ups of the highlighted system by workload, if there are several workloads."""
        workloads = self._found.columns_by_workload()
        if len(workloads) < 2 or self.highlighted is None:
            return None
        others = [system for system in self.systems if system != self.highlighted]
        rows = []
        for workload, columns in workloads.items():
            ranges = [format_range(one) if (one := self._found.speedups(other, columns)) else "-" for other in others]
            ranks = self._found.highlighted_ranks(columns)
            rows.append([workload, *ranges, f"{ranks.count(1)} of {len(ranks)}" if ranks else "-"])
        return Table(["", *others, "fastest speculating system in"], rows)

    def speedups(self) -> dict[str, list[Table]]:
        """Return the speed-up table of each workload."""

        def cell(value: Row | str | None, column: Column) -> str | Cell:
            if isinstance(value, dict):
                ratio = tpot(value) / self._found.best_tpot(column)
                return Cell(milliseconds(tpot(value)), f"{ratio:.2f}x", ratio == 1)
            return value or "-"

        tables = {}
        for workload, columns in self._found.columns_by_workload().items():
            rows = [
                [system, *(cell(value, column) for value, column in zip(values, columns, strict=True))]
                for system, values in self._found.speedup_table(columns)
            ]
            tables[workload] = [Table(["", *(column.short_name for column in columns)], rows, self.highlighted)]
        return tables

    def tpot(self) -> dict[str, list[Figure]]:
        """Return charts of the time per output token."""

        def bar(row: Row) -> Bar:
            parts = ((tpot(row), self._colour(row)),)
            return Bar(self._label(row), parts, milliseconds(tpot(row)), _spread(row), floor_tpot(row))

        def values(row: Row) -> list[str]:
            return [*_quantiles(row), milliseconds(floor_tpot(row)), milliseconds(resident_tpot(row)), str(row["runs"])]

        head = ["10 %", "median", "90 %", "floor", "all in slots", "runs"]
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
            moved = (c["demand_bytes"], c["used_bytes"] - c["late_bytes"], c["late_bytes"], c["wasted_bytes"])
            return [max(0, one) / max(1, row["output_tokens"]) for one in moved]

        return self._stacked("Bytes moved", self.kinds_of_bytes, kinds, format_bytes)

    def hit_rate(self) -> dict[str, list[Figure]]:
        """Return charts of the hit rate."""

        def bar(row: Row) -> Bar:
            return Bar(self._label(row), ((row["hit_rate"] or 0.0, self._colour(row)),), _percent(row["hit_rate"]))

        def values(row: Row) -> list[str]:
            counts = [row["counters"][name] for name in ("hits", "late", "demand_loads")]
            return [*(_percent(one / max(1, sum(counts))) for one in counts), str(sum(counts))]

        head = ["hit", "late", "loaded on demand", "routed experts"]
        return self._by_budget("Hit rate", bar, head, values, x_max=1.0)

    def efficiency(self) -> dict[str, list[Figure]]:
        """Return charts of the pipeline efficiency."""

        def bar(row: Row) -> Bar:
            rate = row["pipeline_efficiency"] or 0.0
            return Bar(self._label(row), ((rate, self._colour(row)),), _percent(rate), mark=1.0)

        def values(row: Row) -> list[str]:
            times = [row["step_seconds"], row["ideal_step_seconds"], row["all_resident_step_seconds"]]
            useful = format_bytes(row["useful_bytes_per_step"])
            return [*map(milliseconds, times), str(row["all_resident_source"]), useful]

        head = ["step", "best possible", "all in slots", "source", "useful bytes per step"]
        return self._by_budget("Pipeline efficiency", bar, head, values)

    def _stacked(
        self,
        title: str,
        legend: Sequence[tuple[str, int]],
        lengths: Callable[[Row], list[float]],
        text: Callable[[float], str],
    ) -> dict[str, list[Figure]]:
        def bar(row: Row) -> Bar:
            parts = [(length, colour) for length, (_, colour) in zip(lengths(row), legend, strict=True)]
            return Bar(self._label(row), tuple(parts), text(sum(lengths(row))))

        def values(row: Row) -> list[str]:
            return [text(length) for length in lengths(row)]

        return self._by_budget(title, bar, [name for name, _ in legend], values)

    def _by_budget(
        self,
        title: str,
        bar: Callable[[Row], Bar],
        head: Sequence[str],
        values: Callable[[Row], list[str]],
        x_max: float | None = None,
    ) -> dict[str, list[Figure]]:
        """Return, for each workload, a chart per memory budget with a bar per configuration."""
        rows_of: dict[str, dict[str, list[Row]]] = {}
        for workload, row in self._found.main_rows:
            rows_of.setdefault(workload, {}).setdefault(row["expert_memory"], []).append(row)
        figures: dict[str, list[Figure]] = {}
        for workload, budgets in rows_of.items():
            end = x_max or max(bar(row).end for rows in budgets.values() for row in rows)  # one scale for all budgets
            for memory, rows in budgets.items():
                full_title = ", ".join(part for part in (title, workload, _budget(memory)) if part)
                svg = bar_chart(full_title, [bar(row) for row in rows], end, self._chart_id())
                table = Table(["", *head], [[self._label(row), *values(row)] for row in rows])
                figures.setdefault(workload, []).append(Figure(_budget(memory), svg, table))
        return figures

    def _chart_id(self) -> str:
        return f"chart{next(self._chart_numbers)}"

    def _colour(self, row: Row) -> int:
        """Return the colour of a row's system: 0 for the highlighted one, grey for the oracle and plain decoding."""
        system = self._found.labels.system(row)
        if system == self.highlighted:
            return 0
        if is_plain_decoding(row) or is_oracle(row):
            return _GREY
        names = dict.fromkeys(self._found.labels.system(one) for _, one in self._found.main_rows)
        return 1 + [name for name in names if name != self.highlighted].index(system) % 6

    # ---- acceptance, cutoff and ablation

    def acceptance(self) -> list[Figure]:
        """Return a chart of accepted draft tokens by position; empty without speculation."""
        lines: dict[str, Line] = {}
        rows = []
        for workload, row in self._found.main_rows:
            shares = row["acceptance_by_position"]
            name = ", ".join(part for part in (workload, f"K={row['num_speculative_tokens']}") if part)
            if not shares or name in lines:  # acceptance does not depend on the policy
                continue
            points = tuple((position + 1.0, 100 * share) for position, share in enumerate(shares))
            lines[name] = Line(name, points, len(lines))
            rows.append([name, *(f"{100 * share:.1f} %" for share in shares)])
        if not lines:
            return []
        width = max(len(row) for row in rows)
        table = Table(["", *map(str, range(1, width))], [row + [""] * (width - len(row)) for row in rows])
        legend = [(line.name, line.colour % NUM_COLOURS) for line in lines.values()] if len(lines) > 1 else []
        chart = LineChart(
            "Accepted draft tokens", "position in the draft", "% accepted", tuple(lines.values()), 0.0, 100.0
        )
        caption = "Share of drafts that were accepted up to and including this position."
        return [Figure(caption, line_chart(chart, self._chart_id()), table, legend)]

    def cutoff_sweeps(self) -> list[Figure]:
        """Return a chart for each sweep over cutoffs."""
        return [self._cutoff_sweep(key, sweep) for key, sweep in self._found.cutoff_sweeps.items()]

    def _cutoff_sweep(self, key: SweepKey, sweep: dict[int, Row]) -> Figure:
        modes = self._found.cutoff_modes.get(key, {})
        automatic, depths = modes.get("auto"), sorted(sweep)
        points = tuple((depth, 1e3 * tpot(sweep[depth])) for depth in depths)
        lines = [Line("measured", points, 0, (automatic["cutoff_layers"],) if automatic is not None else ())]
        best = min(depths, key=lambda depth: tpot(sweep[depth]))
        caption = f"{key}. Best: {milliseconds(tpot(sweep[best]))} at {best} layers."
        if automatic is not None:
            caption += f" Auto: {automatic['cutoff_layers']} layers, {milliseconds(tpot(automatic))}."
        if self._profile is not None:
            if (mismatch := _mismatch(self._profile, _machine_of(self._found, key))) is not None:
                caption += f" Not predicted: the profile is of {mismatch[0]}."
            else:
                lines += _predicted_line(self._profile, sweep)
        legend = [("measured", 0), ("predicted from the profile", 1)] if len(lines) > 1 else []
        rows = [[f"{depth} layers", *_quantiles(sweep[depth])] for depth in depths]
        rows += [[f"{mode} ({row['cutoff_layers']} layers)", *_quantiles(row)] for mode, row in modes.items()]
        title = f"Time per output token by cutoff, {key}"
        svg = line_chart(LineChart(title, "layers prefetched for", "ms per token", tuple(lines)), self._chart_id())
        return Figure(caption, svg, Table(["", "10 %", "median", "90 %"], rows), legend)

    def ablations(self) -> list[Figure]:
        """Return a chart for each configuration that also ran with one part switched off."""
        figures = []
        for workload, results in zip(self._found.workloads, self._found.results, strict=True):
            for full in (row for row in results.rows if row["ablation"] == ALL_ON):
                wanted = {name: ablated_record(full, name) for name in ABLATIONS}
                rows = {name: row for name, one in wanted.items() for row in results.rows if one.items() <= row.items()}
                if len(rows) > 1:
                    parts = (workload, self._label(full), full["expert_memory"])
                    figures.append(self._ablation(", ".join(part for part in parts if part), rows))
        return figures

    def _ablation(self, name: str, rows: dict[str, Row]) -> Figure:
        reference = tpot(rows[ALL_ON])
        bars, values = [], []
        for ablation, row in rows.items():
            change = "" if ablation == ALL_ON else f" ({100 * (tpot(row) / reference - 1):+.1f} %)"
            parts = ((tpot(row), 0 if ablation == ALL_ON else 6),)
            bars.append(Bar(ablation, parts, milliseconds(tpot(row)) + change, _spread(row), reference))
            values.append([ablation, *_quantiles(row), f"{tpot(row) / reference:.3f}x"])
        table = Table(["", "10 %", "median", "90 %", "relative to all on"], values)
        return Figure(name, bar_chart(f"Ablation, {name}", bars, chart_id=self._chart_id()), table)

    # ---- machine

    def facts(self) -> Iterator[Table]:
        """Yield a table of facts about all workloads, then one of the facts in which they differ."""
        facts: dict[str, list[str]] = {}
        for one in self._found.results:
            for name, value in _facts(one.machine).items():
                facts.setdefault(name, []).append(value)
        equal = [name for name, values in facts.items() if len(set(values)) == 1]
        yield Table(["", ""], [[name, facts[name][0]] for name in equal], facts=True)
        if different := [name for name in facts if name not in equal]:
            names = [workload or "measured" for workload in self._found.workloads]
            yield Table(["", *names], [[name, *facts[name]] for name in different], facts=True)


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


def _spread(row: Row) -> tuple[float, float]:
    return row["tpot_seconds"]["p10"], row["tpot_seconds"]["p90"]


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
