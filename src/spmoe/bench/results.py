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
    """Replace a file at once, so that nothing is lost where writing fails."""
    beside = path.with_name(f".{path.name}.part")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_text("".join(group.lines() for group in groups), encoding="utf-8")
            return
        beside.write_text("".join(group.lines() for group in groups), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path} ({error.strerror}); choose another file") from error
