"""The latency model: steps played by hand, what must never make one faster, and needs at other budgets."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.errors import UsageError
from spmoe.predict.latency import POLICIES, Costs, Guess, Habits, Step, evenly_needed, predict_step

quick = settings(max_examples=150, deadline=None, derandomize=True)
SURE = Guess(1.0, 1.0)
# four layers of 2 seconds, of which half is after the router; one expert each, never resident, 3 seconds to load
COSTS = Costs(draft_pass=5.0, verify_layer=2.0, load=3.0, expert_share=0.5)
STEP = Step(COSTS, "on-demand", layers=4, passes=2, cutoff=4, missing=1.0, needed=1.0, row_share=0.5)
BEFORE = replace(STEP, costs=replace(COSTS, expert_share=0.0))  # everything is computed before the router chooses


def test_on_demand_each_layer_waits_for_its_own() -> None:
    found = predict_step(STEP)
    assert found.draft_seconds == 10.0
    assert found.seconds == pytest.approx(10 + 4 * (1 + 3 + 1))
    assert (found.stall_seconds, found.loads) == (pytest.approx(12), pytest.approx(4))


def test_what_is_there_is_computed_while_the_rest_arrives() -> None:
    # of two experts one is always there: half a second of compute hides in the load, and half comes after it
    found = predict_step(replace(STEP, needed=2.0, missing=1.0, by_layer=(2.0, 0.0, 0.0, 0.0)))
    assert found.seconds == pytest.approx(10 + 1 + (2 * 3 + 0.5) + 3 * 2)
    assert found.stall_seconds == pytest.approx(6 + 0.5 - 1)


def test_how_many_are_missing_varies_by_chance() -> None:
    # one of two experts missing on average: none, one or two of them with 1/4, 1/2, 1/4
    found = predict_step(replace(STEP, layers=1, passes=0, needed=2.0, missing=1.0, costs=replace(COSTS, load=0.6)))
    last = 1.0 / 2
    expected = 1 + last + 0.25 * 0.5 + 0.5 * max(0.5, 0.6) + 0.25 * max(0.5, 1.2)
    assert found.seconds == pytest.approx(expected)


def test_the_draft_hides_what_it_names() -> None:
    told = replace(STEP, policy="draft-gate", draft=SURE)
    # each pass names its part of every layer: after the first, 2/3 of an expert each, 8 seconds in all, 5 before the
    # second is over; the rest moves in the order of layers while they compute, and is asked for where it is late
    quick_link = replace(told, costs=replace(COSTS, load=0.1))
    assert predict_step(quick_link).seconds == pytest.approx(10 + 4 * 2)
    slow = predict_step(told)
    assert slow.seconds == pytest.approx(5 + 4 * 3 + 1)  # the link is busy from the first pass to the last expert
    assert predict_step(replace(told, cutoff=0)).seconds == predict_step(STEP).seconds
    half = predict_step(replace(told, cutoff=2)).seconds
    assert slow.seconds < half < predict_step(STEP).seconds


def test_what_is_named_in_vain_takes_the_link_too() -> None:
    wrong = predict_step(replace(STEP, policy="draft-gate", draft=Guess(1.0, 0.5)))
    assert wrong.loads > predict_step(replace(STEP, policy="draft-gate", draft=SURE)).loads
    assert wrong.loads <= 8


def test_a_layer_foretells_the_next() -> None:
    # all compute before the router: of the next layer's 3 seconds of loading, 2 pass while it computes
    found = predict_step(replace(BEFORE, policy="next-gate", own=SURE))
    assert found.seconds == pytest.approx(10 + (2 + 3) + 3 * (2 + 1))
    both = predict_step(replace(BEFORE, policy="draft-gate+next-gate", draft=Guess(0.5, 1.0), own=SURE))
    assert both.seconds < found.seconds


def test_the_oracle_begins_with_the_step() -> None:
    assert predict_step(replace(STEP, policy="oracle")).seconds == pytest.approx(10 + 4 * 2)
    assert predict_step(replace(BEFORE, policy="oracle", passes=0)).seconds == pytest.approx(4 * 3)


def test_slots_bound_what_can_be_had_before_it_is_needed() -> None:
    told = replace(STEP, policy="oracle", passes=10)
    assert predict_step(told).stall_seconds == pytest.approx(0.0, abs=1e-9)
    # two slots: two experts come before the first layer has run, and no more than two in the whole step
    assert predict_step(replace(told, slots=2)).stall_seconds == pytest.approx(2 * 3)
    # with a second expert of each layer resident, four of five slots are not to be had before layers have run
    tight = predict_step(replace(told, slots=5, needed=2.0)).stall_seconds
    assert 0.0 < tight < predict_step(replace(STEP, passes=10, needed=2.0)).stall_seconds


def test_copies_and_compute_slow_each_other_down() -> None:
    slower = replace(COSTS, load=1.0, compute_slowdown=2.0)
    found = predict_step(replace(STEP, policy="oracle", costs=slower))
    assert found.seconds == pytest.approx(10 + 4 / 2 + 4 * 2)  # four seconds of copies cost two of compute
    congested = replace(COSTS, load=2.0, link_slowdown=1.25)
    assert predict_step(replace(STEP, policy="oracle", costs=congested)).draft_seconds == pytest.approx(10.0)
    late = predict_step(replace(STEP, policy="oracle", costs=replace(congested, load=3.0), passes=1))
    assert late.seconds > predict_step(replace(STEP, policy="oracle", passes=1)).seconds


def test_a_policy_it_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the latency model knows on-demand, .* not activation"):
        predict_step(replace(STEP, policy="activation"))


shares = st.floats(0.05, 1.0)
steps = st.builds(
    Step,
    costs=st.builds(Costs, *[st.floats(0.0, 2.0)] * 3, expert_share=st.floats(0.0, 1.0)),
    policy=st.sampled_from(POLICIES),
    layers=st.integers(1, 12),
    passes=st.integers(0, 5),
    cutoff=st.integers(0, 12),
    missing=st.floats(0.0, 4.0),
    needed=st.floats(4.0, 8.0),
    row_share=shares,
    draft=st.builds(Guess, shares, shares),
    own=st.builds(Guess, shares, shares),
    slots=st.just(inf) | st.integers(2, 60),
)


@quick
@given(steps)
def test_a_step_is_its_compute_and_what_it_waits(step: Step) -> None:
    found = predict_step(step)
    compute = step.passes * step.costs.draft_pass + step.layers * step.costs.verify_layer
    assert found.seconds == pytest.approx(compute + found.stall_seconds)
    assert found.stall_seconds >= -1e-9
    assert found.loads >= step.missing * step.layers * (1 - 1e-9)


@quick
@given(steps)
def test_knowing_never_costs_time_and_nothing_beats_a_free_link(step: Step) -> None:
    found = predict_step(step).seconds
    without = replace(step, policy="on-demand")
    free = replace(step, costs=replace(step.costs, load=0.0))
    assert predict_step(free).seconds <= found * (1 + 1e-9)
    if step.draft.precision == step.own.precision == 1.0 or step.policy == "oracle":
        assert found <= predict_step(without).seconds * (1 + 1e-9)


# ---- needs

SHOWN = Habits(layers=16, experts_per_layer=8, top_k=2, slots=32, rows=5, needed=5.0, missing=3.0)


def test_needs_are_what_was_shown_where_they_were_shown() -> None:
    assert SHOWN.needed_for(5) == 5.0
    assert SHOWN.missing_for(5, 32) == pytest.approx(3.0)


def test_needs_grow_with_rows_as_even_routing_does() -> None:
    assert evenly_needed(8, 2, 1) == pytest.approx(2.0)
    assert SHOWN.needed_for(2) == pytest.approx(5.0 * 3.5 / (8 * (1 - 0.75**5)))
    assert SHOWN.needed_for(1000) <= 8.0


def test_the_missing_share_is_a_power_of_what_has_no_slot() -> None:
    power = 1.7756  # 0.75 ** power = 3 / 5
    assert SHOWN.missing_for(5, 64) == pytest.approx(5 * 0.5**power, rel=1e-3)
    assert SHOWN.missing_for(5, 128) == 0.0
    assert SHOWN.missing_for(5, 0) == 5.0


def test_a_run_that_shows_nothing_leaves_even_routing() -> None:
    everything = replace(SHOWN, slots=128, missing=0.0)
    assert everything.missing_for(5, 64) == pytest.approx(2.5)
    lucky = replace(SHOWN, missing=0.0)
    assert (lucky.missing_for(5, 64), lucky.missing_for(5, 16)) == (0.0, pytest.approx(5 * 0.875))
    thrashing = replace(SHOWN, missing=5.0)
    assert (thrashing.missing_for(5, 100), thrashing.missing_for(5, 128)) == (5.0, 0.0)
