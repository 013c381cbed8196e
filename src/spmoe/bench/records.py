"""Metrics of benchmark runs as JSON records, and runs restored from such records.

Metrics count decoding only: everything after the first token, except TTFT. Pipeline efficiency is the best step that
the machine allows over the measured one:

    max( useful bytes / link bandwidth ,  step with all experts in slots )  /  step

Useful bytes belong to experts that were moved and then used; wasted copies make a step longer but not a better one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy

from spmoe.bench.configs import BenchConfig
from spmoe.bench.results import FORMAT, WorkloadResults
from spmoe.bench.runs import BenchJob, BenchRun, BenchRunner, ResidentStep, StoredRuns
from spmoe.bench.step_timeline import StepTimeline
from spmoe.config import AUTO_DRAFT, RANDOM_WEIGHTS_NOTE, DraftTokens, default_draft
from spmoe.engine.outputs import CompletionOutput, RequestOutput
from spmoe.engine.stats import Stats
from spmoe.formats.layout import dtype_name
from spmoe.models.shipped import shipped_pair
from spmoe.observe.ledger import Counters

_USUAL = {"expert_format": "auto", "cpu_experts": "off", "residency_check": "auto"}  # named if they are others
_MAY_DIFFER = ("command", "scenario_text")  # labels that do not identify a workload

# ---- records


def make_results(runner: BenchRunner, interrupted: bool) -> WorkloadResults | None:
    """Return the results of a runner so far, with stored rows of other configurations; None before the first run."""
    if not (rows := config_records(runner)):
        return None
    other_rows = runner.stored.other_rows if runner.stored is not None else []
    return WorkloadResults({**machine_record(runner), "interrupted": interrupted}, [*rows, *other_rows])


def workload_record(job: BenchJob) -> dict[str, Any]:
    """Return the fields that all configurations of a job share and that are known before it runs."""
    model, draft = job.engine["model"], job.engine["draft"]
    draft = default_draft(model) if draft == AUTO_DRAFT else draft
    shipped, random_weights = (model, draft) == shipped_pair(), job.engine.get("load_format") == "dummy"
    return {
        "model": "shipped pair" if shipped else model,
        "draft": None if shipped else draft,
        **{name: job.engine.get(name) for name in ("shape", "link_gbps", "enforce_eager")},
        "weights": "random" if random_weights else "checkpoint",
        "weights_note": RANDOM_WEIGHTS_NOTE if random_weights else None,
        "requested": {name: job.engine.get(name) for name in ("dtype", "device", "projection")}
        | {name: job.engine[name] for name, usual in _USUAL.items() if job.engine.get(name, usual) != usual},
        "prompts": len(job.prompts),
        "prompt_tokens": [len(prompt) for prompt in job.prompts],
        "output_len": job.output_len,
        "warmup": job.warmup,
        **job.labels,
    }


def machine_record(runner: BenchRunner) -> dict[str, Any]:
    """Return the record of type "machine": machine, software, model and workload."""
    job, facts = runner.job, runner.facts
    if runner.stored is not None:
        return {**runner.stored.machine, "repeat": job.repeat, "command": job.labels.get("command")}
    if facts is None:
        raise ValueError("no engine was loaded")
    ceilings = facts.ceilings
    return {
        "type": "machine",
        "format": FORMAT,
        **facts.machine,
        "link_bytes_per_second": ceilings.link,
        "link_source": ceilings.link_source,
        "memory_bytes_per_second": ceilings.memory,
        "active_bytes": facts.active_bytes,
        "active_read_seconds": facts.active_bytes / ceilings.memory,  # lower bound on the time of a token
        "draft_bytes": facts.draft_bytes,
        "draft_read_seconds": facts.draft_bytes / ceilings.memory,
        **workload_record(job),
        "dtype": dtype_name(facts.dtype),
        "expert_format": facts.expert_format,
        "lossless": facts.lossless,
        "expert_bytes": facts.store.layout.nbytes,
        "experts": facts.store.count,
        "layers": len(facts.store.experts),
        "top_k": facts.top_k,
        "repeat": job.repeat,
    }


def config_records(runner: BenchRunner) -> list[dict[str, Any]]:
    """Return one record of type "configuration" for each configuration that has run, in the order of the job."""
    if not runner.runs or (runner.facts is None and runner.stored is None):
        return []
    stored = runner.stored.resident if runner.stored is not None else {}
    by_config = group_by_config(runner.runs)
    resident_steps = find_resident_steps(runner.runs, runner.resident_runs, runner.job.resident, stored)
    link: float = machine_record(runner)["link_bytes_per_second"]
    order = {id(run): number for number, run in enumerate(runner.runs)}
    configs = [config for config in runner.job.configs if config in by_config]
    in_table_order = [run for config in configs for run in by_config[config]]  # the first row is the reference
    found: list[dict[str, Any]] = []
    for config in configs:
        runs, k = by_config[config], config.draft_tokens
        same_k = [run for run in in_table_order if run.config.draft_tokens == k]
        # with auto, each configuration has steps of its own lengths, so that only its own can be compared with
        resident = resident_steps[k] if k != "auto" else ResidentStep(_compute_seconds(Totals(runs)), "estimated")
        found.append(
            {
                "type": "configuration",
                **metrics(runs, resident, link),
                **compare_tokens(runs, in_table_order, same_k),
                "samples": [{"order": order[id(run)], **_sample(run)} for run in runs],
            }
        )
    return found


def metrics(runs: Sequence[BenchRun], resident: ResidentStep, link: float) -> dict[str, Any]:
    """Return the metrics of one configuration; `link` in bytes per second."""
    last, totals = runs[-1].completion.stats, Totals(runs)
    c, steps = totals.counters, max(1, totals.steps)
    moved, useful = c.demand_bytes + c.issued_bytes, c.demand_bytes + c.used_bytes
    step = totals.seconds / steps
    ideal = max(useful / steps / link, resident.seconds)
    finished = c.used_bytes + c.wasted_bytes + c.failed_bytes
    return {
        **runs[0].config.record,
        "slots": last.slots,
        "cutoff_layers": last.cutoff_layers,
        "layers": last.layers,
        "runs": len(runs),
        "tpot_seconds": _distribution([run.completion.stats.tpot_seconds or 0.0 for run in runs]),
        "ttft_seconds": _distribution([run.completion.stats.ttft_seconds for run in runs]),
        "tokens_per_second": totals.tokens / totals.seconds if totals.seconds else None,
        "output_tokens": totals.tokens,
        "steps": totals.steps,
        "mean_acceptance_length": 1 + c.accepted / c.verified if c.verified else None,
        "acceptance_by_position": c.acceptance_by_position,
        "hit_rate": c.hit_rate,
        "bytes_moved_per_token": moved / max(1, totals.tokens),
        "bytes_moved_per_step": moved / steps,
        "useful_bytes_per_step": useful / steps,
        "link_bytes_per_second": moved / totals.seconds if totals.seconds else None,
        "prefetch_used_share": c.used_bytes / finished if finished else None,
        "prefetch_late_share": c.late_bytes / finished if finished else None,
        "prefetch_wasted_share": c.wasted_bytes / finished if finished else None,
        "step_seconds": step,
        "stall_seconds_per_step": c.stall_seconds / steps,
        "draft_seconds_per_step": c.draft_seconds / steps,
        "verify_seconds_per_step": c.verify_seconds / steps,
        "all_resident_step_seconds": resident.seconds,
        "all_resident_source": resident.source,
        "host_seconds_per_layer": None if resident.host_seconds is None else resident.host_seconds / last.layers,
        "ideal_step_seconds": ideal,
        "pipeline_efficiency": ideal / step if step else None,
        "counters": totals.values,
    }


class Totals:
    """Sums over the decoding part of runs."""

    def __init__(self, runs: Sequence[BenchRun]) -> None:
        stats = [run.completion.stats for run in runs]
        decoded = [one.decode_counters for one in stats]
        self.seconds = sum(one.decode_seconds for one in stats)
        self.tokens = sum(one.output_tokens - 1 for one in stats)
        self.values: dict[str, Any] = {
            f.name: _sum([getattr(one, f.name) for one in decoded]) for f in fields(Counters)
        }
        self.counters = Counters(**self.values)
        self.steps = self.counters.steps


def group_by_config(runs: Iterable[BenchRun]) -> dict[BenchConfig, list[BenchRun]]:
    """Return the runs of each configuration, in the order in which they were made."""
    groups: dict[BenchConfig, list[BenchRun]] = {}
    for run in runs:
        groups.setdefault(run.config, []).append(run)
    return groups


def find_resident_steps(
    runs: Sequence[BenchRun],
    resident_runs: Sequence[BenchRun],
    given: Mapping[DraftTokens, float],
    stored: Mapping[DraftTokens, ResidentStep],
) -> dict[DraftTokens, ResidentStep]:
    """Return the all-resident step by K: given, measured (now or before), or the least compute time of any run."""
    found: dict[DraftTokens, ResidentStep] = {}
    for k in {run.config.draft_tokens for run in runs}:
        measured = Totals([run for run in resident_runs if run.config.draft_tokens == k])
        if k in given:
            found[k] = ResidentStep(given[k], "given")
        elif measured.steps:
            found[k] = ResidentStep(measured.seconds / measured.steps, "measured", _host_seconds(resident_runs, k))
        elif k in stored:
            found[k] = stored[k]
        else:
            groups = group_by_config(run for run in runs if run.config.draft_tokens == k)
            found[k] = ResidentStep(min(_compute_seconds(Totals(group)) for group in groups.values()), "estimated")
    return found


def _host_seconds(resident_runs: Sequence[BenchRun], k: DraftTokens) -> float | None:
    """Return seconds of an all-resident step outside of CUDA graphs; None if none were captured."""
    runs = [run for run in resident_runs if run.config.draft_tokens == k and run.graph_seconds is not None]
    totals = Totals(runs)
    if not totals.steps:
        return None
    return (totals.seconds - sum(run.graph_seconds or 0.0 for run in runs)) / totals.steps


def _compute_seconds(totals: Totals) -> float:
    """Return seconds of a step without stalls."""
    c = totals.counters
    return max(0.0, c.draft_seconds + c.verify_seconds - c.stall_seconds) / max(1, totals.steps)


def _sample(run: BenchRun) -> dict[str, Any]:
    """Return everything that is needed to restore one run."""
    stats, decoded = run.completion.stats, run.completion.stats.decode_counters
    return {
        "prompt": run.prompt,
        "repeat": run.repeat,
        "ttft_seconds": stats.ttft_seconds,
        "tpot_seconds": stats.tpot_seconds,
        "latency_seconds": stats.latency_seconds,
        "steps": decoded.steps,
        "bytes_moved": decoded.demand_bytes + decoded.issued_bytes,
        "cutoff_layers": stats.cutoff_layers,
        "counters": {name: value for name, value in asdict(decoded).items() if value},
        "tokens": run.completion.token_ids,
        **({"timeline": run.timeline.to_record()} if run.timeline is not None else {}),
    }


def _sum(values: Sequence[Any]) -> Any:
    """Add numbers, or lists position by position."""
    if values and isinstance(values[0], list):
        return [sum(column) for column in zip_longest(*values, fillvalue=0)]
    return sum(values)


def _distribution(values: list[float]) -> dict[str, float]:
    low, middle, high = (float(value) for value in numpy.quantile(values, [0.1, 0.5, 0.9]))
    return {"median": middle, "p10": low, "p90": high, "min": min(values), "max": max(values)}


# ---- comparison of tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """First position at which two runs of one prompt have different tokens."""

    configs: tuple[BenchConfig, BenchConfig]
    prompt: int  # index
    position: int  # index of the token

    def __str__(self) -> str:
        first, second = self.configs
        return f"{second} differs from {first} on prompt {self.prompt + 1}, from token {self.position + 1} on"


def find_differences(runs: Sequence[BenchRun], reference: Sequence[BenchRun]) -> list[Difference]:
    """Compare runs with the first reference run of their prompt; return the earliest difference of each prompt."""
    expected: dict[int, BenchRun] = {}
    for run in reference:
        expected.setdefault(run.prompt, run)
    found: dict[int, Difference] = {}
    for run in runs:
        if (other := expected.get(run.prompt)) is None:
            continue
        tokens, other_tokens = run.completion.token_ids, other.completion.token_ids
        if tokens != other_tokens:
            pairs = enumerate(zip(tokens, other_tokens, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), len(other_tokens))
            if run.prompt not in found or position < found[run.prompt].position:
                found[run.prompt] = Difference((other.config, run.config), run.prompt, position)
    return list(found.values())


def compare_tokens(
    runs: Sequence[BenchRun], reference: Sequence[BenchRun], same_k: Sequence[BenchRun]
) -> dict[str, Any]:
    """Return the share of prompts with the tokens of the reference, and of the reference runs with the same K.

    Forwards with different numbers of rows may round differently in 16-bit dtypes, where only runs with the same K
    must agree.
    """
    prompts = {run.prompt for run in runs}
    different, different_same_k = find_differences(runs, reference), find_differences(runs, same_k)
    return {
        "identical_share": 1 - len(different) / len(prompts),
        "first_divergence": min((one.position for one in different), default=None),
        "identical_share_same_k": 1 - len(different_same_k) / len(prompts),
        "first_divergence_same_k": min((one.position for one in different_same_k), default=None),
        "difference": str(different[0]) if different else None,
    }


# ---- restoring runs, for --resume


def find_stored(job: BenchJob, results: Sequence[WorkloadResults]) -> tuple[int, StoredRuns] | None:
    """Return the index of the results of this job's workload, and its runs restored from them."""
    workload = {name: value for name, value in workload_record(job).items() if name not in _MAY_DIFFER}
    for number, one in enumerate(results):
        if all(one.machine.get(name) == value for name, value in json.loads(json.dumps(workload)).items()):
            return number, _restore(job, one)
    return None


