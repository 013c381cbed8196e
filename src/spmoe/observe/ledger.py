"""The ledger: what moved, what was right, what was waited for. Per step, request and process."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self


@dataclass(slots=True)
class Counters:
    """Running totals. Two snapshots subtract to what happened between them."""

    # the loop
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)  # by draft position
    accepted_at: list[int] = field(default_factory=list)
    verified: int = 0  # steps that had a draft
    missing: int = 0  # in those, experts that were needed and in no slot when the step began
    # experts asked for by the router, once per layer and pass; hits + late + demand_loads is all of them
    hits: int = 0  # READY when asked for
    late: int = 0  # LOADING by a prefetch request when asked for
    demand_loads: int = 0  # ABSENT when asked for
    demand_bytes: int = 0
    # prefetched experts: issued = used + wasted + failed + still held
    prefetch_loads: int = 0
    issued_bytes: int = 0
    prefetch_used: int = 0
    used_bytes: int = 0
    late_bytes: int = 0  # the part of used that was still on its way when needed
    wasted_bytes: int = 0  # evicted before it was needed
    failed_bytes: int = 0
    # prefetch requests that cost no bytes
    prefetches_requested: int = 0
    prefetches_resident: int = 0
    prefetches_stale: int = 0
    prefetches_over_budget: int = 0
    # time
    stall_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def copy(self) -> Self:
        """A snapshot that later counting leaves alone."""
        return self.minus(type(self)())

    def minus(self, earlier: Counters) -> Self:
        """What was counted since `earlier`."""
        result = type(self)()
        for f in fields(self):
            now, then = getattr(self, f.name), getattr(earlier, f.name)
            if isinstance(now, list):
                then = then + [0] * (len(now) - len(then))
                setattr(result, f.name, [a - b for a, b in zip(now, then, strict=True)])
            else:
                setattr(result, f.name, now - then)
        return result

    def count_draft(self, drafted: int, accepted: int, missing: int = 0) -> None:
        """Book one verified draft, and how many experts were missing for it."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.verified += 1
            self.missing += missing
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    @property
    def asked(self) -> int:
        """Experts that routers asked for."""
        return self.hits + self.late + self.demand_loads

    @property
    def hit_rate(self) -> float | None:
        """Share of asked-for experts that were READY; None when none was asked for."""
        return self.hits / self.asked if self.asked else None

    @property
    def loads(self) -> int:
        """Experts moved, for whatever reason."""
        return self.demand_loads + self.prefetch_loads

    @property
    def useful_loads(self) -> int:
        """Experts moved and needed."""
        return self.demand_loads + self.prefetch_used

    @property
    def held_bytes(self) -> int:
        """Prefetched, not yet needed, not yet evicted."""
        return self.issued_bytes - self.used_bytes - self.wasted_bytes - self.failed_bytes

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per step that had a draft: one, and those of the draft that were kept."""
        drafts = self.drafted_at[0] if self.drafted_at else 0
        return 1 + self.accepted / drafts if drafts else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts, of those that were as long, whose first i+1 tokens were all kept."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True) if d]
