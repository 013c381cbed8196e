"""What a request cost: the figures shown after a run, and returned as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmoe.config import DraftTokens
from spmoe.observe.ledger import Counters


@dataclass(frozen=True, slots=True)
class Stats:
    """One request's times and its part of the ledger."""

    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float  # until the first token
    latency_seconds: float
    counters: Counters
    prompt_counters: Counters  # the part of them that the first step, which reads the prompt, has counted
    held_bytes: int  # prefetched by now, by this request or an earlier one, and not needed or evicted yet
    slots: int
    peak_slots: int
    cutoff_layers: int | None  # None: no prefetching
    layers: int
    prefetch: str
    draft_tokens: DraftTokens  # K
    emulated_link_gbps: float | None

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first."""
        if self.output_tokens < 2:
            return None
        return self.decode_seconds / (self.output_tokens - 1)

    @property
    def decode_seconds(self) -> float:
        """Time after the first token."""
        return self.latency_seconds - self.ttft_seconds

    @property
    def decode_counters(self) -> Counters:
        """What the steps after the first have counted."""
        return self.counters.minus(self.prompt_counters)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        c = self.counters
        return {
            "lossless": True,
            "link": "emulated" if self.emulated_link_gbps is not None else "real",
            "emulated_link_gbps": self.emulated_link_gbps,
            "prefetch": self.prefetch,
            "num_speculative_tokens": self.draft_tokens,
            "cutoff_layers": self.cutoff_layers,
            "layers": self.layers,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "latency_seconds": self.latency_seconds,
            "steps": c.steps,
            "mean_acceptance_length": c.mean_acceptance_length,
            "acceptance_by_position": c.acceptance_by_position,
            "drafted_tokens": c.drafted,
            "accepted_tokens": c.accepted,
            "expert_loads": c.loads,
            "demand_loads": c.demand_loads,
            "demand_bytes": c.demand_bytes,
            "hit_rate": c.hit_rate,
            "hits": c.hits,
            "late": c.late,
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