def _restore(job: BenchJob, results: WorkloadResults) -> StoredRuns:
    numbered: list[tuple[int, BenchRun]] = []
    resident: dict[DraftTokens, ResidentStep] = {}
    other_rows: list[dict[str, Any]] = []
    for row in results.rows:
        if row["all_resident_source"] == "measured":
            host = row["host_seconds_per_layer"]
            resident[row["num_speculative_tokens"]] = ResidentStep(
                row["all_resident_step_seconds"], "measured", None if host is None else host * row["layers"]
            )
        config = next((one for one in job.configs if one.matches(row)), None)
        if config is None:
            other_rows.append(row)
            continue
        numbered += [(sample["order"], _restore_run(config, row, sample)) for sample in row["samples"]]
    runs = [run for _, run in sorted(numbered, key=lambda one: one[0])]
    return StoredRuns(results.machine, runs, resident, other_rows)


def _restore_run(config: BenchConfig, row: Mapping[str, Any], sample: Mapping[str, Any]) -> BenchRun:
    timeline = StepTimeline.from_record(sample["timeline"]) if sample.get("timeline") is not None else None
    return BenchRun(config, sample["prompt"], sample["repeat"], _restore_completion(row, sample), None, timeline)


def _restore_completion(row: Mapping[str, Any], sample: Mapping[str, Any]) -> RequestOutput:
    """Return a completion with everything that metrics use: the decoding part."""
    known = {one.name for one in fields(Counters)}
    counters = Counters(**{name: value for name, value in sample["counters"].items() if name in known})
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
    return RequestOutput("0", None, [], [CompletionOutput(0, "", sample["tokens"], "length")], True, stats)
