"""Every expert into a slot of its own, where there are slots for all."""

from __future__ import annotations

from collections.abc import Sequence

from spmoe.experts.source import ExpertSource


def load_all(source: ExpertSource, experts: Sequence[int]) -> None:
    """Fill the slots with every expert; that counts as nobody's demand."""
    before = source.counters.copy()
    for layer, count in enumerate(experts):
        for _ in source.use(layer, range(count)):
            pass
    source.begin_step()
    for name in ("hits", "late", "demand_loads", "demand_bytes", "stall_seconds"):
        setattr(source.counters, name, getattr(before, name))
