"""Result files: JSON lines that `spmoe bench --json` writes and `spmoe report` reads, without torch.

A file contains one group of lines per workload: a record of type "machine" (machine and workload), then one record of
type "configuration" for each configuration. Records are checked when they are read, as a file may come from anywhere;
fields that later versions added may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from spmoe.bench.step_timeline import StepTimeline
from spmoe.errors import UsageError
from spmoe.files import decode_json, write_text

FORMAT = 3  # version of the records
_HINT = "result files are written by `spmoe bench --json`"


_Number = Annotated[FiniteFloat, Field(ge=0, le=1e18)]
_Positive = Annotated[FiniteFloat, Field(gt=0, le=1e18)]
_Count = Annotated[int, Field(ge=0, le=10**15)]


class _Record(BaseModel):
    """Fields of a record that reports need; others are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Machine(_Record):
    device: str
    driver: str | None
    device_memory_bytes: _Count | None
    processor: str
    platform: str
    python: str
    torch: str
    transformers: str
    spmoe: str
    commit: str | None
    date: str | None = None
    cores: _Count | None = None
    usable_cores: _Count | None = None
    threads: _Count | None = None
    memory_bytes: _Count | None = None
    link_bytes_per_second: _Positive
    link_source: str
    memory_bytes_per_second: _Positive
    active_read_seconds: _Number
    draft_read_seconds: _Number
    model: str
    draft: str | None
    shape: str | None
    weights: str | None = None  # "random" with --load-format dummy
    weights_note: str | None = None
    link_gbps: _Positive | None
    enforce_eager: bool | None
    prompts: _Count
    output_len: _Count
    warmup: _Count
    repeat: _Count
    dtype: str
    expert_format: str | None = None
    lossless: bool = True
    expert_bytes: _Count
    experts: _Count
    layers: _Count
    top_k: _Count


class _Distribution(_Record):
    median: _Positive
    p10: _Positive
    p90: _Positive
    min: _Positive
    max: _Positive


class _Counters(_Record):
    hits: _Count
    late: _Count
    demand_loads: _Count
    demand_bytes: _Count
    used_bytes: _Count
    late_bytes: _Count
    wasted_bytes: _Count


class _Sample(_Record):
    prompt: _Count
    repeat: _Count
    tpot_seconds: _Number | None
    timeline: dict[str, Any] | None = None

    @field_validator("timeline")
    @classmethod
    def _check(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            StepTimeline.from_record(value)
        return value


class _Configuration(_Record):
    expert_memory: str
    prefetch: str
    num_speculative_tokens: Annotated[int, Field(ge=0, le=10**6)] | Literal["auto"]
    eviction: str
    cutoff: Annotated[str, Field(max_length=20)]
    batching: bool
    overlap: bool
    system: str | None
    ablation: str | None
    slots: _Count
    cutoff_layers: _Count | None
    layers: _Count
    runs: _Count
    tpot_seconds: _Distribution
    output_tokens: Annotated[int, Field(ge=1, le=10**15)]
    steps: _Count
    mean_acceptance_length: _Number | None
    acceptance_by_position: list[_Number]
    hit_rate: _Number | None
    bytes_moved_per_token: _Number
    useful_bytes_per_step: _Number
    step_seconds: _Number
    stall_seconds_per_step: _Number
    draft_seconds_per_step: _Number
    verify_seconds_per_step: _Number
    all_resident_step_seconds: _Number
    all_resident_source: str
    ideal_step_seconds: _Number
    pipeline_efficiency: _Number | None
    identical_share: _Number
    counters: _Counters
    samples: list[_Sample] = []


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
        record = decode_json(line)
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
        if not found[-1].rows:
            _check(_Machine, found[-1].machine, f"the machine record before {where}")
        _check(_Configuration, record, where)
        found[-1].rows.append(record)
    else:
        raise UsageError(f"{where} is not a result; {_HINT}")


def _check(model: type[_Record], record: dict[str, Any], where: str) -> None:
    """Raise UsageError with the first field that is missing or not of its type."""
    try:
        model.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{where} is not a result ({name}: {first['msg']}); {_HINT}") from error


def write_results(path: Path, results: Iterable[WorkloadResults]) -> None:
    """Write a file; if that fails, an existing file stays as it is."""
    write_text(path, "".join(one.to_lines() for one in results))
