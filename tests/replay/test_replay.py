"""Replays: bounds that must hold between policies and rules, chunks, times, and the figures that come out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from traces import EXPERT_BYTES, LINK, make_trace, on_link

from spmoe.config import Cutoff, Size
from spmoe.errors import UsageError
from spmoe.observe.chrome import chrome_events
from spmoe.observe.timeline import Activity, Timeline
from spmoe.replay.evictions import LIVE_RULES, make_rule
from spmoe.replay.foresight import POLICIES, make_replay_policy
from spmoe.replay.moving import Machine
from spmoe.replay.replay import Replayer, Setting, Times, as_cuda, rank
from spmoe.replay.simulate import Simulation
from spmoe.replay.steps import Prediction

TRACE = make_trace(steps=40)
REPLAYER = Replayer(TRACE)
NONE = Cutoff.parse("all")


@pytest.mark.parametrize("share", ["25%", "50%", "75%"])
def test_who_sees_further_loads_less(share: str) -> None:
    def loads(eviction: str) -> int:
        return REPLAYER.run(Setting("on-demand", eviction, memory=Size.parse(share))).counters.loads

    assert loads("belady") < loads("one-step-perfect")
    assert all(loads("belady") < loads(rule) for rule in LIVE_RULES)


def test_the_oracle_waits_least_and_wastes_nothing() -> None:
    oracle = REPLAYER.run(Setting("oracle", cutoff=NONE))
    others = [REPLAYER.run(Setting(policy, cutoff=NONE)) for policy in POLICIES if policy != "oracle"]
    assert oracle.counters.wasted_bytes == 0
    assert oracle.counters.stall_seconds < min(other.counters.stall_seconds for other in others)
    assert all(other.counters.asked == oracle.counters.asked for other in others)
    ranked = [oracle, *others]
    assert rank(ranked)[0] == 1
    assert sorted(rank(ranked)) == list(range(1, len(ranked) + 1))


@pytest.mark.parametrize("prefetch", list(POLICIES))
def test_time_is_compute_and_stall(prefetch: str) -> None:
    outcome = REPLAYER.run(Setting(prefetch))
    assert outcome.seconds == pytest.approx(outcome.compute_seconds + outcome.counters.stall_seconds)
    assert outcome.link_seconds <= outcome.seconds * (1 + 1e-9)
    assert outcome.ideal_seconds <= outcome.seconds * (1 + 1e-9)
    assert outcome.efficiency <= 1 + 1e-9
    assert outcome.to_dict()["loads_per_token"] * outcome.tokens == pytest.approx(outcome.counters.loads)


def test_a_faster_link_and_slower_compute_wait_less() -> None:
    stalls = [REPLAYER.run(Setting(link_gbps=speed)).counters.stall_seconds for speed in (0.5, 1.0, 2.0, 100.0)]
    assert stalls == sorted(stalls, reverse=True)
    assert len(set(stalls)) == 4
    slow = Replayer(TRACE, Times(scale=10.0)).run(Setting())
    assert slow.compute_seconds == pytest.approx(10 * REPLAYER.run(Setting()).compute_seconds, rel=0.2)
    assert slow.counters.stall_seconds < stalls[1]


def test_given_times_replace_recorded_ones() -> None:
    times = Times(draft_pass=2e-3, verify_layer=1e-3, rest=0.5e-3)
    outcome = Replayer(TRACE, times).run(Setting("on-demand"))
    assert outcome.compute_seconds / outcome.steps == pytest.approx(4 * 2e-3 + 6 * 1e-3 + 0.5e-3)


def test_the_cutoff_bounds_and_auto_finds_one() -> None:
    issued = [REPLAYER.run(Setting(cutoff=Cutoff.parse(depth))).counters.prefetch_loads for depth in (0, 2, 4, 6)]
    assert issued[0] == 0
    assert issued == sorted(issued)
    assert REPLAYER.run(Setting(cutoff=Cutoff.parse("auto"))).cutoff_layers in range(7)
    assert REPLAYER.run(Setting(cutoff=Cutoff.parse("just-in-time"))).cutoff_layers in range(7)


def demand_behind_a_wish(chunk: float | None) -> float:
    """How long a demand that comes in the middle of a prefetch request's copy is waited for; copies take ten seconds."""
    machine = Machine(slots=4, seconds_per_expert=10.0, depth=2, chunk_seconds=chunk, window=2)
    sim = Simulation(machine, make_rule("lru", (2, 2), []))
    sim.begin_step(0)
    sim.prefetch(Prediction.of(np.array([3]), np.ones(1), 2), 2)
    sim.compute(2.5)
    sim.use(0, [0], 0.0)
    assert sim.counters.demand_loads == 1
    waited = sim.counters.stall_seconds
    sim.use(1, [3], 0.0)
    assert sim.now == pytest.approx(20.0), "the rest of the prefetch request moves when the demand has"
    assert (sim.counters.late, sim.counters.hits) == ((0, 1) if waited == 17.5 else (1, 0))
    return waited


