"""Comparisons: what stored results say of systems against each other, for a page or for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from spmoe.bench.labels import USUAL_CUTOFF, Labels, Row, case_names, is_plain
from spmoe.bench.results import Group
from spmoe.bench.settings import ALL_ON, switched_off
from spmoe.config import DraftTokens, max_draft_tokens

_BOUND = "oracle"  # the policy that knows what will be needed: what the others are measured by, not one of them
_OURS, _OUR_NAME = "draft-gate", "SP-MoE"
_SWEPT = 3  # numbers of layers that make a sweep


@dataclass(frozen=True, slots=True)
class Column:
    """Where systems meet on the same terms."""

    case: str
    memory: str
    draft_tokens: DraftTokens

    @property
    def within(self) -> str:
        """Its name among the columns of its case."""
        return f"{self.memory}, K={self.draft_tokens}"

    def __str__(self) -> str:
        return f"{self.case}, {self.within}" if self.case else self.within


class Place(NamedTuple):
    """Where cutoffs are swept."""

    case: str
    way: str
    memory: str
    draft_tokens: DraftTokens

    def __str__(self) -> str:
        name = f"{self.case}: {self.way}" if self.case else self.way
        return f"{name}, {self.memory}, K={self.draft_tokens}"


class Comparison:
    """Systems by columns, one row of figures for each pair that was measured."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.cases = case_names(groups)
        labels = Labels([row for group in groups for row in group.rows])
        self.way, self.system, self.label = labels.way, labels.system, labels.label
        self.sweeps, self.chosen = self._find_sweeps()
        self._main = self._find_main_rows()
        self.cells: dict[tuple[str, Column], Row] = {}
        plain: dict[tuple[str, str], list[Row]] = {}
        for case, row in self._main:
            if is_plain(row):
                plain.setdefault((case, row["expert_memory"]), []).append(row)
            else:
                column = Column(case, row["expert_memory"], row["num_speculative_tokens"])
                self.cells.setdefault((self.system(row), column), row)
        for column in self.columns:  # it takes part in all of them, whatever their K
            for row in plain.get((column.case, column.memory), ()):
                self.cells[self.system(row), column] = row

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every row, with the name of its case."""
        for case, group in zip(self.cases, self.groups, strict=True):
            yield from ((case, row) for row in group.rows)

    def main_rows(self) -> list[tuple[str, Row]]:
        """Those that compare systems: no part switched off, no cutoff swept, where there is anything to compare."""
        return self._main

    def _find_main_rows(self) -> list[tuple[str, Row]]:
        whole = [(case, row) for case, row in self.rows() if row["ablation"] is None]
        known = {(case, *switched_off(row, ALL_ON).values()) for case, row in whole}  # as an ablation would record them
        whole += [
            (case, row)
            for case, row in self.rows()
            if row["ablation"] == ALL_ON and (case, *switched_off(row, ALL_ON).values()) not in known
        ]
        swept = {id(row) for rows in self.sweeps.values() for row in rows.values()}
        apart = {case for case, row in self.rows() if id(row) in swept or row["ablation"] is not None}
        whole = [(case, row) for case, row in whole if id(row) not in swept] or whole
        ways: dict[str, set[str]] = {}
        for case, row in whole:
            ways.setdefault(case, set()).add(self.way(row))
        # what was measured for a sweep or an ablation alone is shown there
        main = [(case, row) for case, row in whole if len(ways[case]) > 1 or case not in apart]
        return main or whole or list(self.rows())

    def _find_sweeps(self) -> tuple[dict[Place, dict[int, Row]], dict[Place, dict[str, Row]]]:
        """Rows by number of layers, for every place that has several such; and those that chose one themselves."""
        sweeps: dict[Place, dict[int, Row]] = {}
        chosen: dict[Place, dict[str, Row]] = {}
        for case, row in self.rows():
            if row["ablation"] not in (None, ALL_ON) or row["cutoff_layers"] is None:
                continue
            place = Place(case, self.way(row), row["expert_memory"], row["num_speculative_tokens"])
            if row["cutoff"].isdecimal():
                sweeps.setdefault(place, {})[int(row["cutoff"])] = row
            else:
                chosen.setdefault(place, {})[row["cutoff"]] = row
        return {place: rows for place, rows in sweeps.items() if len(rows) >= _SWEPT}, chosen

    @property
    def columns(self) -> list[Column]:
        """Cases and budgets in the order in which they were measured, each with its values of K from the least on."""
        found = list(dict.fromkeys(column for _, column in self.cells))
        first = {(column.case, column.memory): place for place, column in reversed(list(enumerate(found)))}
        return sorted(found, key=lambda column: (first[column.case, column.memory], max_draft_tokens(column.draft_tokens)))

    @property
    def systems(self) -> list[str]:
        """By their median TPOT over the columns, the fastest first; the bound on top, plain decoding last."""
        names = list(dict.fromkeys(name for name, _ in self.cells))

        def key(name: str) -> tuple[bool, bool, float]:
            rows = [row for (system, _), row in self.cells.items() if system == name]
            ratios = [tpot(row) / self.best(column) for (system, column), row in self.cells.items() if system == name]
            return is_plain(rows[0]), not is_bound(rows[0]), median(ratios)

        return sorted(names, key=key)

    @property
    def ours(self) -> str | None:
        """The system that this project is about, if it was measured."""
        named = [(name, row) for (name, _), row in self.cells.items() if row["system"] == _OUR_NAME]
        exact = named or [(name, row) for (name, _), row in self.cells.items() if row["prefetch"] == _OURS]
        return min(exact, key=lambda one: one[1]["cutoff"] != USUAL_CUTOFF)[0] if exact else None

    def best(self, column: Column) -> float:
        """The least TPOT of a column, in seconds, not counting the bound."""
        found = [tpot(row) for (_, other), row in self.cells.items() if other == column and not is_bound(row)]
        return min(found) if found else min(tpot(row) for (_, other), row in self.cells.items() if other == column)

    def rank(self, system: str, column: Column) -> tuple[int, int] | None:
        """A system's place among those that speculate in a column, and how many there are."""
        if (system, column) not in self.cells:
            return None
        own = tpot(self.cells[system, column])
        others = [
            tpot(row)
            for (name, other), row in self.cells.items()
            if other == column and name != system and not is_plain(row) and not is_bound(row)
        ]
        return 1 + sum(time < own for time in others), 1 + len(others)

    def bound(self, column: Column) -> Row | None:
        """The oracle's row of a column, if it was measured."""
        return next((row for (_, other), row in self.cells.items() if other == column and is_bound(row)), None)

    def plain(self, column: Column) -> Row | None:
        """Plain decoding in a column, the fastest where there is more than one."""
        rows = [row for (_, other), row in self.cells.items() if other == column and is_plain(row)]
        return min(rows, key=tpot, default=None)

    def by_case(self) -> dict[str, list[Column]]:
        """The columns of each case."""
        found: dict[str, list[Column]] = {}
        for column in self.columns:
            found.setdefault(column.case, []).append(column)
        return found

    def ratios(self, system: str, columns: Sequence[Column]) -> list[float]:
        """How many times the time of ours a system takes, column by column."""
        ours = self.ours
        if ours is None:
            return []
        return [
            tpot(self.cells[system, column]) / tpot(self.cells[ours, column])
            for column in columns
            if (system, column) in self.cells and (ours, column) in self.cells
        ]

    def ranks(self, columns: Sequence[Column]) -> list[int]:
        """The places of ours in columns that have several systems."""
        if (ours := self.ours) is None:
            return []
        return [rank[0] for column in columns if (rank := self.rank(ours, column)) is not None and rank[1] > 1]

    def is_bound(self, system: str) -> bool:
        """Whether a system knows the future."""
        return any(name == system and is_bound(row) for (name, _), row in self.cells.items())

    def headline(self) -> list[str]:
        """What the figures come to, in a few sentences."""
        said: list[str] = []
        baselines = [name for name in self.systems if name != self.ours and not self.is_bound(name)]
        for name in baselines:
            if ratios := self.ratios(name, self.columns):
                said.append(f"{span(ratios)} the speed of {name}")
        if ranks := self.ranks(self.columns):
            of = f"{ranks.count(1)} of {len(ranks)} comparison{'s' * (len(ranks) > 1)}"
            said.append(f"fastest of those that speculate in {of}")
        bounds = [
            1 / ratio for name in self.systems if self.is_bound(name) for ratio in self.ratios(name, self.columns)
        ]
        if bounds:
            said.append(f"{span(bounds)} the time of the oracle")
        return said


def is_bound(row: Row) -> bool:
    """Whether a row knows the future."""
    return _BOUND in row["prefetch"].split("+")


def tpot(row: Row) -> float:
    """Median seconds per output token."""
    return float(row["tpot_seconds"]["median"])


def tokens_per_step(row: Row) -> float:
    """Tokens that a step yields."""
    return float(row["output_tokens"] / max(1, row["steps"]))


def floor(row: Row) -> float:
    """Seconds per output token of a perfect pipeline that moves the same useful bytes."""
    return float(row["ideal_step_seconds"] / tokens_per_step(row))


def resident_floor(row: Row) -> float:
    """Seconds per output token with every expert in a slot."""
    return float(row["all_resident_step_seconds"]) / tokens_per_step(row)


def milliseconds(seconds: float) -> str:
    """With as many digits as can be told apart."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 1000 else f"{value:.0f} ms"


def span(ratios: Sequence[float]) -> str:
    """From the least to the greatest."""
    low, high = min(ratios), max(ratios)
    return f"{low:.2f}x" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}x to {high:.2f}x"
