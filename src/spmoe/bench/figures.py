"""Figures of a benchmark: what its runs come to, configuration by configuration, and whether they wrote the same.

Only what comes after the first token counts, except for the time until that. The pipeline's efficiency is the step that
the machine could do at best, over the one that was measured:

    max( useful bytes / link bandwidth ,  step with every expert in a slot )  /  step

where useful bytes are those of experts that were moved and used: wasted ones make a step longer, not a better one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy

from spmoe.bench.ceilings import machine
from spmoe.bench.results import FORMAT
from spmoe.bench.runs import Bench, Job, ResidentStep, Run
from spmoe.bench.settings import Setting
from spmoe.config import DraftTokens
from spmoe.models.shipped import shipped_pair
from spmoe.observe.ledger import Counters


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the tokens of two runs of one prompt part."""

    settings: tuple[Setting, Setting]
    prompt: int
    position: int

    def __str__(self) -> str:
        first, second = self.settings
        return f"{second} differs from {first} on prompt {self.prompt + 1}, from token {self.position + 1} on"


class Totals:
    """Sums over the decoding part of some runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        stats = [run.completion.stats for run in runs]
        decoded = [one.decode_counters for one in stats]
        self.seconds = sum(one.decode_seconds for one in stats)
        self.tokens = sum(one.output_tokens - 1 for one in stats)
        self.ledger: dict[str, Any] = {
            f.name: _sum([getattr(one, f.name) for one in decoded]) for f in fields(Counters)
        }
        self.counters = Counters(**self.ledger)
        self.steps = self.counters.steps


def resident_steps(
    runs: Sequence[Run],
    resident: Sequence[Run],
    given: Mapping[DraftTokens, float],
    stored: Mapping[DraftTokens, ResidentStep] | None = None,
) -> dict[DraftTokens, ResidentStep]:
    """By K: as given, as measured (now or before), or what compute took in the runs where it took least."""
    found: dict[DraftTokens, ResidentStep] = {}
    for k in {run.setting.draft_tokens for run in runs}:
        measured = Totals([run for run in resident if run.setting.draft_tokens == k])
        if k in given:
            found[k] = ResidentStep(given[k], "given")
        elif measured.steps:
            found[k] = ResidentStep(measured.seconds / measured.steps, "measured", _host_seconds(resident, k))
        elif stored is not None and k in stored:
            found[k] = stored[k]
        else:
            groups = by_setting(run for run in runs if run.setting.draft_tokens == k)
            found[k] = ResidentStep(min(_compute_seconds(Totals(group)) for group in groups.values()), "estimated")
    return found


def by_setting(runs: Iterable[Run]) -> dict[Setting, list[Run]]:
    """Runs of each configuration, in the order in which they were made."""
    groups: dict[Setting, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def case_of(job: Job) -> dict[str, Any]:
    """What all of a job's configurations have in common, and nothing that is only known later."""
    model, draft = job.engine["model"], job.engine["draft"]
    ships = (model, draft) == shipped_pair()
    return {
        "model": "the pair that ships" if ships else model,
        "draft": None if ships else draft,
        **{name: job.engine.get(name) for name in ("shape", "link_gbps", "enforce_eager")},
        "asked": {name: job.engine.get(name) for name in ("dtype", "device", "projection")},
        "prompts": len(job.prompts),
        "prompt_tokens": [len(prompt) for prompt in job.prompts],
        "output_len": job.output_len,
        "warmup": job.warmup,
        **job.labels,
    }


def machine_record(bench: Bench) -> dict[str, Any]:
    """Where, on what, and how it was measured."""
    job, facts = bench.job, bench.facts
    if bench.stored is not None:
        return {**bench.stored.machine, "repeat": job.repeat, "command": job.labels.get("command")}
    if facts is None:
        raise ValueError("nothing was loaded")
    ceilings = facts.ceilings
    return {
        "type": "machine",
        "format": FORMAT,
        **machine(facts.device),
        "link_bytes_per_second": ceilings.link,
        "link_source": ceilings.link_source,
        "memory_bytes_per_second": ceilings.memory,
        "active_bytes": facts.active_bytes,  # weights that one row of the target reads; a token takes at least as long
        "active_read_seconds": facts.active_bytes / ceilings.memory,
        "draft_bytes": facts.draft_bytes,
        "draft_read_seconds": facts.draft_bytes / ceilings.memory,
        **case_of(job),
        "dtype": str(facts.dtype).removeprefix("torch."),
        "expert_bytes": facts.store.layout.nbytes,
        "experts": facts.store.count,
        "layers": len(facts.store.experts),
        "top_k": facts.top_k,
        "repeat": job.repeat,
    }


def records(bench: Bench) -> list[dict[str, Any]]:
    """One record per configuration that has run, in the order asked for."""
    if not bench.runs or (bench.facts is None and bench.stored is None):
        return []
    stored = bench.stored.resident if bench.stored is not None else None
    groups = by_setting(bench.runs)
    residents = resident_steps(bench.runs, bench.resident, bench.job.resident, stored)
    link: float = machine_record(bench)["link_bytes_per_second"]
    order = {id(run): number for number, run in enumerate(bench.runs)}
    settings = [setting for setting in bench.job.settings if setting in groups]
    by_row = [run for setting in settings for run in groups[setting]]  # what the first row wrote is the reference
    found: list[dict[str, Any]] = []
    for setting in settings:
        runs, k = groups[setting], setting.draft_tokens
        same_k = [run for run in by_row if run.setting.draft_tokens == k]
        # each chooses lengths of its own, so that steps of one say nothing of another's
        resident = residents[k] if k != "auto" else ResidentStep(_compute_seconds(Totals(runs)), "estimated")
        found.append(
            {
                "type": "configuration",
                **figures(runs, resident, link),
                **sameness(runs, by_row, same_k),
                "samples": [{"order": order[id(run)], **sample_of(run)} for run in runs],
            }
        )
    return found


