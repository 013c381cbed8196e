"""Prefetch admission: what a prefetch is worth, how often predictions are right, and when they are paused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.predict.admission import Benefit, Precision, PrefetchAdmission
from spmoe.predict.costs import CostPrior, Rates, StepReport
from spmoe.types import NO_PREFETCHES, ExpertKey, PrefetchRequest, PrefetchRequests

LAYERS, EXPERTS, TOP_K = 6, 8, 2
DRAFTING = -1  # the layer that runs, while the draft does
TARGET_PASS = 16  # the class of predictions from the target's own layers
SURE = 0.9  # score of a prediction, where it does not matter


def predicted(*keys: tuple[int, int], score: float = SURE) -> PrefetchRequests:
    """Return the prediction of these (layer, expert)."""
    return PrefetchRequests.of(PrefetchRequest(ExpertKey(*key), score, key[0]) for key in keys)


def keys(requests: PrefetchRequests) -> list[tuple[int, int]]:
    return [(request.key.layer, request.key.expert) for request in requests]


def make_admission(rates: Rates, precision: float = 1.0) -> PrefetchAdmission:
    """Make an admission whose predictions were right this often."""
    admission = PrefetchAdmission(LAYERS, EXPERTS, TOP_K, rates)
    admission.precision.rates[:] = precision
    return admission


def admit(
    admission: PrefetchAdmission, requests: PrefetchRequests, layer: int = DRAFTING, absent: bool = True
) -> PrefetchRequests:
    return admission.admit(requests, np.full(len(requests), absent), layer)


def make_rates(**values: float) -> Rates:
    """Make rates whose copies, draft passes and pairs of layers take a second each, and whose link is idle."""
    return Rates(**{"load": 1.0, "draft_pass": 1.0, "layer": 0.5, "busy": 0.0, **values})


# ---- precision


def test_scores_are_classified_by_the_even_share_of_a_row() -> None:
    precision = Precision(LAYERS, TOP_K)
    zeros = np.zeros(5, dtype=np.int64)
    even = 1 / TOP_K
    found = precision.classes(zeros, zeros, np.array([0.0, even - 1e-9, even, 2 * even - 1e-9, 1.0]))
    assert found.tolist() == [0, 3, 4, 7, 7]


def test_classes_tell_layers_passes_and_scores_apart() -> None:
    precision = Precision(LAYERS, TOP_K)
    every = [
        precision.classes(np.array([layer]), one, np.array([score])).item()
        for layer in range(LAYERS)
        for one in range(TARGET_PASS + 1)
        for score in np.arange(8) / 8
    ]
    assert sorted(every) == list(range(precision.rates.size))


def test_precision_is_learned_and_followed_by_narrower_classes() -> None:
    """A class without predictions has the rate of the next wider class."""
    precision, count = Precision(LAYERS, TOP_K), 6
    learned = np.full(count, precision.classes(np.array([2]), 1, np.array([0.6])).item())
    right = np.array([True] * 5 + [False])
    precision.learn(learned, right)
    expected = [0.5]
    for _ in range(3):  # by score; by pass and score; by layer, pass and score
        expected.append((5 + 4 * expected[-1]) / (count + 4))
    _, score, with_pass, own = expected
    rates = precision.rates
    assert rates[2, 1, 4] == pytest.approx(own)
    assert rates[3, 1, 4] == pytest.approx(with_pass), "another layer"
    assert rates[2, 5, 4] == rates[3, 5, 4] == pytest.approx(score), "another pass"
    assert rates[2, 1, 5] == 0.5, "another score"
    assert 0.5 < score < with_pass < own < 5 / 6


def test_many_predictions_outweigh_the_wider_class() -> None:
    precision, at = Precision(LAYERS, TOP_K), np.arange(LAYERS)
    classes = precision.classes(np.tile(at, 2), np.repeat([0, 1], LAYERS), np.full(2 * LAYERS, 0.6))
    right = np.concatenate((at == 0, at != 5))  # pass 0 is right about layer 0 only, pass 1 wrong about layer 5 only
    for _ in range(200):
        precision.learn(classes, right)
    found = precision.rates[:, :2, 4]
    assert found[0, 0] > 0.9
    assert found[1:, 0].max() < 0.1
    assert found[:5, 1].min() > 0.9
    assert found[5, 1] < 0.1


def test_recent_predictions_count_more() -> None:
    precision = Precision(LAYERS, TOP_K)
    one = precision.classes(np.array([0]), 0, np.array([SURE]))
    for right in [True] * 400 + [False] * 200:
        precision.learn(one, np.array([right]))
    assert precision.rates.ravel()[one].item() < 0.15


def test_a_step_that_stands_for_several_decays_the_counts_as_often() -> None:
    single, several = Precision(LAYERS, TOP_K), Precision(LAYERS, TOP_K)
    one = single.classes(np.array([0]), 0, np.array([SURE]))
    nothing = np.zeros(0, dtype=np.int64)
    for precision in (single, several):
        precision.learn(np.repeat(one, 20), np.ones(20, dtype=bool))
    for _ in range(3):
        single.learn(nothing, nothing)
    single.learn(one, np.array([False]))
    several.learn(one, np.array([False]), steps=4)
    np.testing.assert_allclose(single.rates, several.rates)


def assert_learned(predictions: Sequence[tuple[PrefetchRequests, int]], expected: Sequence[tuple[int, int]]) -> None:
    """Run a step of predictions, each while this layer runs; check the (layer, pass) that each expert counts for."""
    admission, precision = make_admission(make_rates()), Precision(LAYERS, TOP_K)
    admission.begin_step(20)
    for requests, layer in predictions:
        admit(admission, requests, layer, absent=False)
    for layer in range(LAYERS):
        admission.on_routed(layer, [1])
    admission.begin_step(20)
    layers, passes = np.array(expected).T
    scores, experts = (np.concatenate([getattr(one, name) for one, _ in predictions]) for name in ("scores", "experts"))
    precision.learn(precision.classes(layers, passes, scores), experts == 1)
    np.testing.assert_allclose(admission.precision.rates, precision.rates)


def test_predictions_are_learned_by_layer_pass_and_score_also_if_none_is_absent() -> None:
    first, second, third = predicted((0, 1), (3, 2), score=0.6), predicted((3, 5), score=0.1), predicted((3, 1))
    assert_learned([(first, DRAFTING), (second, DRAFTING), (third, 1)], [(0, 0), (3, 0), (3, 1), (3, TARGET_PASS)])


def test_long_drafts_share_the_class_of_the_last_pass() -> None:
    passes = [min(number, TARGET_PASS - 1) for number in range(20)]
    assert_learned([(predicted((2, 1)), DRAFTING)] * 20, [(2, number) for number in passes])


def test_needed_experts_are_right_and_others_wrong() -> None:
    admission = PrefetchAdmission(LAYERS, EXPERTS, TOP_K, make_rates())
    for _ in range(17):
        admission.begin_step(1)
        admit(admission, predicted((2, 1), score=0.6))
        admit(admission, predicted((2, 3), score=0.1))
        admission.on_routed(2, [1, 4])
        admission.on_routed(3, [3])  # another layer's expert 3
    rates = admission.precision.rates
    assert rates[2, 0, 4] > 0.8
    assert rates[2, 1, 0] < 0.2


def test_one_of_four_steps_is_learned_from_after_the_first() -> None:
    admission, learned = make_admission(make_rates()), []
    for number in range(1, 29):
        before = admission.precision.rates
        admission.begin_step(1)
        if admission.precision.rates is not before:
            learned.append(number - 1)
        admit(admission, predicted((0, 0)))
    assert learned == [*range(1, 17), 20, 24]


# ---- worth


@pytest.mark.parametrize(
    ("k", "running", "layer", "precision", "rates", "worth"),
    [
        # idle: three passes of the draft are left, and a copy takes one
        (4, DRAFTING, 0, 1.0, make_rates(), 1.0),
        (4, DRAFTING, 0, 0.7, make_rates(), 0.7),
        (4, DRAFTING, 0, 0.0, make_rates(), None),
        # idle: the draft is over; a layer takes half as long as a copy
        (1, DRAFTING, 0, 1.0, make_rates(), None),
        (1, DRAFTING, 1, 1.0, make_rates(), 0.5),
        (1, DRAFTING, 1, 0.8, make_rates(), 0.3),
        (1, DRAFTING, 1, 0.4, make_rates(), None),
        (1, DRAFTING, 2, 0.8, make_rates(), 0.8),
        (1, DRAFTING, 5, 0.8, make_rates(), 0.8),
        (1, DRAFTING, 1, 1.0, make_rates(load=4.0), 0.125),
        # the target's own layers predict; `running` of them are over
        (1, 2, 3, 0.9, make_rates(), 0.4),
        (1, 2, 5, 0.9, make_rates(), 0.9),
        (0, 2, 3, 0.9, make_rates(draft_pass=0.0), 0.4),
        (0, 0, 1, 0.9, make_rates(draft_pass=0.0, layer=2.0), 0.9),
        # a busy link: copies that end before the draft does delay nothing
        (4, DRAFTING, 0, 0.7, make_rates(busy=0.6), 0.7),
        (2, DRAFTING, 0, 0.7, make_rates(busy=0.6), 0.7),
        (2, DRAFTING, 4, 0.7, make_rates(busy=0.6, load=1.001), 0.1),
        (1, DRAFTING, 2, 0.7, make_rates(busy=0.6), 0.1),
        (1, DRAFTING, 2, 0.5, make_rates(busy=0.6), None),
        (4, 0, 2, 0.9, make_rates(busy=0.6), 0.3),
    ],
)
def test_worth_is_the_hidden_share_less_the_chance_of_waste_and_of_delay(
    k: int, running: int, layer: int, precision: float, rates: Rates, worth: float | None
) -> None:
    admission = make_admission(rates, precision)
    admission.begin_step(k)
    found = admit(admission, predicted((layer, 3)), running)
    if worth is None:
        assert not len(found)
    else:
        assert keys(found) == [(layer, 3)]
        assert found.worth == pytest.approx([worth])


def test_later_passes_leave_less_of_the_draft() -> None:
    for passes, worth in ((1, [1.0]), (2, [0.5]), (3, [])):
        admission = make_admission(make_rates(load=2.0))
        admission.begin_step(3)
        for _ in range(passes - 1):
            assert not len(admit(admission, predicted((0, 0)), absent=False))
        found = admit(admission, predicted((0, 0)))
        assert [one.worth for one in found] == pytest.approx(worth)


def test_precision_of_the_own_class_decides() -> None:
    admission = make_admission(make_rates(busy=0.3), 0.2)
    admission.precision.rates[3, 0, 7] = 0.8
    admission.begin_step(1)
    found = admit(admission, predicted((2, 0), (3, 0), (4, 0)))
    assert keys(found) == [(3, 0)]
    assert found.worth == pytest.approx([0.5])


@pytest.mark.parametrize("k", [0, 1, 2])
def test_nothing_is_admitted_when_the_link_is_always_busy(k: int) -> None:
    """No copy ends before the draft does, so each would delay an expert that a router demands."""
    admission = make_admission(make_rates(busy=1.0, load=1.5), 1.0)
    every = predicted(*((layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)))
    for _ in range(3):
        admission.begin_step(k)
        for _ in range(k):
            assert not len(admit(admission, every))
        for layer in range(LAYERS):
            assert not len(admit(admission, every.where(every.layers > layer), layer))


@pytest.mark.parametrize("unknown", ["load", "layer", "draft_pass"])
def test_nothing_is_admitted_before_the_rates_are_known(unknown: str) -> None:
    rates = make_rates(**{unknown: 0.0})
    admission = make_admission(rates)
    admission.begin_step(4)
    assert not len(admit(admission, predicted((3, 0))))
    setattr(rates, unknown, 1.0)
    admission.begin_step(4)
    assert keys(admit(admission, predicted((3, 0)))) == [(3, 0)]


def test_prompts_admit_every_absent_expert_and_teach_nothing() -> None:
    admission = PrefetchAdmission(LAYERS, EXPERTS, TOP_K, Rates(busy=1.0))
    before = admission.precision.rates
    requests = predicted((0, 0), (0, 1), (5, 7), score=0.01)
    admission.begin_step(None)
    for _ in range(2):
        found = admission.admit(requests, np.array([True, False, True]), DRAFTING)
        assert keys(found) == [(0, 0), (5, 7)]
        assert found.worth is None, "any resident that scores less may be evicted"
    admission.on_routed(0, [3])
    admission.begin_step(None)
    assert admission.precision.rates is before


# ---- several prefetches


@pytest.mark.parametrize("later", [DRAFTING, 1])
def test_admitted_experts_are_not_admitted_again_in_the_same_step(later: int) -> None:
    admission = make_admission(make_rates())
    admission.begin_step(8)
    assert keys(admit(admission, predicted((3, 0)))) == [(3, 0)]
    assert keys(admit(admission, predicted((3, 0), (3, 1)), later)) == [(3, 1)]
    assert admit(admission, predicted((3, 0), (3, 1)), later) is NO_PREFETCHES
    admission.begin_step(8)
    assert keys(admit(admission, predicted((3, 0), (3, 1)))) == [(3, 0), (3, 1)]


def test_experts_that_only_the_target_predicted_are_admitted_again_in_the_next_step() -> None:
    admission = make_admission(make_rates(layer=2.0))
    for _ in range(3):
        admission.begin_step(0)
        assert keys(admit(admission, predicted((1, 0)), 0)) == [(1, 0)]
        assert not len(admit(admission, predicted((1, 0)), 0))


def test_prefetches_that_are_due_no_later_use_up_idle_time() -> None:
    """After one of three passes there is time for two copies until layer 0 runs, and half a copy more per layer."""
    admission = make_admission(make_rates(), 0.9)
    admission.begin_step(3)
    found = admit(admission, predicted(*((0, expert) for expert in range(4))))
    assert keys(found) == [(0, 0), (0, 1)]
    assert found.worth == pytest.approx([0.9, 0.9])
    admission = make_admission(make_rates(), 0.9)
    admission.begin_step(3)
    found = admit(admission, predicted((5, 0), (1, 0), (0, 0), (0, 1), (1, 1)))
    assert keys(found) == [(0, 0), (0, 1), (1, 0), (5, 0)], "in the order of their layers"
    assert found.worth == pytest.approx([0.9, 0.9, 0.4, 0.9])


def test_prefetches_that_are_due_later_use_up_no_idle_time() -> None:
    admission = make_admission(make_rates())
    admission.begin_step(2)
    assert len(admit(admission, predicted((4, 0), (4, 1), (5, 0)))) == 3
    assert keys(admit(admission, predicted((0, 0)))) == [(0, 0)]


def test_of_experts_due_together_the_likelier_come_first() -> None:
    admission = make_admission(make_rates())
    admission.precision.rates[0, 0] = np.linspace(0.3, 1.0, 8)
    admission.begin_step(2)  # time for one copy
    requests = PrefetchRequests.of(
        PrefetchRequest(ExpertKey(0, expert), score, 0) for expert, score in enumerate((0.3, 0.9, 0.6))
    )
    found = admit(admission, requests)
    assert keys(found) == [(0, 1)]
    assert found.worth == pytest.approx([1.0])


def test_prefetches_admitted_before_use_up_idle_time() -> None:
    """After one of four passes, 4.5 s are left until layer 3 runs: time for two copies and a part of a third."""
    admission = make_admission(make_rates(load=2.0))
    admission.begin_step(4)
    found = admit(admission, predicted(*((layer, expert) for layer in (3, 4) for expert in range(4))))
    assert keys(found) == [(3, 0), (3, 1), (3, 2)]
    assert found.worth == pytest.approx([1.0, 1.0, 0.25])
    assert not len(admit(admission, predicted((3, 3), (4, 0))))
    assert keys(admit(admission, predicted((0, 0)))) == [(0, 0)], "due before all of them"
    assert not len(admit(admission, predicted((5, 0)))), "due after them"


def test_predictions_of_a_pass_admit_the_same_together_or_one_after_the_other() -> None:
    """Chunks of layers are predicted one after the other; the link is not idle again for the second chunk."""
    found = []
    for predictions in (
        [predicted((0, 0), (1, 0), (1, 1))],
        [predicted((0, 0)), predicted((1, 0), (1, 1))],
    ):
        admission = make_admission(make_rates())
        admission.begin_step(2)
        found.append([key for requests in predictions for key in keys(admit(admission, requests))])
    assert found == [[(0, 0), (1, 0)]] * 2


rates_of_parts = st.floats(1e-5, 1.0)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    rates=st.builds(Rates, rates_of_parts, rates_of_parts, rates_of_parts, st.floats(0.0, 1.0)),
    k=st.integers(0, 6),
    precisions=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    predictions=st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1), st.floats(0.0, 1.0), st.booleans()),
                min_size=1,
                max_size=12,
            ),
            st.integers(DRAFTING, LAYERS - 2),
        ),
        max_size=8,
    ),
)
def test_admitted_experts_are_absent_and_worth_at_most_one_copy(
    rates: Rates,
    k: int,
    precisions: list[float],
    predictions: list[tuple[list[tuple[int, int, float, bool]], int]],
) -> None:
    admission, admitted = make_admission(rates), set[ExpertKey]()
    admission.precision.rates[:] = precisions
    admission.begin_step(k)
    for given_requests, layer in sorted(predictions, key=lambda one: one[1]):
        absent = {ExpertKey(at, expert): missing for at, expert, _, missing in given_requests}
        requests = PrefetchRequests.of(
            PrefetchRequest(ExpertKey(at, expert), score, at) for at, expert, score, _ in given_requests if at > layer
        )
        if not len(requests):
            continue
        found = admission.admit(requests, np.array([absent[one.key] for one in requests]), layer)
        for request in found:
            assert absent[request.key]
            assert request.key not in admitted
            assert 0.0 < request.worth <= 1.0
            admitted.add(request.key)
        by_key = {request.key: request for request in requests}
        assert all(by_key[one.key].score == one.score for one in found)


# ---- pauses


def steps_until(benefit: Benefit, paused: bool, saved: float, spent: float, most: int = 5000) -> int:
    """Report equal steps until predictions are paused, or not; return how many."""
    for number in range(1, most + 1):
        benefit.add_step(saved, spent)
        if benefit.paused == paused:
            return number
    raise AssertionError(f"still {'not ' if paused else ''}paused after {most} steps")


def test_predictions_are_paused_while_they_cost_more_than_they_save() -> None:
    benefit = Benefit()
    for _ in range(200):
        benefit.add_step(1.0, 0.29)
        assert not benefit.paused
    assert steps_until(benefit, True, 1.0, 0.5) < 12, "judged after every step"
    benefit = Benefit()
    assert steps_until(benefit, True, 1.0, 0.31) == 12, "0.3 of the expected saving is realized"


def test_pauses_get_longer_until_predictions_pay() -> None:
    benefit, pauses = Benefit(), []
    for _ in range(7):
        assert steps_until(benefit, True, 0.0, 1.0) == 12
        pauses.append(steps_until(benefit, False, 0.0, 0.0))
    assert pauses == [64, 128, 256, 512, 1024, 1024, 1024]
    for _ in range(3000):
        benefit.add_step(1.0, 0.01)
    assert not benefit.paused
    steps_until(benefit, True, 0.0, 1.0)
    assert steps_until(benefit, False, 0.0, 0.0) == 64


def test_only_steps_after_a_pause_decide_about_the_next() -> None:
    benefit = Benefit()
    for _ in range(100):
        benefit.add_step(1.0, 0.01)
    for _ in range(3):
        steps_until(benefit, True, 0.0, 1.0)
        steps_until(benefit, False, 0.0, 0.0)
    for _ in range(50):
        benefit.add_step(1.0, 0.01)
        assert not benefit.paused


def test_one_slow_step_does_not_pause_predictions() -> None:
    benefit = Benefit()
    for number in range(100):
        benefit.add_step(1.0, 2.0 if number == 50 else 0.05)
        assert not benefit.paused


def run_steps(admission: PrefetchAdmission, count: int, effort: float, k: int = 4) -> list[bool]:
    """Run steps that predict, unless they are paused; return whether each was."""
    found = []
    for _ in range(count):
        admission.begin_step(k)
        found.append(admission.paused)
        if not admission.paused:
            admit(admission, predicted((3, 0)), DRAFTING if k else 0)
            admission.on_routed(3, [0])
            admission.add_effort(effort)
    return found


@pytest.mark.parametrize("k", [4, 1])
def test_admission_pauses_and_resumes(k: int) -> None:
    """Each step is expected to save most of a copy, which takes a second."""
    assert not any(run_steps(make_admission(make_rates()), 100, 0.1, k))
    admission = make_admission(make_rates())
    found = run_steps(admission, 12 + 64 + 12 + 128 + 1, 0.9, k)
    assert found == [False] * 12 + [True] * 64 + [False] * 12 + [True] * 128 + [False]


def test_prompts_are_never_paused() -> None:
    admission = make_admission(make_rates())
    assert run_steps(admission, 20, 9.0)[-1]
    admission.begin_step(None)
    assert not admission.paused
    assert len(admit(admission, predicted((0, 0))))
    admission.begin_step(4)
    assert admission.paused


def test_nothing_that_is_admitted_is_paused_too() -> None:
    admission = make_admission(make_rates(busy=1.0, load=9.0))  # nothing is admitted
    assert run_steps(admission, 13, 1e-6)[-1]


def test_predictions_without_a_draft_are_paused_too() -> None:
    admission = make_admission(make_rates(draft_pass=0.0), 0.5)
    assert any(run_steps(admission, 100, 9.0, k=0))


# ---- rates


def report(seconds: float, missing: float = 0.0, **values: Any) -> StepReport:
    """Return a step of so many seconds, all of verification unless `values` say otherwise."""
    return StepReport(
        **{"k": 0, "drafted": 0, "accepted": 0, "needed": 40, "verify_seconds": seconds, **values},
        seconds=seconds,
        missing=missing,
    )


def test_rates_start_from_a_prior() -> None:
    assert Rates.of(None, 8) == Rates()
    assert Rates.of(CostPrior(base=0.4, load=0.01, row=0.02), 8) == Rates(0.01, 0.02, 0.05, 0.0)


@pytest.mark.parametrize(
    "step",
    [
        report(1.0, 10, verify_seconds=0.0),
        report(1.0, 10, verify_seconds=1.5),
        report(math.inf, 10),
        report(math.nan, 10),
    ],
)
def test_steps_that_were_not_measured_teach_nothing(step: StepReport) -> None:
    rates = make_rates()
    rates.learn(step, 4)
    assert rates == make_rates()


def test_load_is_at_most_the_time_of_a_step_per_copy() -> None:
    rates = Rates()
    for seconds, missing, expected in [
        (1.0, 10, 0.1),
        (0.5, 10, 0.05),
        (0.09, 3, 0.05),  # too few copies
        (0.9, 4, 0.05),  # the link was idle most of the time
        (0.2, 0, 0.05),
        (0.16, 4, 0.04),
    ]:
        rates.learn(report(seconds, missing), 4)
        assert rates.load == pytest.approx(expected)


def test_load_grows_slowly_in_steps_that_the_link_bounds() -> None:
    rates = Rates(load=0.05)
    rates.learn(report(0.0624 * 8, 8), 4)  # busy for more than 0.8 of the step
    assert rates.load == pytest.approx(1.02 * 0.05)
    for _ in range(40):
        rates.learn(report(0.0624 * 8, 8), 4)
    assert rates.load == pytest.approx(0.0624)
    rates = Rates(load=0.05)
    for _ in range(40):
        rates.learn(report(0.0626 * 8, 8), 4)
    assert rates.load == 0.05, "such steps may have waited for something else"


def test_load_never_exceeds_the_bound_of_the_latest_step() -> None:
    rng, rates = np.random.default_rng(3), Rates()
    for _ in range(500):
        seconds, missing = float(rng.uniform(0.5, 2.0)), int(rng.integers(4, 40))
        rates.learn(report(seconds, missing), 4)
        assert 0.0 < rates.load <= seconds / missing


def test_layer_is_compute_that_no_copy_hides() -> None:
    for stall, demanded, expected in [
        (0.0, 0, 0.2),
        (0.4, 0, 0.1),
        (0.4, 4, 0.1),  # all of the copies was waited for
        (0.4, 6, 0.05),  # two more copies ran beside compute
        (0.4, 20, 0.0),
        (0.9, 2, 0.0),
    ]:
        rates = Rates(load=0.1)
        rates.learn(report(0.8, 3, stall_seconds=stall, demanded=demanded), 4)
        assert rates.layer == pytest.approx(expected)


def test_busy_is_the_share_of_copies_in_the_verification() -> None:
    rates = Rates(load=0.1)
    rates.learn(report(1.0, 3, verify_seconds=0.6), 4)
    assert rates.busy == pytest.approx(0.5)
    rates.learn(report(1.0, 0, verify_seconds=0.6), 4)
    assert rates.busy == pytest.approx(0.45)
    rates = Rates(load=0.1)
    rates.learn(report(1.0, 10, verify_seconds=0.5), 4)
    assert rates.busy == 1.0


def test_draft_passes_are_learned_from_undisturbed_drafts() -> None:
    rates = Rates()
    draft = {"k": 4, "drafted": 4, "verify_seconds": 0.2}
    rates.learn(report(1.0, disturbed=True, **draft), 4)
    rates.learn(report(1.0, k=4, drafted=0, verify_seconds=0.2), 4)
    assert rates.draft_pass == 0.0
    rates.learn(report(1.0, **draft), 4)
    assert rates.draft_pass == pytest.approx(0.2)
    rates.learn(report(0.6, **draft), 4)
    assert rates.draft_pass == pytest.approx(0.9 * 0.2 + 0.1 * 0.1)


def test_an_outlier_counts_as_three_times_the_mean() -> None:
    rates = Rates(load=0.1, draft_pass=0.2, layer=0.2, busy=0.5)
    rates.learn(report(400.0, k=1, drafted=1, verify_seconds=80.0), 4)
    assert (rates.draft_pass, rates.layer) == pytest.approx((0.9 * 0.2 + 0.1 * 0.6, 0.9 * 0.2 + 0.1 * 0.6))
