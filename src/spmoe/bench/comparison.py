"""Comparison of stored results: which systems ran under equal conditions, ranks, ratios and cutoff sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from spmoe.bench.configs import ALL_ON, ablated_record
from spmoe.bench.labels import USUAL_CUTOFF, Labels, Row, is_plain_decoding, workload_names
from spmoe.bench.results import WorkloadResults
from spmoe.config import DraftTokens, max_draft_tokens
from spmoe.registry import ON_DEMAND

_ORACLE = "oracle"  # a lower bound on time, not a competitor
_HIGHLIGHTED_NAME, _HIGHLIGHTED_POLICY = "SP-MoE", "draft-gate"
_SLOWER = " (slower)"
_MIN_SWEEP = 3  # numbers of layers that make a sweep


@dataclass(frozen=True, slots=True)
class Column:
    """Conditions under which systems are compared: workload, memory budget and K."""

    workload: str
    memory: str
    draft_tokens: DraftTokens

    @property
    def short_name(self) -> str:
        """Name among the columns of the same workload."""
        return f"{self.memory}, K={self.draft_tokens}"

    def __str__(self) -> str:
        return f"{self.workload}, {self.short_name}" if self.workload else self.short_name


class SweepKey(NamedTuple):
    """Conditions that are equal within a sweep over cutoffs."""

    workload: str
    policies: str
    memory: str
    draft_tokens: DraftTokens

    def __str__(self) -> str:
        name = f"{self.workload}: {self.policies}" if self.workload else self.policies
        return f"{name}, {self.memory}, K={self.draft_tokens}"


class Comparison:
    """Systems against conditions: `cells` has one row of results for each measured (system, column)."""

    def __init__(self, results: Sequence[WorkloadResults]) -> None:
        self.results = results
        self.workloads = workload_names(results)
        self.labels = Labels([row for one in results for row in one.rows])
        self.cutoff_sweeps: dict[SweepKey, dict[int, Row]] = {}  # rows by number of layers
        self.cutoff_modes: dict[SweepKey, dict[str, Row]] = {}  # rows whose cutoff is a mode, such as auto
        self._find_sweeps()
        self.main_rows = self._find_main_rows()  # with the name of their workload: rows that compare systems
        self.cells: dict[tuple[str, Column], Row] = {}
        plain: dict[tuple[str, str], list[Row]] = {}
        for workload, row in self.main_rows:
            if is_plain_decoding(row):
                plain.setdefault((workload, row["expert_memory"]), []).append(row)
            else:
                column = Column(workload, row["expert_memory"], row["num_speculative_tokens"])
                self.cells.setdefault((self.labels.system(row), column), row)
        for column in self.columns:  # plain decoding is compared with every K
            for row in plain.get((column.workload, column.memory), ()):
                self.cells[self.labels.system(row), column] = row

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield every row with the name of its workload."""
        for workload, one in zip(self.workloads, self.results, strict=True):
            yield from ((workload, row) for row in one.rows)

    def _find_main_rows(self) -> list[tuple[str, Row]]:
        """Select rows without ablation and outside of cutoff sweeps, if there are any to compare."""
        rows = [(workload, row) for workload, row in self.rows() if row["ablation"] is None]
        known = {(workload, *ablated_record(row, ALL_ON).values()) for workload, row in rows}
        rows += [
            (workload, row)
            for workload, row in self.rows()
            if row["ablation"] == ALL_ON and (workload, *ablated_record(row, ALL_ON).values()) not in known
        ]
        swept = {id(row) for sweep in self.cutoff_sweeps.values() for row in sweep.values()}
        shown_elsewhere = {one for one, row in self.rows() if id(row) in swept or row["ablation"] is not None}
        rows = [(workload, row) for workload, row in rows if id(row) not in swept] or rows
        policies: dict[str, set[str]] = {}
        for workload, row in rows:
            policies.setdefault(workload, set()).add(self.labels.policies(row))
        # a workload that was run for a sweep or an ablation alone is shown only there
        main = [(one, row) for one, row in rows if len(policies[one]) > 1 or one not in shown_elsewhere]
        return main or rows or list(self.rows())

    def _find_sweeps(self) -> None:
        sweeps: dict[SweepKey, dict[int, Row]] = {}
        for workload, row in self.rows():
            if row["ablation"] not in (None, ALL_ON) or row["cutoff_layers"] is None:
                continue
            policies = self.labels.policies(row)
            key = SweepKey(workload, policies, row["expert_memory"], row["num_speculative_tokens"])
            if row["cutoff"].isdecimal():
                sweeps.setdefault(key, {})[int(row["cutoff"])] = row
            else:
                self.cutoff_modes.setdefault(key, {})[row["cutoff"]] = row
        self.cutoff_sweeps = {key: rows for key, rows in sweeps.items() if len(rows) >= _MIN_SWEEP}

    @property
    def columns(self) -> list[Column]:
        """Columns by workload and memory budget as measured, then by K."""
        found = list(dict.fromkeys(column for _, column in self.cells))
        first = {(one.workload, one.memory): number for number, one in reversed(list(enumerate(found)))}
        return sorted(found, key=lambda one: (first[one.workload, one.memory], max_draft_tokens(one.draft_tokens)))

    def columns_by_workload(self) -> dict[str, list[Column]]:
        """Return the columns of each workload."""
        found: dict[str, list[Column]] = {}
        for column in self.columns:
            found.setdefault(column.workload, []).append(column)
        return found

    @property
    def systems(self) -> list[str]:
        """Systems by median TPOT relative to the best of each column; the oracle first, plain decoding last."""
        names = list(dict.fromkeys(name for name, _ in self.cells))

        def sort_key(name: str) -> tuple[bool, bool, float]:
            rows = [(row, column) for (system, column), row in self.cells.items() if system == name]
            ratios = [tpot(row) / self.best_tpot(column) for row, column in rows]
            return is_plain_decoding(rows[0][0]), not is_oracle(rows[0][0]), median(ratios)

        return sorted(names, key=sort_key)

    @property
    def highlighted(self) -> str | None:
        """Name of this project's own system, if it was measured."""
        named = [(name, row) for (name, _), row in self.cells.items() if row["system"] == _HIGHLIGHTED_NAME]
        found = named or [
            (name, row) for (name, _), row in self.cells.items() if row["prefetch"] == _HIGHLIGHTED_POLICY
        ]
        return min(found, key=lambda one: one[1]["cutoff"] != USUAL_CUTOFF)[0] if found else None

    def is_oracle(self, system: str) -> bool:
        """Return whether a system knows the routing in advance."""
        return any(name == system and is_oracle(row) for (name, _), row in self.cells.items())

    def best_tpot(self, column: Column) -> float:
        """Return the least TPOT of a column in seconds, without the oracle unless it is alone."""
        rows = self._rows_of(column)
        return min(tpot(row) for row in [row for row in rows if not is_oracle(row)] or rows)

    def rank(self, system: str, column: Column) -> tuple[int, int] | None:
        """Return the rank of a system among those that speculate in a column, and their number."""
        if (system, column) not in self.cells:
            return None
        own = tpot(self.cells[system, column])
        others = [
            tpot(row)
            for (name, other), row in self.cells.items()
            if other == column and name != system and not is_plain_decoding(row) and not is_oracle(row)
        ]
        return 1 + sum(time < own for time in others), 1 + len(others)

    def highlighted_ranks(self, columns: Iterable[Column]) -> list[int]:
        """Return ranks of the highlighted system in columns with several systems."""
        if (name := self.highlighted) is None:
            return []
        return [rank[0] for column in columns if (rank := self.rank(name, column)) is not None and rank[1] > 1]

    def oracle_row(self, column: Column) -> Row | None:
        """Return the oracle's row of a column."""
        return next((row for row in self._rows_of(column) if is_oracle(row)), None)

    def plain_row(self, column: Column) -> Row | None:
        """Return plain decoding in a column; the fastest, if there are several."""
        return min((row for row in self._rows_of(column) if is_plain_decoding(row)), key=tpot, default=None)

    def baseline(self, workload: str, memory: str) -> Row:
        """Return the row that speeds of a workload and memory budget are relative to.

        Plain decoding; else loading on demand; else the slowest configuration.
        """
        rows = [row for one, row in self.main_rows if (one, row["expert_memory"]) == (workload, memory)]
        plain = [row for row in rows if is_plain_decoding(row)]
        on_demand = [row for row in rows if row["prefetch"] == ON_DEMAND]
        return min(plain or on_demand or [max(rows, key=tpot)], key=tpot)

    def speed(self, row: Row, workload: str) -> float:
        """Return the speed of a row relative to the baseline of its budget; above 1 is faster."""
        return tpot(self.baseline(workload, row["expert_memory"])) / tpot(row)

    def speedups(self, system: str, columns: Iterable[Column]) -> list[float]:
        """Return the speed of the highlighted system relative to another, column by column; above 1 is faster."""
        name = self.highlighted
        return [
            tpot(self.cells[system, column]) / tpot(self.cells[name, column])
            for column in columns
            if name is not None and (system, column) in self.cells and (name, column) in self.cells
        ]

    def summary(self) -> list[str]:
        """Return a few phrases about the highlighted system."""
        phrases: list[str] = []
        for name in self.systems:
            if name != self.highlighted and not self.is_oracle(name) and (ratios := self.speedups(name, self.columns)):
                phrases.append(_relative_to(name, ratios))
        if ranks := self.highlighted_ranks(self.columns):
            count = f"{ranks.count(1)} of {len(ranks)} comparison{'s' * (len(ranks) > 1)}"
            phrases.append(f"fastest speculating system in {count}")
        oracles = [ratio for one in self.systems if self.is_oracle(one) for ratio in self.speedups(one, self.columns)]
        if oracles:
            phrases.append(_relative_to("the oracle", oracles))
        return phrases

    def speedup_table(self, columns: Sequence[Column]) -> list[tuple[str, list[Row | str | None]]]:
        """Return lines of a speed-up table: each system with its rows, then ranks and speeds relative to the oracle."""
        lines: list[tuple[str, list[Row | str | None]]] = []
        for system in self.systems:
            rows: list[Row | str | None] = [self.cells.get((system, column)) for column in columns]
            if any(row is not None for row in rows):
                lines.append((system, rows))
        if (name := self.highlighted) is not None:
            ranks = (self.rank(name, column) for column in columns)
            lines.append((f"rank of {name}", [rank and f"{rank[0]} of {rank[1]}" for rank in ranks]))
            if any(self.oracle_row(column) for column in columns):
                lines.append(
                    (f"{name}, relative to the oracle", [self._oracle_ratio(name, column) for column in columns])
                )
        return lines

    def _oracle_ratio(self, system: str, column: Column) -> str | None:
        row, oracle = self.cells.get((system, column)), self.oracle_row(column)
        return None if row is None or oracle is None else format_speed(tpot(oracle) / tpot(row))

    def _rows_of(self, column: Column) -> list[Row]:
        return [row for (_, other), row in self.cells.items() if other == column]


