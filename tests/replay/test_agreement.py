"""The simulator against the live source, cache, queue and eviction: the same loads, and the same seconds."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from traces import make_trace, on_link, run_live

from spmoe.config import Size
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Timeline
from spmoe.replay.evictions import LIVE_RULES
from spmoe.replay.replay import Replayer, Setting, as_cuda
from spmoe.replay.trace import Trace

USES = {  # whether a policy hears the draft, and the target's own layers
    "on-demand": (False, False),
    "draft-gate": (True, False),
    "next-gate": (False, True),
    "draft-gate+next-gate": (True, True),
}


def replayed(trace: Trace, prefetch: str, eviction: str, slots: int, cutoff: int) -> tuple[Counters, float]:
    """Every step of a trace."""
    run = Replayer(trace).start(Setting(prefetch, eviction, memory=Size(bytes=slots * trace.shape.expert_bytes)))
    run.cutoff = cutoff
    for number, step in enumerate(run.plan):
        run.step(number, step)
    return run.sim.counters, run.sim.now


@pytest.mark.parametrize("slots", [5, 26])
@pytest.mark.parametrize("prefetch", list(USES))
@pytest.mark.parametrize("eviction", LIVE_RULES)
def test_the_simulator_does_what_the_live_source_does(prefetch: str, eviction: str, slots: int) -> None:
    """Every count of the ledger, the stall and the time of the run, for every live rule."""
    trace = make_trace(steps=24)
    draft, ahead = USES[prefetch]
    ours, seconds = replayed(trace, prefetch, eviction, slots, 6)
    live, expected = run_live(trace, Replayer(trace).steps(4), slots, eviction, draft=draft, ahead=ahead, cutoff=6)
    assert_same(ours, live)
    assert seconds == pytest.approx(expected)
    assert live.demand_loads > 0
    if prefetch == "draft-gate" and slots == 26:
        assert live.late > 0
        assert live.wasted_bytes > 0
        assert live.prefetches_stale > 0


@pytest.mark.parametrize("eviction", LIVE_RULES)
def test_what_a_long_prompt_says_is_heard_by_both(eviction: str) -> None:
    trace = make_trace(steps=24, prompt=40)
    ours, seconds = replayed(trace, "draft-gate", eviction, 20, 6)
    plans = Replayer(trace).steps(4)
    live, expected = run_live(trace, plans, 20, eviction, draft=True, ahead=False, cutoff=6)
    assert_same(ours, live)
    assert seconds == pytest.approx(expected)
    for step in plans:
        for forward in step.forwards:
            forward.shares = [[] for _ in forward.shares]
    deaf, _ = run_live(trace, plans, 20, eviction, draft=True, ahead=False, cutoff=6)
    assert (asdict(deaf) != asdict(live)) == (eviction == "draft-informed")


@pytest.mark.parametrize(("cutoff", "shape"), [(0, {}), (3, {"depth": 1}), (6, {"depth": 5, "window": 1})])
def test_also_with_a_cutoff_and_other_depths(cutoff: int, shape: dict[str, int]) -> None:
    trace = on_link(make_trace(layers=8, experts=6, seed=3), **shape)
    ours, seconds = replayed(trace, "draft-gate", "draft-informed", 20, cutoff)
    live, expected = run_live(
        trace, Replayer(trace).steps(4), 20, "draft-informed", draft=True, ahead=False, cutoff=cutoff
    )
    assert_same(ours, live)
    assert (live.prefetch_loads > 0) == (cutoff > 0)
    assert seconds == pytest.approx(expected)


@pytest.mark.parametrize("slots", [5, 26])
@pytest.mark.parametrize("prefetch", list(USES))
@pytest.mark.parametrize("cuda", [False, True])
def test_demands_in_one_go_are_what_they_are_one_by_one(prefetch: str, slots: int, cuda: bool) -> None:
    """With a timeline, each copy that ends is looked at; without, those that follow each other are run through."""
    trace = make_trace(steps=24, top_k=4)
    trace = as_cuda(trace) if cuda else trace
    setting = Setting(prefetch, memory=Size(bytes=slots * trace.shape.expert_bytes))
    one_by_one, in_one_go = (Replayer(trace).run(setting, line) for line in (Timeline(), None))
    assert replace(one_by_one, wall_seconds=0.0) == replace(in_one_go, wall_seconds=0.0)
    assert in_one_go.counters.demand_loads > 2 * in_one_go.steps, "many at a time"


def assert_same(ours: Counters, live: Counters) -> None:
    for name, value in asdict(live).items():
        if name == "stall_seconds":
            assert ours.stall_seconds == pytest.approx(value)
        else:
            assert getattr(ours, name) == value, name


@pytest.mark.parametrize("eviction", LIVE_RULES)
def test_layers_may_have_fewer_experts_than_others(eviction: str) -> None:
    trace = make_trace(steps=40)
    chosen = trace.chosen.copy()
    for layer in (0, 2, 3):
        chosen[:, layer] %= 4
        chosen[:, layer, 1] = (chosen[:, layer, 0] + 1 + chosen[:, layer, 1] % 3) % 4
    trace = replace(trace, chosen=chosen, shape=replace(trace.shape, experts=(4, 8, 4, 4, 8, 8)))
    live, expected = run_live(trace, Replayer(trace).steps(4), 28, eviction, draft=False, ahead=False, cutoff=6)
    ours, seconds = replayed(trace, "on-demand", eviction, 28, 6)
    assert_same(ours, live)
    assert seconds == pytest.approx(expected)
