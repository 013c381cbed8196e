"""Benchmarks that are continued: what stored results hold of a job, as runs that need not be made again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from spmoe.bench.figures import case_of
from spmoe.bench.results import Group
from spmoe.bench.runs import Job, ResidentStep, Run, Stored
from spmoe.config import DraftTokens
from spmoe.engine.llm import Completion
from spmoe.engine.stats import Stats
from spmoe.observe.ledger import Counters

_NOT_THE_CASE = ("command", "scenario_text")  # of a job's labels, that may be others when it is continued


def find_stored(job: Job, groups: Sequence[Group]) -> tuple[int, Stored] | None:
    """Which of the groups is of this job, if one is, and what it holds of the job's configurations."""
    case = {name: value for name, value in case_of(job).items() if name not in _NOT_THE_CASE}
    for number, group in enumerate(groups):
        if all(group.machine.get(name) == value for name, value in json.loads(json.dumps(case)).items()):
            return number, _stored(job, group)
    return None


def _stored(job: Job, group: Group) -> Stored:
    numbered: list[tuple[int, Run]] = []
    resident: dict[DraftTokens, ResidentStep] = {}
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
