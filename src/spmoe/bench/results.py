"""Result files: JSON lines that `spmoe bench --json` writes and `spmoe report` reads, without torch.

A file contains one group of lines per workload: a record of type "machine" (machine and workload), then one record of
type "configuration" for each configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmoe.errors import UsageError
from spmoe.files import write_text

FORMAT = 3  # version of the records
_HINT = "result files are written by `spmoe bench --json`"


@dataclass(frozen=True)
class WorkloadResults:
    """Results of one workload on one machine."""

    machine: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)  # one per configuration

    def to_lines(self) -> str:
        """Return the records as JSON lines."""
        return "".join(json.dumps(record) + "\n" for record in (self.machine, *self.rows))


def read_results(path: Path) -> list[WorkloadResults]:
    """Read a file; raise UsageError with the number of the first line that is not a result."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; {_HINT}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    found: list[WorkloadResults] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            _add_record(line, f"line {number} of {path}", found)
    if not found:
        raise UsageError(f"{path} contains no results; run `spmoe bench --json {path}`")
    return found


def _add_record(line: str, where: str, found: list[WorkloadResults]) -> None:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON; {_HINT}") from error
    kind = record.get("type") if isinstance(record, dict) else None
    if kind == "machine":
        if record.get("format") != FORMAT:
            raise UsageError(
                f"{where} has result format {record.get('format')}, and this version of spmoe reads format {FORMAT}; "
                "run the benchmark again"
            )
        found.append(WorkloadResults(record))
    elif kind == "configuration" and found:
        found[-1].rows.append(record)
    else:
        raise UsageError(f"{where} is not a result; {_HINT}")


def write_results(path: Path, results: Iterable[WorkloadResults]) -> None:
    """Write a file; if that fails, an existing file stays as it is."""
    write_text(path, "".join(one.to_lines() for one in results))
