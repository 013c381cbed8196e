"""The cutoff, compared with a brute-force search over its two bounds and over predicted step times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.predict.cutoff import CutoffInputs, Profile, fastest_cutoff, just_in_time_cutoff, step_seconds

ROUNDING = 1e-9
quick = settings(max_examples=200, deadline=None, derandomize=True)

seconds = st.floats(0.0, 1.0)
profiles = st.builds(
    Profile,
    draft_seconds_per_layer=seconds,
    draft_layers=st.integers(1, 48),
    verify_seconds_per_layer=seconds,
    seconds_per_expert=seconds,
    free_slots=st.integers(0, 400),
)


@st.composite
def all_inputs(draw: st.DrawFn) -> CutoffInputs:
    layers, experts = draw(st.integers(1, 32)), draw(st.integers(1, 64))
    return CutoffInputs(
        layers=layers,
        experts_per_layer=experts,
        top_k=draw(st.integers(1, experts)),
        slots=draw(st.integers(0, layers * experts + 5)),
        draft_tokens=draw(st.integers(0, 8)),
    )


def within_bounds(depth: int, profile: Profile, inputs: CutoffInputs, slack: float) -> bool:
    """Return whether both bounds hold for every layer up to `depth`."""
    k, n, t_io = inputs.missing_per_layer, inputs.needed_per_layer, profile.seconds_per_expert
    draft_stage = inputs.draft_tokens * profile.draft_layers * profile.draft_seconds_per_layer
    return all(
        layer * k <= (profile.free_slots + (layer - 1) * n) * (1 + slack)
        and layer * k * t_io <= (draft_stage + (layer - 1) * profile.verify_seconds_per_layer) * (1 + slack)
        for layer in range(1, depth + 1)
    )


@quick
@given(profiles, all_inputs())
def test_just_in_time_is_the_greatest_depth_within_both_bounds(profile: Profile, inputs: CutoffInputs) -> None:
    cutoff = just_in_time_cutoff(profile, inputs)
    assert 0 <= cutoff <= inputs.layers
    assert within_bounds(cutoff, profile, inputs, slack=ROUNDING)
    assert not any(
        within_bounds(deeper, profile, inputs, slack=-ROUNDING) for deeper in range(cutoff + 1, inputs.layers + 1)
    )


# Two experts, both always needed, half of them resident: one missing per layer, in exact numbers.
ONE_MISSING = CutoffInputs(layers=16, experts_per_layer=2, top_k=2, slots=16, draft_tokens=4)
AMPLE = Profile(
    draft_seconds_per_layer=1.0,
    draft_layers=8,
    verify_seconds_per_layer=2.0,
    seconds_per_expert=1.0,
    free_slots=100,
)


def test_bounds_include_equality() -> None:
    assert ONE_MISSING.missing_per_layer == 1.0
    assert just_in_time_cutoff(AMPLE, ONE_MISSING) == 16
    assert (
        just_in_time_cutoff(replace(AMPLE, free_slots=1), ONE_MISSING) == 16
    )  # each layer that has run frees two slots
    assert just_in_time_cutoff(replace(AMPLE, free_slots=0), ONE_MISSING) == 0
    # time: l * 4 <= 4 * 8 * 1 + (l - 1) * 2, so l <= 15
    assert just_in_time_cutoff(replace(AMPLE, seconds_per_expert=4.0), ONE_MISSING) == 15
    # l * 4 <= 4 * 3 * 1 + (l - 1) * 2, so l <= 5
    assert just_in_time_cutoff(replace(AMPLE, seconds_per_expert=4.0, draft_layers=3), ONE_MISSING) == 5


def test_learned_missing_experts_replace_the_uniform_estimate() -> None:
    slow = replace(AMPLE, seconds_per_expert=4.0, draft_layers=3)
    assert just_in_time_cutoff(slow, ONE_MISSING) == 5
    assert just_in_time_cutoff(replace(slow, missing_per_layer=0.5), ONE_MISSING) == 16  # l * 2 <= 12 + (l - 1) * 2
    assert just_in_time_cutoff(replace(slow, missing_per_layer=2.0), ONE_MISSING) == 1  # l * 8 <= 12 + (l - 1) * 2
    assert just_in_time_cutoff(replace(slow, missing_per_layer=0.0), ONE_MISSING) == 16


def test_every_layer_up_to_the_cutoff_must_be_in_time() -> None:
    # layer 16 would be in time, but layer 1 is late
    late_first_layer = replace(AMPLE, draft_layers=1, seconds_per_expert=5.0, verify_seconds_per_layer=9.0)
    assert 16 * 5.0 <= 4 * 1 * 1.0 + 15 * 9.0
    assert just_in_time_cutoff(late_first_layer, ONE_MISSING) == 0


def test_just_in_time_is_zero_without_draft_tokens() -> None:
    assert just_in_time_cutoff(AMPLE, replace(ONE_MISSING, draft_tokens=0)) == 0
    assert just_in_time_cutoff(replace(AMPLE, seconds_per_expert=0.0), replace(ONE_MISSING, draft_tokens=0)) == 16


@pytest.mark.parametrize("slots", [32, 33, 1000])
def test_prefetches_all_layers_if_nothing_is_missing(slots: int) -> None:
    no_time_or_slots = Profile(0.0, 1, 0.0, seconds_per_expert=1e9, free_slots=-1)
    inputs = replace(ONE_MISSING, slots=slots)
    assert inputs.missing_per_layer == 0.0
    assert just_in_time_cutoff(no_time_or_slots, inputs) == 16
    assert just_in_time_cutoff(no_time_or_slots, replace(inputs, slots=31)) == 0


# ---- monotone in slots and times


@quick
@given(profiles, all_inputs(), st.integers(0, 100))
def test_more_slots_never_lower_the_cutoff(profile: Profile, inputs: CutoffInputs, more: int) -> None:
    cutoff = just_in_time_cutoff(profile, inputs)
    assert just_in_time_cutoff(profile, replace(inputs, slots=inputs.slots + more)) >= cutoff
    assert just_in_time_cutoff(replace(profile, free_slots=profile.free_slots + more), inputs) >= cutoff


@quick
@given(profiles, all_inputs(), st.floats(1.0, 10.0))
def test_slower_link_never_raises_the_cutoff(profile: Profile, inputs: CutoffInputs, factor: float) -> None:
    slower = replace(profile, seconds_per_expert=profile.seconds_per_expert * factor)
    assert just_in_time_cutoff(slower, inputs) <= just_in_time_cutoff(profile, inputs)


@quick
@given(profiles, all_inputs(), st.integers(0, 8))
def test_more_compute_time_never_lowers_the_cutoff(profile: Profile, inputs: CutoffInputs, more: int) -> None:
    cutoff = just_in_time_cutoff(profile, inputs)
    assert just_in_time_cutoff(replace(profile, draft_layers=profile.draft_layers + more), inputs) >= cutoff
    for name in ("draft_seconds_per_layer", "verify_seconds_per_layer"):
        longer = replace(profile, **{name: getattr(profile, name) * (1 + more)})
        assert just_in_time_cutoff(longer, inputs) >= cutoff


@quick
@given(profiles, all_inputs(), st.integers(0, 8))
def test_more_draft_tokens_never_lower_the_cutoff_if_they_need_no_more_experts(
    profile: Profile, inputs: CutoffInputs, more: int
) -> None:
    # every expert is needed whatever K is, so K only lengthens the draft stage
    inputs = replace(inputs, top_k=inputs.experts_per_layer)
    longer = replace(inputs, draft_tokens=inputs.draft_tokens + more)
    assert just_in_time_cutoff(profile, longer) >= just_in_time_cutoff(profile, inputs)


# ---- the fastest cutoff


@quick
@given(profiles, all_inputs())
def test_no_depth_that_fits_the_slots_is_predicted_to_be_faster(profile: Profile, inputs: CutoffInputs) -> None:
    chosen, k, n = fastest_cutoff(profile, inputs), inputs.missing_per_layer, inputs.needed_per_layer
    if k == 0.0:
        assert chosen == inputs.layers
        return
    fitting = [0]
    while fitting[-1] < inputs.layers and (fitting[-1] + 1) * k <= profile.free_slots + fitting[-1] * n:
        fitting.append(fitting[-1] + 1)
    best = min(step_seconds(profile, inputs, depth) for depth in fitting)
    assert chosen in fitting
    assert step_seconds(profile, inputs, chosen) <= 1.005 * best * (1 + ROUNDING)
    if chosen == 0:
        return
    rejected = [0, *(depth for depth in fitting if depth > chosen)]
    assert all(step_seconds(profile, inputs, depth) > 1.005 * best * (1 - ROUNDING) for depth in rejected)


def test_step_times_computed_by_hand() -> None:
    # nothing prefetched: a draft stage of 4 * 8 seconds, then 16 layers that load for 1 and compute for 2 seconds
    assert step_seconds(AMPLE, ONE_MISSING, 0) == pytest.approx(32 + 16 * 3)
    # all prefetched in time, except the tenth that was not predicted
    assert step_seconds(AMPLE, ONE_MISSING, 16) == pytest.approx(32 + 16 * 2.1)
    # 100 seconds per expert: the link is never idle after the first pass; a twentieth of the prefetches, which load in
    # the other three passes and while layers compute, is wasted
    slow = replace(AMPLE, seconds_per_expert=100.0)
    assert step_seconds(slow, ONE_MISSING, 16) == pytest.approx(8 + 16 * 100 + 0.05 * (24 + 16 * 2))


def test_auto_prefetches_over_a_slow_link_deeper_than_just_in_time() -> None:
    slow = replace(AMPLE, seconds_per_expert=4.0, draft_layers=1)
    assert just_in_time_cutoff(slow, ONE_MISSING) == 1
    assert fastest_cutoff(slow, ONE_MISSING) == 16
    assert fastest_cutoff(replace(slow, seconds_per_expert=0.0), ONE_MISSING) == 0, "loads cost nothing"


def test_rejects_depths_that_do_not_fit_the_slots() -> None:
    assert fastest_cutoff(replace(AMPLE, free_slots=0), ONE_MISSING) == 0
    assert fastest_cutoff(replace(AMPLE, free_slots=1), ONE_MISSING) == 16, "each layer that has run frees two slots"


def test_rejects_depths_that_are_predicted_to_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {depth: 1.0 + abs(depth - 5) * 0.002 for depth in range(17)}
    monkeypatch.setattr("spmoe.predict.cutoff.step_seconds", lambda profile, inputs, depth: times[depth])
    assert fastest_cutoff(AMPLE, ONE_MISSING) == 7, "differences below 0.5 % are ignored"
    times[0] = 1.004
    assert fastest_cutoff(AMPLE, ONE_MISSING) == 0, "depth 0 is as fast as the fastest"


@pytest.mark.parametrize(
    ("times", "missing", "inputs", "auto", "just_in_time", "seconds"),
    [  # times: draft and verify per layer, per expert; inputs: layers, experts, top_k, slots, K
        ((7.5e-5, 3e-4, 3.2e-4), None, (26, 64, 6, 416, 4), 26, 0, 0.156791549),
        ((7.5e-5, 3e-4, 3.2e-4), None, (26, 64, 6, 1248, 4), 26, 2, 0.0533034152),
        ((7.5e-5, 3e-4, 3.2e-4), 7.1, (26, 64, 6, 1248, 4), 26, 2, 0.060627506),
        ((6e-4, 1.2e-3, 6.4e-3), None, (32, 8, 2, 64, 4), 32, 1, 0.949319209),
        ((6e-4, 1.2e-3, 6.4e-3), 0.4, (32, 8, 2, 230, 8), 32, 32, 0.122490947),
        ((3e-4, 3e-3, 1e-3), None, (16, 8, 2, 32, 4), 16, 10, 0.0807002247),
        ((3e-4, 3e-3, 1e-6), None, (16, 8, 2, 32, 4), 0, 16, 0.0672),
        ((3e-4, 3e-3, 1e-3), None, (16, 8, 2, 9, 4), 0, 0, 0.133880867),
    ],
)
def test_choices_for_typical_machines(
    times: tuple[float, float, float],
    missing: float | None,
    inputs: tuple[int, int, int, int, int],
    auto: int,
    just_in_time: int,
    seconds: float,
) -> None:
    made, (draft, verify, load) = CutoffInputs(*inputs), times
    profile = Profile(draft, 16, verify, load, made.free_slots, missing, expert_share=0.6)
    assert (fastest_cutoff(profile, made), just_in_time_cutoff(profile, made)) == (auto, just_in_time)
    assert step_seconds(profile, made, auto) == pytest.approx(seconds)


# ---- missing experts


@pytest.mark.parametrize(
    ("top_k", "slots", "draft_tokens", "missing"),
    [
        (2, 0, 0, 2.0),  # one row needs top_k experts, none is resident
        (2, 0, 1, 3.5),  # two rows share half an expert: 8 * (1 - 0.75 ** 2)
        (2, 16, 1, 1.75),  # half of all experts are resident
        (8, 0, 5, 8.0),  # every expert is needed
        (2, 32, 4, 0.0),
        (2, 40, 4, 0.0),
    ],
)
def test_missing_experts_under_uniform_routing(top_k: int, slots: int, draft_tokens: int, missing: float) -> None:
    assert CutoffInputs(4, 8, top_k, slots, draft_tokens).missing_per_layer == pytest.approx(missing)


@quick
@given(all_inputs())
def test_missing_experts_are_at_most_the_needed_experts(inputs: CutoffInputs) -> None:
    needed = min(inputs.experts_per_layer, (inputs.draft_tokens + 1) * inputs.top_k)
    assert 0.0 <= inputs.missing_per_layer <= needed * (1 + ROUNDING)
    more = replace(inputs, draft_tokens=inputs.draft_tokens + 1).missing_per_layer
    assert more >= inputs.missing_per_layer * (1 - ROUNDING)
