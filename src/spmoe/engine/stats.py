"""Statistics of one request, as shown after a run and returned as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from spmoe.config import RANDOM_WEIGHTS_NOTE, DraftTokens
from spmoe.observe.ledger import Counters
from spmoe.types import Speculation


@dataclass(frozen=True, slots=True)
class Stats:
    """Times and counters of one request."""

    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float  # time to first token
    latency_seconds: float
    counters: Counters
    prompt_counters: Counters  # the part of `counters` from the first step, which reads the prompt
    held_bytes: int  # experts prefetched by this or an earlier request that are neither used nor evicted yet
    slots: int
    peak_slots: int
    cutoff_layers: int | None  # None: the prefetch policy has no cutoff
    layers: int
    prefetch: str
    draft_tokens: DraftTokens  # K
    emulated_link_gbps: float | None
    speculation: Speculation | None = None  # K as `-k auto` chose it; None: K is fixed
    completions: int = 1  # that have a token at least
    random_weights: bool = False  # weights are not those of a checkpoint: --load-format dummy
    expert_format: str | None = None  # None: not known, of a run that was restored from a file
    lossless: bool = True  # whether experts have the checkpoint's weights, in the run's dtype
    cached_tokens: int = 0  # of the prompt, that were taken from the KV cache of an earlier sequence
    overlap_seconds: float = 0.0  # that completions decoded while others of the request did

    @classmethod
    def combined(cls, parts: Sequence[Stats]) -> Stats:
        """Return the statistics of the completions of one request, which began together."""
        first, *others = parts
        latency = max(part.latency_seconds for part in parts)
        counters, prompt_counters = first.counters, first.prompt_counters
        for part in others:
            counters, prompt_counters = counters.plus(part.counters), prompt_counters.plus(part.prompt_counters)
        return replace(
            parts[-1],
            output_tokens=sum(part.output_tokens for part in parts),
            ttft_seconds=first.ttft_seconds,
            latency_seconds=latency,
            counters=counters,
            prompt_counters=prompt_counters,
            speculation=reduce(_sum, (part.speculation for part in parts)),
            completions=sum(part.output_tokens > 0 for part in parts),
            cached_tokens=first.cached_tokens,
            overlap_seconds=sum(part.decode_seconds for part in parts) - (latency - first.ttft_seconds),
        )

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first of each completion; None if there is no such token."""
        later = self.output_tokens - self.completions
        return self.decode_seconds / later if later > 0 else None

    @property
    def decode_seconds(self) -> float:
        """Time after the first token of each completion; what several decode at once counts for each."""
        return self.latency_seconds - self.ttft_seconds + self.overlap_seconds

    @property
    def decode_counters(self) -> Counters:
        """Counters of the steps after the first."""
        return self.counters.minus(self.prompt_counters)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; counters keep their names."""
        c = self.counters
        return {
            "lossless": self.lossless,
            "expert_format": self.expert_format,
            "weights": "random" if self.random_weights else "checkpoint",
            "weights_note": RANDOM_WEIGHTS_NOTE if self.random_weights else None,
            "link": "emulated" if self.emulated_link_gbps is not None else "real",
            "emulated_link_gbps": self.emulated_link_gbps,
            "prefetch": self.prefetch,
            "num_speculative_tokens": self.draft_tokens,
            "speculation": _speculation_to_dict(self.speculation),
            "cutoff_layers": self.cutoff_layers,
            "layers": self.layers,
            "cached_tokens": self.cached_tokens,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "latency_seconds": self.latency_seconds,
            "steps": c.steps,
            "drafted": c.drafted,
            "accepted": c.accepted,
            "mean_acceptance_length": c.mean_acceptance_length,
            "acceptance_by_position": c.acceptance_by_position,
            "hits": c.hits,
            "late": c.late,
            "demand_loads": c.demand_loads,
            "demand_bytes": c.demand_bytes,
            "hit_rate": c.hit_rate,
            "loads": c.loads,
            "cpu_experts": c.cpu_experts,
            "cpu_bytes": c.cpu_bytes,
            "cpu_seconds": c.cpu_seconds,
            "cpu_wait_seconds": c.cpu_wait_seconds,
            "cpu_copies": c.cpu_copies,
            "cpu_copy_seconds": c.cpu_copy_seconds,
            "cpu_failures": c.cpu_failures,
            "cpu_gbps": c.cpu_gbps,
            "link_gbps": c.link_gbps,
            "path_choices": c.path_choices,
            "wrong_path_choices": c.wrong_path_choices,
            "prefetch_loads": c.prefetch_loads,
            "prefetch_used": c.prefetch_used,
            "prefetch_issued_bytes": c.issued_bytes,
            "prefetch_used_bytes": c.used_bytes,
            "prefetch_late_bytes": c.late_bytes,
            "prefetch_wasted_bytes": c.wasted_bytes,
            "prefetch_failed_bytes": c.failed_bytes,
            "prefetch_held_bytes": self.held_bytes,
            "prefetches_requested": c.prefetches_requested,
            "prefetches_resident": c.prefetches_resident,
            "prefetches_stale": c.prefetches_stale,
            "prefetches_over_budget": c.prefetches_over_budget,
            "stall_seconds": c.stall_seconds,
            "draft_seconds": c.draft_seconds,
            "verify_seconds": c.verify_seconds,
            "slots": self.slots,
            "peak_slots": self.peak_slots,
        }


def _sum(one: Speculation | None, other: Speculation | None) -> Speculation | None:
    return one.plus(other) if one is not None and other is not None else one or other


def _speculation_to_dict(speculation: Speculation | None) -> dict[str, Any] | None:
    if speculation is None or not speculation.steps:
        return None
    tokens = speculation.tokens
    return {
        "k_min": speculation.least,
        "k_max": speculation.most,
        "k_mean": speculation.drafts / speculation.steps,
        "plain_tpot_seconds": speculation.plain_seconds / tokens if tokens else None,  # estimate
        "tpot_seconds": speculation.seconds / tokens if tokens else None,
    }