def test_a_demand_waits_for_a_window_of_chunks_at_most() -> None:
    assert demand_behind_a_wish(None) == pytest.approx(7.5 + 10)
    assert demand_behind_a_wish(1.0) == pytest.approx(1.5 + 10), "the chunk under way and the next"
    assert demand_behind_a_wish(4.0) == pytest.approx(5.5 + 10)
    assert demand_behind_a_wish(9.0) == pytest.approx(7.5 + 10), "the copy ends before"


def test_chunks_make_no_difference_to_what_is_loaded_on_demand() -> None:
    chunked = as_cuda(on_link(TRACE, expert_bytes=EXPERT_BYTES * 400, link_bytes_per_second=LINK * 400))
    assert chunked.shape.chunk_bytes is not None
    assert chunked.shape.depth == 2
    plain, other = REPLAYER.run(Setting("on-demand")), Replayer(chunked).run(Setting("on-demand"))
    assert other.counters == plain.counters
    wished = Replayer(chunked).run(Setting("draft-gate", cutoff=NONE))
    assert wished.counters.stall_seconds < REPLAYER.run(Setting("draft-gate", cutoff=NONE)).counters.stall_seconds


def test_unknown_names_and_too_little_memory_are_refused() -> None:
    for setting, words in [
        (Setting(prefetch="magic"), "prefetch must be one of on-demand, draft-gate"),
        (Setting(eviction="magic"), "eviction must be one of .*belady"),
        (Setting(memory=Size(bytes=EXPERT_BYTES)), "fewer than the 2 of one token"),
    ]:
        with pytest.raises(UsageError, match=words):
            REPLAYER.run(setting)
    with pytest.raises(UsageError, match="--link-gbps"):
        Replayer(on_link(TRACE, link_bytes_per_second=0.0)).run(Setting())


def test_a_timeline_accounts_for_the_last_steps() -> None:
    timeline = Timeline()
    REPLAYER.run(Setting("draft-gate", cutoff=NONE), timeline)
    kinds = {span.activity for span in timeline.spans}
    assert kinds == set(Activity)
    spans = [span for span in timeline.spans if span.activity in (Activity.DRAFT, Activity.VERIFY)]
    assert len(spans) == 2 * 32
    for before, after in pairwise(spans):
        assert before.end == pytest.approx(after.start), "compute is drafting or verifying, without a gap"
    assert chrome_events(timeline.spans)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_perfect_draft_names_what_rows_will_need_as_their_passes_end(k: int) -> None:
    layers, width = TRACE.shape.layers, max(TRACE.shape.experts)
    seer, steps = make_replay_policy("perfect-draft", layers, width), Replayer(TRACE).steps(k)
    seer.prepare(steps)
    for step in steps:
        assert seer.at_begin(step) is None
        heard, passes, needed = set[int](), 0, {key for keys in step.forwards[-1].needed for key in keys}
        for chunk in step.chunks:
            told = seer.at_slab(chunk)
            if not step.drafted:
                assert told is chunk.prefetches
                continue
            assert told is not None
            heard |= {key for _, _, key in told.by_rank}
            passes += chunk.layers
            rows = step.forwards[-1].chosen[: passes // layers]  # of passes that are over
            named = {layer * width + int(e) for row in rows for layer, chosen in enumerate(row) for e in chosen}
            assert named <= heard <= needed
            assert (heard == needed) == (passes == step.drafted * layers) or named == needed


def test_between_the_draft_and_the_oracle_there_is_a_draft_that_is_never_wrong() -> None:
    draft, perfect, oracle = (
        REPLAYER.run(Setting(name, cutoff=NONE)) for name in ("draft-gate", "perfect-draft", "oracle")
    )
    assert oracle.seconds < perfect.seconds < draft.seconds
    assert perfect.counters.wasted_bytes < draft.counters.wasted_bytes


def test_a_draft_that_does_not_speak_of_every_layer_is_not_called_perfect() -> None:
    steps = Replayer(TRACE).steps(4)
    drafted = next(step for step in steps if step.drafted)
    del drafted.chunks[-1]
    with pytest.raises(UsageError, match="perfect-draft cannot be replayed"):
        make_replay_policy("perfect-draft", TRACE.shape.layers, 8).prepare(steps)
