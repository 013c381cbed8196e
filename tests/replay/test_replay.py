"""Replays: bounds between policies, links, compute times, and the figures of a result."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from traces import EXPERT_BYTES, LINK, make_trace, on_link

from spmoe.config import Cutoff, Size
from spmoe.errors import UsageError
from spmoe.observe.chrome import chrome_events
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity, Timeline
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES
from spmoe.replay.engine import ReplayEngine
from spmoe.replay.eviction import make_replay_eviction
from spmoe.replay.policies import ReplayPolicy
from spmoe.replay.replay import ComputeTimes, ReplayConfig, Replayer, as_cuda, rank
from spmoe.replay.steps import StepPlan, plan_steps
from spmoe.replay.trace import Trace
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

TRACE = make_trace(steps=40)
REPLAYER = Replayer(TRACE)
ALL_LAYERS = Cutoff.parse("all")
POLICIES = (*PREFETCH_POLICIES.names(), "draft-gate+next-gate", "perfect-draft")
LIVE_EVICTIONS = EVICTION_POLICIES.names()


def every_step(trace: Trace, config: ReplayConfig, steps: list[StepPlan] | None = None) -> tuple[Counters, float]:
    """Replay also the prompts; return the counters and the virtual seconds."""
    run = Replayer(trace).start(config)
    for number, step in enumerate(run.plan if steps is None else steps):
        run.step(number, step)
    return run.engine.counters, run.engine.now


def slots(count: int) -> Size:
    return Size(bytes=count * EXPERT_BYTES)


# ---- loads


@pytest.mark.parametrize("count", [16, 26])
def test_lru_on_demand_loads_equal_the_misses_of_an_lru_cache(count: int) -> None:
    resident: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = hits = 0
    for step in REPLAYER.steps(4):
        for forward in step.forwards:
            for layer, experts in enumerate(forward.experts):
                keys = [(layer, expert) for expert in experts]
                absent = [key for key in keys if key not in resident]
                misses, hits = misses + len(absent), hits + len(keys) - len(absent)
                for key in [key for key in keys if key in resident]:
                    resident.move_to_end(key)
                for _ in range(len(resident) + len(absent) - count):
                    resident.popitem(last=False)
                resident.update(dict.fromkeys(absent))
    counters, _ = every_step(TRACE, ReplayConfig("on-demand", "lru", memory=slots(count)))
    assert (counters.demand_loads, counters.hits) == (misses, hits)
    assert counters.prefetches_requested == 0


@pytest.mark.parametrize("share", ["25%", "50%", "75%"])
def test_eviction_that_knows_more_of_the_future_loads_less(share: str) -> None:
    def loads(eviction: str) -> int:
        return REPLAYER.run(ReplayConfig("on-demand", eviction, memory=Size.parse(share))).counters.loads

    least = loads("belady")
    assert all(least < loads(eviction) for eviction in ("one-step-perfect", *LIVE_EVICTIONS))


def test_oracle_stalls_least_and_wastes_nothing() -> None:
    oracle = REPLAYER.run(ReplayConfig("oracle", cutoff=ALL_LAYERS))
    others = [REPLAYER.run(ReplayConfig(policy, cutoff=ALL_LAYERS)) for policy in POLICIES if policy != "oracle"]
    assert oracle.wasted_loads == 0
    assert oracle.counters.stall_seconds < min(other.counters.stall_seconds for other in others)
    assert all(other.counters.asked == oracle.counters.asked for other in others)
    ranked = [oracle, *others]
    assert rank(ranked)[0] == 1
    assert sorted(rank(ranked)) == list(range(1, len(ranked) + 1))


def test_perfect_draft_is_between_draft_gate_and_oracle() -> None:
    draft, perfect, oracle = (
        REPLAYER.run(ReplayConfig(name, cutoff=ALL_LAYERS)) for name in ("draft-gate", "perfect-draft", "oracle")
    )
    assert oracle.seconds < perfect.seconds < draft.seconds
    assert perfect.wasted_loads < draft.wasted_loads


@pytest.mark.parametrize("count", [5, 26])
@pytest.mark.parametrize("prefetch", POLICIES)
@pytest.mark.parametrize("eviction", LIVE_EVICTIONS)
def test_counters_of_every_configuration_add_up(prefetch: str, eviction: str, count: int) -> None:
    trace = make_trace(steps=12)
    counters, _ = every_step(trace, ReplayConfig(prefetch, eviction, memory=slots(count)))
    steps = plan_steps(trace)
    needed = sum(len(experts) for step in steps for forward in step.forwards for experts in forward.experts)
    assert counters.asked == needed
    assert counters.demand_loads > 0
    assert (counters.prefetch_loads > 0) == (prefetch != "on-demand")
    assert counters.issued_bytes == EXPERT_BYTES * counters.prefetch_loads
    assert 0 <= counters.held_bytes <= count * EXPERT_BYTES
    if prefetch == "draft-gate" and count == 26:
        assert counters.late > 0
        assert counters.wasted_bytes > 0
        assert counters.prefetches_stale > 0


@pytest.mark.parametrize("eviction", LIVE_EVICTIONS)
def test_only_draft_informed_eviction_uses_the_routing_shares_of_a_long_prompt(eviction: str) -> None:
    trace, config = make_trace(steps=24, prompt=40), ReplayConfig("draft-gate", eviction, memory=slots(20))
    with_shares, _ = every_step(trace, config)
    steps = Replayer(trace).steps(4)
    for step in steps:
        for forward in step.forwards:
            forward.shares = [[] for _ in forward.shares]
    without, _ = every_step(trace, config, steps)
    assert (asdict(without) != asdict(with_shares)) == (eviction == "draft-informed")


@pytest.mark.parametrize("eviction", LIVE_EVICTIONS)
def test_layers_may_have_different_numbers_of_experts(eviction: str) -> None:
    trace = make_trace(steps=40)
    routed = trace.routed.copy()
    for layer in (0, 2, 3):
        routed[:, layer] %= 4
        routed[:, layer, 1] = (routed[:, layer, 0] + 1 + routed[:, layer, 1] % 3) % 4
    trace = replace(trace, routed=routed, shape=replace(trace.shape, experts=(4, 8, 4, 4, 8, 8)))
    counters, _ = every_step(trace, ReplayConfig("on-demand", eviction, memory=slots(28)))
    least, _ = every_step(trace, ReplayConfig("on-demand", "belady", memory=slots(28)))
    assert counters.asked == least.asked
    assert counters.demand_loads >= least.demand_loads


# demand loads, prefetch loads, hits, late, wasted loads and stall in microseconds, by the simulator of version 0.1
FIGURES = {
    ("on-demand", "recorded"): (463, 0, 697, 0, 0, 301280),
    ("draft-gate", "recorded"): (134, 366, 860, 166, 25, 126018),
    ("next-gate", "recorded"): (176, 333, 765, 219, 21, 235203),
    ("draft-gate+next-gate", "recorded"): (100, 397, 854, 206, 29, 131672),
    ("activation", "recorded"): (324, 219, 738, 98, 56, 250527),
    ("adaptive", "recorded"): (168, 342, 768, 224, 28, 229194),
    ("perfect-draft", "recorded"): (38, 455, 937, 185, 1, 86523),
    ("oracle", "recorded"): (65, 352, 964, 131, 0, 78852),
    ("on-demand", "cuda"): (463, 0, 697, 0, 0, 301280),
    ("draft-gate", "cuda"): (137, 363, 850, 173, 25, 123613),
    ("next-gate", "cuda"): (193, 301, 736, 231, 20, 213016),
    ("draft-gate+next-gate", "cuda"): (106, 391, 850, 204, 27, 126511),
    ("activation", "cuda"): (327, 219, 724, 109, 51, 251399),
    ("adaptive", "cuda"): (204, 298, 733, 223, 28, 220531),
    ("perfect-draft", "cuda"): (41, 451, 932, 187, 1, 83162),
    ("oracle", "cuda"): (65, 352, 964, 131, 0, 78852),
}


@pytest.mark.parametrize("transfer", ["recorded", "cuda"])
@pytest.mark.parametrize("prefetch", [name for name in POLICIES if name != "auto"])  # version 0.1 had no `auto`
def test_figures_agree_with_the_simulator_of_version_0_1(prefetch: str, transfer: str) -> None:
    """Whole copies agree exactly; that simulator knew no chunks that are queued behind a demand load."""
    trace = on_link(TRACE, expert_bytes=EXPERT_BYTES * 400, link_bytes_per_second=LINK * 400)
    result = Replayer(as_cuda(trace) if transfer == "cuda" else trace).run(ReplayConfig(prefetch, cutoff=ALL_LAYERS))
    c = result.counters
    found = (c.demand_loads, c.prefetch_loads, c.hits, c.late, result.wasted_loads, round(1e6 * c.stall_seconds))
    if transfer == "recorded":
        assert found == FIGURES[prefetch, transfer]
    else:
        assert found[5] == pytest.approx(FIGURES[prefetch, transfer][5], rel=0.05)
        assert sum(found[:2]) == pytest.approx(sum(FIGURES[prefetch, transfer][:2]), rel=0.03)


# ---- time


@pytest.mark.parametrize("prefetch", POLICIES)
def test_time_is_compute_plus_stalls(prefetch: str) -> None:
    result = REPLAYER.run(ReplayConfig(prefetch))
    assert result.seconds == pytest.approx(result.compute_seconds + result.counters.stall_seconds)
    assert result.link_seconds <= result.seconds * (1 + 1e-9)
    assert result.ideal_seconds <= result.seconds * (1 + 1e-9)
    assert result.efficiency <= 1 + 1e-9
    assert result.to_dict()["loads_per_token"] * result.tokens == pytest.approx(result.counters.loads)


def test_faster_link_or_slower_compute_stalls_less() -> None:
    stalls = [REPLAYER.run(ReplayConfig(link_gbps=speed)).counters.stall_seconds for speed in (0.5, 1.0, 2.0, 100.0)]
    assert stalls == sorted(stalls, reverse=True)
    assert len(set(stalls)) == 4
    slow = Replayer(TRACE, ComputeTimes(scale=10.0)).run(ReplayConfig())
    assert slow.compute_seconds == pytest.approx(10 * REPLAYER.run(ReplayConfig()).compute_seconds, rel=0.2)
    assert slow.counters.stall_seconds < stalls[1]


def test_given_times_replace_recorded_ones() -> None:
    times = ComputeTimes(draft_pass=2e-3, verify_layer=1e-3, rest=0.5e-3)
    result = Replayer(TRACE, times).run(ReplayConfig("on-demand"))
    assert result.compute_seconds / result.steps == pytest.approx(4 * 2e-3 + 6 * 1e-3 + 0.5e-3)


def test_cutoff_bounds_prefetches_and_auto_chooses_one() -> None:
    issued = [REPLAYER.run(ReplayConfig(cutoff=Cutoff.parse(depth))).counters.prefetch_loads for depth in (0, 2, 4, 6)]
    assert issued[0] == 0
    assert issued == sorted(issued)
    assert REPLAYER.run(ReplayConfig(cutoff=Cutoff.parse("auto"))).cutoff_layers in range(7)
    assert REPLAYER.run(ReplayConfig(cutoff=Cutoff.parse("just-in-time"))).cutoff_layers in range(7)


def test_number_of_copies_in_flight_does_not_change_needed_experts() -> None:
    trace = make_trace(layers=8, experts=6, seed=3)
    needed, _ = every_step(trace, ReplayConfig("on-demand"))
    for depth in (1, 2, 5):
        counters, _ = every_step(on_link(trace, depth=depth), ReplayConfig("draft-gate", memory=slots(20)))
        assert counters.asked == needed.asked
        assert counters.prefetch_loads > 0


# ---- links


def stall_of_demand_behind_prefetch(chunk_bytes: int | None) -> float:
    """Return the stall of a demand load submitted 2.5 s after a prefetch began; each copy takes ten seconds."""
    shape = replace(TRACE.shape, experts=(2, 2), expert_bytes=10, chunk_bytes=chunk_bytes, depth=2, window=2)
    engine = ReplayEngine(shape, 4, 1.0, make_replay_eviction("lru", (2, 2), []))
    engine.begin_step(0)
    engine.prefetch(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 1), 1.0, 1)]))
    engine.compute(2.5)
    engine.run_layer(0, [0], 0.0, [])
    assert engine.counters.demand_loads == 1
    stall = engine.counters.stall_seconds
    engine.run_layer(1, [1], 0.0, [])
    assert engine.now == pytest.approx(20.0), "the rest of the prefetch is copied after the demand load"
    assert (engine.counters.late, engine.counters.hits) == ((0, 1) if stall == 17.5 else (1, 0))
    assert engine.link_seconds == pytest.approx(20.0)
    return stall


def test_demand_load_waits_for_at_most_a_window_of_chunks() -> None:
    assert stall_of_demand_behind_prefetch(None) == pytest.approx(7.5 + 10)
    assert stall_of_demand_behind_prefetch(1) == pytest.approx(1.5 + 10), "the chunk in flight and the next"
    assert stall_of_demand_behind_prefetch(4) == pytest.approx(5.5 + 10)
    assert stall_of_demand_behind_prefetch(9) == pytest.approx(7.5 + 10), "the copy ends before"


def test_chunks_do_not_change_on_demand_loads() -> None:
    chunked = as_cuda(on_link(TRACE, expert_bytes=EXPERT_BYTES * 400, link_bytes_per_second=LINK * 400))
    assert chunked.shape.chunk_bytes is not None
    plain, other = REPLAYER.run(ReplayConfig("on-demand")), Replayer(chunked).run(ReplayConfig("on-demand"))
    assert (other.counters.demand_loads, other.counters.hits) == (plain.counters.demand_loads, plain.counters.hits)
    assert other.counters.stall_seconds == pytest.approx(plain.counters.stall_seconds)
    prefetched = Replayer(chunked).run(ReplayConfig("draft-gate", cutoff=ALL_LAYERS))
    whole = REPLAYER.run(ReplayConfig("draft-gate", cutoff=ALL_LAYERS))
    assert prefetched.counters.stall_seconds < whole.counters.stall_seconds


# ---- refusals


def test_unknown_names_and_too_little_memory_are_refused() -> None:
    for config, words in [
        (ReplayConfig(prefetch="magic"), "prefetch must be one of activation, adaptive, auto, draft-gate"),
        (ReplayConfig(eviction="magic"), "eviction must be one of .*belady"),
        (ReplayConfig(memory=Size(bytes=EXPERT_BYTES)), "fewer than the 2 of one token"),
    ]:
        with pytest.raises(UsageError, match=words):
            REPLAYER.run(config)
        with pytest.raises(UsageError, match=words):
            REPLAYER.require(config)
    with pytest.raises(UsageError, match="--link-gbps"):
        Replayer(on_link(TRACE, link_bytes_per_second=0.0)).run(ReplayConfig())


def test_policy_that_looks_further_ahead_than_the_trace_is_refused() -> None:
    near = replace(TRACE, ahead=TRACE.ahead[:1], ahead_score=TRACE.ahead_score[:1])
    assert Replayer(near).run(ReplayConfig("next-gate")).counters.prefetch_loads > 0
    with pytest.raises(UsageError, match="holds no prediction of layer 3 from layer 0"):
        Replayer(near).run(ReplayConfig("adaptive"))


def test_perfect_draft_needs_predictions_for_every_layer() -> None:
    steps = Replayer(TRACE).steps(4)
    drafted = next(step for step in steps if step.drafted)
    del drafted.chunks[-1]
    with pytest.raises(UsageError, match="perfect-draft cannot be replayed"):
        ReplayPolicy("perfect-draft", TRACE.shape, steps)


# ---- the bounds' own predictions


@pytest.mark.parametrize("k", [1, 2, 4])
def test_perfect_draft_requests_experts_of_a_row_when_its_pass_ends(k: int) -> None:
    layers, steps = TRACE.shape.layers, Replayer(TRACE).steps(k)
    perfect = ReplayPolicy("perfect-draft", TRACE.shape, steps)
    draft_gate = ReplayPolicy("draft-gate", TRACE.shape, steps)
    for step in steps:
        assert len(perfect.begin_step(step.sequence_id)) == 0
        requested, passes = set[tuple[int, int]](), 0
        needed = {(layer, e) for layer, experts in enumerate(step.forwards[-1].experts) for e in experts}
        for chunk in step.chunks:
            requests = perfect.on_prediction(chunk.prediction)
            assert requests is not None
            if not step.drafted:
                predicted = draft_gate.on_prediction(chunk.prediction)
                assert predicted is not None
                assert [*requests] == [*predicted]
                continue
            requested |= {tuple(request.key) for request in requests}
            passes += len(chunk.prediction.layers)
            rows = step.forwards[-1].routed[: passes // layers]  # of finished passes
            named = {(layer, int(e)) for row in rows for layer, experts in enumerate(row) for e in experts}
            assert named <= requested <= needed
            assert (requested == needed) == (passes == step.drafted * layers) or named == needed


def test_several_rows_request_an_expert_once_with_its_best_score() -> None:
    policy = ReplayPolicy("draft-gate", TRACE.shape, [])
    prompt = REPLAYER.steps(4)[0]
    assert not prompt.drafted
    for chunk in prompt.chunks:
        requests = policy.on_prediction(chunk.prediction)
        assert requests is not None
        experts, scores = (part.numpy() for part in chunk.prediction.routing)
        best: dict[tuple[int, int], float] = {}
        for at, layer in enumerate(chunk.prediction.layers):
            for expert, score in zip(experts[at].ravel(), scores[at].ravel(), strict=True):
                best[layer, int(expert)] = max(best.get((layer, int(expert)), 0.0), float(score))
        assert {tuple(request.key): request.score for request in requests} == best
        assert len(requests) == len(best)


# ---- timelines


def test_timeline_covers_the_last_steps() -> None:
    timeline = Timeline()
    REPLAYER.run(ReplayConfig("draft-gate", cutoff=ALL_LAYERS), timeline)
    expected = set(Activity) - {Activity.REQUEST}  # queuing requests takes no virtual time
    assert {span.activity for span in timeline.spans} == expected
    spans = [span for span in timeline.spans if span.activity in (Activity.DRAFT, Activity.VERIFY)]
    assert len(spans) == 2 * 32
    for before, after in pairwise(spans):
        assert before.end == pytest.approx(after.start), "drafting and verifying follow each other without a gap"
    assert chrome_events(timeline.spans)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("prefetch", POLICIES)
def test_timeline_does_not_change_the_result(prefetch: str, cuda: bool) -> None:
    replayer = Replayer(as_cuda(TRACE) if cuda else TRACE)
    drawn, plain = (replayer.run(ReplayConfig(prefetch), line) for line in (Timeline(), None))
    assert replace(drawn, wall_seconds=0.0) == replace(plain, wall_seconds=0.0)
    assert np.isfinite(plain.seconds)


# ---- the CPU path


@pytest.mark.parametrize("trace", [TRACE, as_cuda(TRACE)], ids=["whole copies", "chunks"])
@pytest.mark.parametrize("prefetch", ["on-demand", "draft-gate"])
def test_second_path_saves_time_as_far_as_the_cpu_is_fast(trace: Trace, prefetch: str) -> None:
    """A CPU as fast as the link saves much, a faster one more, and a useless one costs next to nothing."""
    replayer, memory = Replayer(trace), Size.parse("25%")
    off = replayer.run(ReplayConfig(prefetch, memory=memory))
    useless, slow, equal, fast = (
        replayer.run(ReplayConfig(prefetch, memory=memory, cpu_gbps=rate * LINK / 1e9))
        for rate in (0.001, 0.5, 1.0, 4.0)
    )
    assert useless.seconds < 1.02 * off.seconds + EXPERT_BYTES / (0.001 * LINK)
    assert fast.seconds < equal.seconds < 0.8 * off.seconds
    assert equal.seconds < slow.seconds < off.seconds
    assert off.counters.cpu_experts == 0
    assert 0 < slow.counters.cpu_experts < fast.counters.cpu_experts
    assert equal.counters.asked == off.counters.asked
    assert equal.to_dict()["cpu_experts_per_step"] == equal.counters.cpu_experts / equal.steps
    assert 0 <= equal.counters.wrong_path_choices <= equal.counters.path_choices


def test_rate_of_the_cpu_must_be_positive() -> None:
    with pytest.raises(UsageError, match="above 0 GB/s, not 0"):
        REPLAYER.require(ReplayConfig(cpu_gbps=0.0))
