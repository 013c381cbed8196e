"""Eviction rules of a replay by name: those of the live engine, and two that see ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmoe.errors import UsageError
from spmoe.experts.eviction import Eviction, make_eviction
from spmoe.registry import EVICTION_POLICIES
from spmoe.replay.clairvoyant import Belady, OneStepPerfect
from spmoe.replay.steps import StepPlan

LIVE_RULES = EVICTION_POLICIES.names()
SEEING: dict[str, Callable[[Sequence[int], Sequence[StepPlan]], Eviction]] = {
    "one-step-perfect": OneStepPerfect,
    "belady": Belady,
}


def require_rule(name: str) -> None:
    """Refuse a name that no rule has."""
    if name not in (*LIVE_RULES, *SEEING):
        raise UsageError(f"eviction must be one of {', '.join((*LIVE_RULES, *SEEING))}, not {name!r}")


def make_rule(name: str, experts: Sequence[int], steps: Sequence[StepPlan]) -> Eviction:
    """The rule of this name, for layers with these numbers of experts; what sees ahead sees these steps."""
    require_rule(name)
    return SEEING[name](experts, steps) if name in SEEING else make_eviction(name, experts)