def is_oracle(row: Row) -> bool:
    """Return whether a row's policy knows the routing in advance."""
    return _ORACLE in row["prefetch"].split("+")


def tpot(row: Row) -> float:
    """Return the median time per output token, in seconds."""
    return float(row["tpot_seconds"]["median"])


def tokens_per_step(row: Row) -> float:
    """Return the mean number of tokens that a step yields."""
    return float(row["output_tokens"] / max(1, row["steps"]))


def floor_tpot(row: Row) -> float:
    """Return seconds per output token of a perfect pipeline that moves the same useful bytes."""
    return float(row["ideal_step_seconds"] / tokens_per_step(row))


def resident_tpot(row: Row) -> float:
    """Return seconds per output token with all experts in slots."""
    return float(row["all_resident_step_seconds"]) / tokens_per_step(row)


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with about three digits."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 1000 else f"{value:.0f} ms"


def format_speed(ratio: float) -> str:
    """Format a relative speed as "1.25x" or, below 1, as "0.80x (slower)"."""
    text = f"{ratio:.2f}x"
    return text + _SLOWER if ratio < 1 and text != "1.00x" else text


def format_range(ratios: Sequence[float]) -> str:
    """Format the least and greatest relative speed, as "1.10x to 1.50x" or "0.80x (slower) to 1.50x"."""
    low, high = format_speed(min(ratios)), format_speed(max(ratios))
    if low == high:
        return low
    return f"{low.removesuffix(_SLOWER) if high.endswith(_SLOWER) else low} to {high}"


def _relative_to(name: str, ratios: Sequence[float]) -> str:
    """Return "1.10x to 1.50x the speed of NAME", with "(slower)" at the end if all ratios are below 1."""
    text = format_range(ratios)
    return f"{text.removesuffix(_SLOWER)} the speed of {name}{_SLOWER if text.endswith(_SLOWER) else ''}"


def paired_speeds(row: Row, baseline: Row) -> list[float]:
    """Return the speed relative to a baseline in each pair of runs of one prompt and repeat, in ascending order.

    Paired runs follow each other directly, so that slow changes of the machine cancel out. Empty if the runs are not
    stored.
    """
    own, other = (
        {(one["prompt"], one["repeat"]): one["tpot_seconds"] for one in row.get("samples", ())}
        for row in (row, baseline)
    )
    return sorted(other[key] / own[key] for key in own.keys() & other.keys() if own[key] and other[key])


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated linearly."""
    position = share * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (position - below) * (values[above] - values[below])
