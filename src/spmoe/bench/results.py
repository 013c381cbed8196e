"""Results as JSON lines: written so that a report can be made of them later, read without anything that computes.

A file holds groups: a record of the machine and the case, then one for each configuration that was run on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmoe.errors import UsageError
from spmoe.files import write_text

FORMAT = 2  # of the records


@dataclass(frozen=True)
class Group:
    """What was measured of one case, on one machine."""

    machine: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def lines(self) -> str:
        """As it is stored."""
        return "".join(json.dumps(record) + "\n" for record in (self.machine, *self.rows))


def read_results(path: Path) -> list[Group]:
    """The groups of a file; a line that is none of ours is refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text, so it holds no results of `spmoe bench --json`") from error
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    groups: list[Group] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            _take(line, f"line {number} of {path}", groups)
    if not groups:
        raise UsageError(f"{path} holds no results; make some with `spmoe bench --json {path}`")
    return groups


def _take(line: str, where: str, groups: list[Group]) -> None:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON; results are what `spmoe bench --json` writes") from error
    kind = record.get("type") if isinstance(record, dict) else None
    if kind == "machine":
        if record.get("format") != FORMAT:
            raise UsageError(f"{where} is of another version of spmoe; measure again with this one")
        groups.append(Group(record))
    elif kind == "configuration" and groups:
        groups[-1].rows.append(record)
    else:
        raise UsageError(f"{where} is no result; results are what `spmoe bench --json` writes")


def write_results(path: Path, groups: Iterable[Group]) -> None:
    """Write them to a file, whose earlier contents stay where that fails."""
    write_text(path, "".join(group.lines() for group in groups))
