"""On demand: prefetch requests for nothing. Experts move when a router asks for them, and not before."""

from __future__ import annotations

from spmoe.predict.base import PrefetchPolicy


class OnDemand(PrefetchPolicy):
    """The baseline that prefetching is measured against."""

    name = "on-demand"
