"""Eviction policies, one file per name: which resident expert gives its slot to another."""

from __future__ import annotations

from collections.abc import Sequence

from spmoe.experts.eviction.base import Eviction, ScoredEviction
from spmoe.registry import EVICTION_POLICIES

__all__ = ["Eviction", "ScoredEviction", "make_eviction"]


def make_eviction(name: str, experts_per_layer: Sequence[int]) -> Eviction:
    """Make the eviction policy of this name; raise UsageError if there is none."""
    policy: Eviction = EVICTION_POLICIES.load(name)(experts_per_layer)
    return policy
