"""The latency model: steps computed by hand, bounds that always hold, and demand at other budgets."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.predict.latency import (
    NO_PREDICTION,
    ObservedDemand,
    PredictionQuality,
    StepCosts,
    StepInputs,
    expected_experts,
    predict_step,
)

quick = settings(max_examples=150, deadline=None, derandomize=True)
PERFECT = PredictionQuality(recall=1.0, precision=1.0)
# four layers of 2 seconds, half of them after the router; each needs one expert, never resident, 3 seconds to load
COSTS = StepCosts(draft_pass=5.0, verify_layer=2.0, load=3.0, expert_share=0.5)
STEP = StepInputs(COSTS, layers=4, draft_passes=2, cutoff=4, missing=1.0, needed=1.0, row_share=0.5)
COMPUTE_BEFORE_ROUTER = replace(STEP, costs=replace(COSTS, expert_share=0.0))
# the first draft pass predicts every expert
PREDICTED_AT_ONCE = replace(STEP, row_share=1.0, from_draft=PERFECT)


def test_on_demand_every_layer_waits_for_its_own_loads() -> None:
    found = predict_step(STEP)
    assert found.draft_seconds == 10.0
    assert found.seconds == pytest.approx(10 + 4 * (1 + 3 + 1))
    assert (found.stall_seconds, found.loads) == (pytest.approx(12), pytest.approx(4))


def test_resident_experts_compute_while_others_load() -> None:
    # the first layer loads both of its experts: half a second of compute overlaps, and half comes after the last load
    found = predict_step(replace(STEP, needed=2.0, missing=1.0, missing_by_layer=(2.0, 0.0, 0.0, 0.0)))
    assert found.seconds == pytest.approx(10 + 1 + (2 * 3 + 0.5) + 3 * 2)
    assert found.stall_seconds == pytest.approx(6 + 0.5 - 1)


def test_number_of_missing_experts_is_binomial() -> None:
    # one of two experts is missing on average: 0, 1 or 2 of them with probabilities 1/4, 1/2 and 1/4
    step = replace(STEP, layers=1, draft_passes=0, needed=2.0, missing=1.0, costs=replace(COSTS, load=0.6))
    after_last = 1.0 / 2
    expected = 1 + after_last + 0.25 * 0.5 + 0.5 * max(0.5, 0.6) + 0.25 * max(0.5, 1.2)
    assert predict_step(step).seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cpu", "alone", "seconds", "loads"),
    [
        (3.0, 3.0, 6.0, 2.0),  # two of four on each path
        (1.0, 1.0, 3.0, 1.0),  # three on the CPU
        (1.0, 0.5, 2.0, 0.0),  # all on the CPU, which is faster beside an idle link
        (99.0, 99.0, 12.0, 4.0),  # all over the link
        (0.0, 0.0, 12.0, 4.0),  # no such path
    ],
)
def test_missing_experts_take_two_paths(cpu: float, alone: float, seconds: float, loads: float) -> None:
    costs = replace(COSTS, cpu=cpu, cpu_alone=alone, expert_share=0.0)
    found = predict_step(replace(STEP, costs=costs, layers=1, draft_passes=0, needed=4.0, missing=4.0))
    assert (found.seconds, found.loads) == (pytest.approx(2 + seconds), pytest.approx(loads))


def test_one_missing_expert_takes_the_faster_path_on_average_too() -> None:
    # one of two experts is missing on average: 0, 1 or 2 of them with probabilities 1/4, 1/2 and 1/4
    costs = replace(COSTS, cpu=2.0, expert_share=0.0)
    found = predict_step(replace(STEP, costs=costs, layers=1, draft_passes=0, needed=2.0, missing=1.0))
    assert found.seconds == pytest.approx(2 + 0.5 * 2.0 + 0.25 * 3.0)
    assert found.loads == pytest.approx(0.25 * 1)


def test_draft_stage_hides_the_loads_it_predicts() -> None:
    drafted = replace(STEP, from_draft=PERFECT)
    fast_link = replace(drafted, costs=replace(COSTS, load=0.1))
    assert predict_step(fast_link).seconds == pytest.approx(10 + 4 * 2)
    # the link is busy from the end of the first pass until the last expert arrives
    slow = predict_step(drafted)
    assert slow.seconds == pytest.approx(5 + 4 * 3 + 1)
    assert predict_step(replace(drafted, cutoff=0)).seconds == predict_step(STEP).seconds
    half = predict_step(replace(drafted, cutoff=2)).seconds
    assert slow.seconds < half < predict_step(STEP).seconds


def test_wrong_predictions_use_the_link() -> None:
    wrong = predict_step(replace(STEP, from_draft=PredictionQuality(1.0, 0.5)))
    assert wrong.loads > predict_step(replace(STEP, from_draft=PERFECT)).loads
    assert wrong.loads <= 8


def test_previous_layer_hides_part_of_the_next_loads() -> None:
    # of the next layer's 3 seconds of loading, 2 overlap with its compute before the router
    found = predict_step(replace(COMPUTE_BEFORE_ROUTER, from_previous_layer=PERFECT))
    assert found.seconds == pytest.approx(10 + (2 + 3) + 3 * (2 + 1))
    both = replace(COMPUTE_BEFORE_ROUTER, from_draft=PredictionQuality(0.5, 1.0), from_previous_layer=PERFECT)
    assert predict_step(both).seconds < found.seconds


def test_perfect_prediction_is_bound_by_compute_or_by_the_link() -> None:
    assert predict_step(replace(PREDICTED_AT_ONCE, draft_passes=4)).seconds == pytest.approx(20 + 4 * 2)
    link_bound = replace(PREDICTED_AT_ONCE, costs=replace(COSTS, expert_share=0.0), draft_passes=1)
    assert predict_step(link_bound).seconds == pytest.approx(5 + 4 * 3)


def test_slots_bound_prefetching() -> None:
    drafted = replace(PREDICTED_AT_ONCE, draft_passes=11)
    assert predict_step(drafted).stall_seconds == pytest.approx(0.0, abs=1e-9)
    # two slots: two experts load before the first layer has run, and no more than two in the whole step
    assert predict_step(replace(drafted, slots=2)).stall_seconds == pytest.approx(2 * 3)
    # a second expert of each layer is resident: four of five slots are in use until layers have run
    tight = predict_step(replace(drafted, slots=5, needed=2.0)).stall_seconds
    assert 0.0 < tight < predict_step(replace(STEP, draft_passes=11, needed=2.0)).stall_seconds


shares = st.floats(0.05, 1.0)
qualities = st.just(NO_PREDICTION) | st.just(PERFECT) | st.builds(PredictionQuality, shares, shares)
steps = st.builds(
    StepInputs,
    costs=st.builds(StepCosts, *[st.floats(0.0, 2.0)] * 3, expert_share=st.floats(0.0, 1.0)),
    layers=st.integers(1, 12),
    draft_passes=st.integers(0, 5),
    cutoff=st.integers(0, 12),
    missing=st.floats(0.0, 4.0),
    needed=st.floats(4.0, 8.0),
    row_share=shares,
    from_draft=qualities,
    from_previous_layer=qualities,
    slots=st.just(inf) | st.integers(2, 60),
)


@quick
@given(steps)
def test_step_time_is_compute_plus_stalls(step: StepInputs) -> None:
    found = predict_step(step)
    compute = step.draft_passes * step.costs.draft_pass + step.layers * step.costs.verify_layer
    assert found.seconds == pytest.approx(compute + found.stall_seconds)
    assert found.stall_seconds >= -1e-9
    assert found.loads >= step.missing * step.layers * (1 - 1e-9)


@quick
@given(steps)
def test_precise_predictions_never_cost_time_and_a_free_link_is_fastest(step: StepInputs) -> None:
    found = predict_step(step).seconds
    on_demand = replace(step, from_draft=NO_PREDICTION, from_previous_layer=NO_PREDICTION)
    free = replace(step, costs=replace(step.costs, load=0.0))
    assert predict_step(free).seconds <= found * (1 + 1e-9)
    if step.from_draft.precision == step.from_previous_layer.precision == 1.0:
        assert found <= predict_step(on_demand).seconds * (1 + 1e-9)


# ---- demand

OBSERVED = ObservedDemand(layers=16, experts_per_layer=8, top_k=2, slots=32, rows=5, needed=5.0, missing=3.0)


def test_demand_at_the_observed_point_is_the_observed_one() -> None:
    assert OBSERVED.needed_for(5) == 5.0
    assert OBSERVED.missing_for(5, 32) == pytest.approx(3.0)


def test_needed_experts_grow_with_rows_as_under_uniform_routing() -> None:
    assert expected_experts(8, 2, 1) == pytest.approx(2.0)
    assert OBSERVED.needed_for(2) == pytest.approx(5.0 * 3.5 / (8 * (1 - 0.75**5)))
    assert OBSERVED.needed_for(1000) <= 8.0


def test_missing_share_is_a_power_of_the_share_without_slots() -> None:
    power = 1.7756  # 0.75 ** power = 3 / 5
    assert OBSERVED.missing_for(5, 64) == pytest.approx(5 * 0.5**power, rel=1e-3)
    assert OBSERVED.missing_for(5, 128) == 0.0
    assert OBSERVED.missing_for(5, 0) == 5.0


def test_missing_share_falls_back_to_uniform_routing() -> None:
    all_resident = replace(OBSERVED, slots=128, missing=0.0)
    assert all_resident.missing_for(5, 64) == pytest.approx(2.5)
    none_missing = replace(OBSERVED, missing=0.0)
    assert (none_missing.missing_for(5, 64), none_missing.missing_for(5, 16)) == (0.0, pytest.approx(5 * 0.875))
    all_missing = replace(OBSERVED, missing=5.0)
    assert (all_missing.missing_for(5, 100), all_missing.missing_for(5, 128)) == (5.0, 0.0)