def figures(runs: Sequence[Run], resident: ResidentStep, link: float) -> dict[str, Any]:
    """The figures of one configuration; `link` in bytes per second."""
    last, all_of = runs[-1].completion.stats, Totals(runs)
    c, steps = all_of.counters, max(1, all_of.steps)
    moved, useful = c.demand_bytes + c.issued_bytes, c.demand_bytes + c.used_bytes
    step = all_of.seconds / steps
    ideal = max(useful / steps / link, resident.seconds)
    settled = c.used_bytes + c.wasted_bytes + c.failed_bytes
    return {
        **runs[0].setting.record,
        "slots": last.slots,
        "cutoff_layers": last.cutoff_layers,
        "layers": last.layers,
        "runs": len(runs),
        "tpot_seconds": _spread([run.completion.stats.tpot_seconds or 0.0 for run in runs]),
        "ttft_seconds": _spread([run.completion.stats.ttft_seconds for run in runs]),
        "tokens_per_second": all_of.tokens / all_of.seconds if all_of.seconds else None,
        "output_tokens": all_of.tokens,
        "steps": all_of.steps,
        "mean_acceptance_length": 1 + c.accepted / c.verified if c.verified else None,
        "acceptance_by_position": c.acceptance_by_position,
        "hit_rate": c.hit_rate,
        "bytes_moved_per_token": moved / max(1, all_of.tokens),
        "bytes_moved_per_step": moved / steps,
        "useful_bytes_per_step": useful / steps,
        "link_bytes_per_second": moved / all_of.seconds if all_of.seconds else None,
        "prefetch_used_share": c.used_bytes / settled if settled else None,
        "prefetch_late_share": c.late_bytes / settled if settled else None,
        "prefetch_wasted_share": c.wasted_bytes / settled if settled else None,
        "step_seconds": step,
        "stall_seconds_per_step": c.stall_seconds / steps,
        "draft_seconds_per_step": c.draft_seconds / steps,
        "verify_seconds_per_step": c.verify_seconds / steps,
        "all_resident_step_seconds": resident.seconds,
        "resident_source": resident.source,
        "host_seconds_per_layer": None if resident.host_seconds is None else resident.host_seconds / last.layers,
        "ideal_step_seconds": ideal,
        "pipeline_efficiency": ideal / step if step else None,
        "ledger": all_of.ledger,
    }


def differences(runs: Sequence[Run], reference: Sequence[Run]) -> list[Difference]:
    """Where runs wrote something else than the first run of their prompt in the reference, prompt by prompt."""
    expected: dict[int, Run] = {}
    for run in reference:
        expected.setdefault(run.prompt, run)
    found: dict[int, Difference] = {}
    for run in runs:
        if (other := expected.get(run.prompt)) is None:
            continue
        ours, theirs = run.completion.token_ids, other.completion.token_ids
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))
            if run.prompt not in found or at < found[run.prompt].position:
                found[run.prompt] = Difference((other.setting, run.setting), run.prompt, at)
    return list(found.values())


def sameness(runs: Sequence[Run], reference: Sequence[Run], same_k: Sequence[Run]) -> dict[str, Any]:
    """For which share of prompts the tokens are those of the reference, and of those with this K; where they part.

    Forwards of other sizes may round otherwise, so that in a short dtype only those with the same K must agree.
    """
    prompts = {run.prompt for run in runs}
    parted, parted_at_k = differences(runs, reference), differences(runs, same_k)
    return {
        "identical_share": 1 - len(parted) / len(prompts),
        "first_divergence": min((one.position for one in parted), default=None),
        "identical_share_same_k": 1 - len(parted_at_k) / len(prompts),
        "first_divergence_same_k": min((one.position for one in parted_at_k), default=None),
        "differs": str(parted[0]) if parted else None,
    }


def _host_seconds(resident: Sequence[Run], k: DraftTokens) -> float | None:
    """Seconds of an all-resident step outside of recorded forwards; None where none were recorded."""
    runs = [run for run in resident if run.setting.draft_tokens == k and run.device_seconds is not None]
    totals = Totals(runs)
    if not totals.steps:
        return None
    return (totals.seconds - sum(run.device_seconds or 0.0 for run in runs)) / totals.steps


def _compute_seconds(totals: Totals) -> float:
    """Seconds of a step that compute did not wait."""
    c = totals.counters
    return max(0.0, c.draft_seconds + c.verify_seconds - c.stall_seconds) / max(1, totals.steps)


def sample_of(run: Run) -> dict[str, Any]:
    """All that is needed of one run to make its part of the figures again."""
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
        "ledger": {name: value for name, value in asdict(decoded).items() if value},
        "tokens": run.completion.token_ids,
    }


def _sum(values: Sequence[Any]) -> Any:
    """A total; of lists, place by place."""
    if values and isinstance(values[0], list):
        return [sum(column) for column in zip_longest(*values, fillvalue=0)]
    return sum(values)


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = (float(value) for value in numpy.quantile(values, [0.1, 0.5, 0.9]))
    return {"median": middle, "p10": low, "p90": high, "min": min(values), "max": max(values)}
