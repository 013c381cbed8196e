"""The simulator against the live source, cache, queue and eviction: the same loads, and the same seconds."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from traces import make_trace, run_live

from spmoe.config import Size
from spmoe.observe.ledger import Counters
from spmoe.replay.evictions import LIVE_RULES
from spmoe.replay.replay import Replayer, Setting

WITH_DRAFT = {"on-demand": (False, False), "draft-gate": (True, False), "next-gate": (False, True)}
WITH_DRAFT["draft-gate+next-gate"] = (True, True)


def replayed(trace, prefetch: str, eviction: str, slots: int, cutoff: str) -> tuple[Counters, float]:
    run = Replayer(trace).start(Setting(prefetch, eviction, memory=Size(bytes=slots * trace.shape.expert_bytes)))
    run.cutoff, run.last_pass = int(cutoff), True
    for number, step in enumerate(run.plan):
        run.step(number, step)
    return run.sim.counters, run.sim.now


@pytest.mark.parametrize("slots", [5, 26])
@pytest.mark.parametrize("prefetch", list(WITH_DRAFT))
@pytest.mark.parametrize("eviction", LIVE_RULES)
def test_the_simulator_does_what_the_live_source_does(prefetch: str, eviction: str, slots: int) -> None:
    trace = make_trace(steps=16)
    draft, ahead = WITH_DRAFT[prefetch]
    ours, seconds = replayed(trace, prefetch, eviction, slots, "6")
    live, expected = run_live(trace, Replayer(trace).steps(4), slots, eviction, draft=draft, ahead=ahead, cutoff=6)
    assert_same(ours, live)
    assert seconds == pytest.approx(expected)


def assert_same(ours: Counters, live: Counters) -> None:
    for name, value in asdict(live).items():
        if name == "stall_seconds":
            assert ours.stall_seconds == pytest.approx(value)
        else:
            assert getattr(ours, name) == value, name
