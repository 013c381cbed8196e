"""On demand: prefetch nothing. Experts are loaded when a router asks for them."""

from __future__ import annotations

from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.registry import PREFETCH_POLICIES


@PREFETCH_POLICIES.register("on-demand")
class OnDemand(PrefetchPolicy):
    """The baseline that prefetching is measured against."""

    summary = "experts are loaded on demand"
    uses_step_budget = False
