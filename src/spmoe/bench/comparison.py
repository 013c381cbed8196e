"""Comparisons: what stored results say of systems against each other, for a page or for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from spmoe.bench.results import Group
from spmoe.bench.settings import ALL_ON

Row = dict[str, Any]
PLAIN = "plain decoding (K=0)"
_BOUND = "oracle"  # the policy that knows what will be needed: what the others are measured by, not one of them
_OURS = "draft-gate"


@dataclass(frozen=True, slots=True)
class Column:
    """Where systems meet on the same terms."""

    case: str
    memory: str
    draft_tokens: int

    @property
    def within(self) -> str:
        """Its name among the columns of its case."""
        return f"{self.memory}, K={self.draft_tokens}"

    def __str__(self) -> str:
        return f"{self.case}, {self.within}" if self.case else self.within


class Comparison:
    """Systems by columns, one row of figures for each pair that was measured."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.cases = case_names(groups)
        self._named = any(row["system"] for group in groups for row in group.rows)
        self._evictions = {row["eviction"] for group in groups for row in group.rows}
        self.cells: dict[tuple[str, Column], Row] = {}
        for case, row in self.main_rows():
            if row["num_speculative_tokens"]:
                column = Column(case, row["expert_memory"], row["num_speculative_tokens"])
                self.cells.setdefault((self.system(row), column), row)
        plain = {(case, row["expert_memory"]): row for case, row in self.main_rows() if self.system(row) == PLAIN}
        for column in self.columns:
            if (column.case, column.memory) in plain:
                self.cells[PLAIN, column] = plain[column.case, column.memory]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every row, with the name of its case."""
        for case, group in zip(self.cases, self.groups, strict=True):
            yield from ((case, row) for row in group.rows)

    def main_rows(self) -> list[tuple[str, Row]]:
        """Those that compare systems: no part switched off, no cutoff swept, where there is anything to compare."""
        whole = [(case, row) for case, row in self.rows() if row["ablation"] in (None, ALL_ON)]
        whole = [(case, row) for case, row in whole if not row["cutoff"].isdecimal()] or whole
        systems: dict[str, set[str]] = {}
        for case, row in whole:
            systems.setdefault(case, set()).add(self.system(row))
        return [(case, row) for case, row in whole if len(systems[case]) > 1] or whole

    def system(self, row: Row) -> str:
        """What a row's way of prefetching is called."""
        if row["system"] is not None:
            return str(row["system"])
        if not row["num_speculative_tokens"] and row["prefetch"] == "on-demand":
            return PLAIN
        several = len(self._evictions) > 1 and not self._named
        return f"{row['prefetch']} / {row['eviction']}" if several else str(row["prefetch"])

    @property
    def columns(self) -> list[Column]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(column for _, column in self.cells))

    @property
    def systems(self) -> list[str]:
        """By their median TPOT over the columns, the fastest first; the bound on top, plain decoding last."""
        names = list(dict.fromkeys(name for name, _ in self.cells))

        def key(name: str) -> tuple[bool, bool, float]:
            rows = [row for (system, _), row in self.cells.items() if system == name]
            ratios = [tpot(row) / self.best(column) for (system, column), row in self.cells.items() if system == name]
            return name == PLAIN, not is_bound(rows[0]), median(ratios)

        return sorted(names, key=key)

    @property
    def ours(self) -> str | None:
        """The system that this project is about, if it was measured."""
        by_name = {name: row for (name, _), row in self.cells.items()}
        if "SP-MoE" in by_name:
            return "SP-MoE"
        exact = [name for name, row in by_name.items() if row["prefetch"] == _OURS]
        return next(iter(exact), None)

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
            if other == column and name not in (system, PLAIN) and not is_bound(row)
        ]
        return 1 + sum(time < own for time in others), 1 + len(others)

    def bound(self, column: Column) -> Row | None:
        """The oracle's row of a column, if it was measured."""
        return next((row for (_, other), row in self.cells.items() if other == column and is_bound(row)), None)

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


def case_names(groups: Sequence[Group]) -> list[str]:
    """What tells each group from the others, as short as can be; nothing where there is one."""
    parts = [_parts(group.machine) for group in groups]
    varying = [name for name in parts[0] if len({one[name] for one in parts}) > 1] if parts else []
    if len({tuple(one[name] for name in varying if name != "commit") for one in parts}) == len(parts):
        varying = [name for name in varying if name != "commit"]  # which nobody can remember
    return [", ".join(one[name] for name in varying if one[name]) for one in parts]


def model_name(machine: Row) -> str:
    """The model, without the way to it on somebody's disk."""
    name = str(machine["shape"] or machine["model"])
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def _parts(machine: Row) -> dict[str, str]:
    link = machine["link_gbps"]
    draft = machine["draft"]
    return {
        "scenario": str(machine.get("scenario") or ""),
        "matrix": str(machine.get("matrix") or ""),
        "model": model_name(machine),
        "draft": "" if draft is None else f"draft {Path(draft).name}",
        "link": "own link" if link is None else f"{link:g} GB/s",
        "prompts": f"{machine.get('prompt_set')}",
        "device": str(machine["device"]),
        "commit": str(machine["commit"])[:10],
    }


def span(ratios: Sequence[float]) -> str:
    """From the least to the greatest."""
    low, high = min(ratios), max(ratios)
    return f"{low:.2f}x" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}x to {high:.2f}x"
