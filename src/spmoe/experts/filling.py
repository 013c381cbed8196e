"""Slots filled at once, between requests: with every expert, or with what was there at another time."""

from __future__ import annotations

from collections.abc import Sequence

from spmoe.experts.eviction import Eviction
from spmoe.experts.inflight import wait_for
from spmoe.experts.source import ExpertSource
from spmoe.types import ExpertKey


def load_all(source: ExpertSource, experts: Sequence[int]) -> None:
    """Fill the slots with every expert; that counts as nobody's demand."""
    before = source.counters.copy()
    for layer, count in enumerate(experts):
        for _ in source.use(layer, range(count)):
            pass
    source.begin_step()
    for name in ("hits", "late", "demand_loads", "demand_bytes", "stall_seconds"):
        setattr(source.counters, name, getattr(before, name))


def residents(source: ExpertSource) -> list[ExpertKey]:
    """What is in slots, once all copies have ended."""
    wait_for(source.loads.handles)
    with source.lock:
        source.loads.reap()
        return [entry.key for entry in source.cache.entries()]


def exchange(source: ExpertSource, eviction: Eviction, keys: Sequence[ExpertKey]) -> None:
    """Have just these in slots instead of the residents, and the rule decide that had left them there.

    Raises if one cannot be had; that rule has been told then.
    """
    with source.lock:
        source.loads.exchange(eviction, frozenset(keys))
        handles = source.loads.handles
    try:
        for handle in handles:
            handle.wait()
    finally:
        wait_for(handles)
        with source.lock:
            source.loads.reap()
