"""Results as JSON lines: written so that a report can be made of them later, read so that they can be continued.

A file holds groups: a record of the machine and the case, then one for each configuration that was run on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from spmoe.bench.figures import FORMAT, case_of
from spmoe.bench.runs import Job, ResidentStep, Run, Stored
from spmoe.engine.llm import Completion
from spmoe.engine.stats import Stats
from spmoe.errors import UsageError
from spmoe.observe.ledger import Counters

_NOT_THE_CASE = ("command", "scenario_text")  # of a job's labels, that may be others when it is continued


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


def find_stored(job: Job, groups: Sequence[Group]) -> tuple[int, Stored] | None:
    """Which of the groups is of this job, if one is, and what it holds of the job's configurations."""
    case = {name: value for name, value in case_of(job).items() if name not in _NOT_THE_CASE}
    for number, group in enumerate(groups):
        if all(group.machine.get(name) == value for name, value in json.loads(json.dumps(case)).items()):
            return number, _stored(job, group)
    return None


def _stored(job: Job, group: Group) -> Stored:
    numbered: list[tuple[int, Run]] = []
    resident: dict[int, ResidentStep] = {}
    others: list[dict[str, Any]] = []
    for row in group.rows:
        setting = next((one for one in job.settings if one.is_in(row)), None)
        if row["resident_source"] == "measured":
            resident[row["num_speculative_tokens"]] = _resident(row)
        if setting is not None:
            numbered += [
                (sample["order"], Run(setting, sample["prompt"], sample["repeat"], _completion(row, sample)))
                for sample in row["samples"]
            ]
        else:
            others.append(row)
    return Stored(group.machine, [run for _, run in sorted(numbered, key=lambda one: one[0])], resident, others)


def _resident(row: Mapping[str, Any]) -> ResidentStep:
    host = row["host_seconds_per_layer"]
    return ResidentStep(row["all_resident_step_seconds"], "measured", None if host is None else host * row["layers"])


def _completion(row: Mapping[str, Any], sample: Mapping[str, Any]) -> Completion:
    """A run's outcome, as far as figures are made of it: the decoding part."""
    known = {one.name for one in fields(Counters)}
    counters = Counters(**{name: value for name, value in sample["ledger"].items() if name in known})
    stats = Stats(
        prompt_tokens=0,
        output_tokens=len(sample["tokens"]),
        ttft_seconds=sample["ttft_seconds"],
        latency_seconds=sample["latency_seconds"],
        counters=counters,
        prompt_counters=Counters(),
        held_bytes=0,
        slots=row["slots"],
        peak_slots=row["slots"],
        cutoff_layers=sample["cutoff_layers"],
        layers=row["layers"],
        prefetch=row["prefetch"],
        draft_tokens=row["num_speculative_tokens"],
        emulated_link_gbps=None,
    )
    return Completion("", sample["tokens"], "length", stats)
