"""The governor on generated machines and texts: how much it loses to the best fixed K, and to plain decoding."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import FIXED, MACHINES, MOST, Text, constant, decode, falling, fixed_costs

from spmoe.predict.costs import StepReport
from spmoe.predict.governor import LENGTHS, TRIAL_SHARE, Governor

RATES = (0.0, 0.4, 0.7, 0.9)
SEEDS = range(3)


def expected_tokens(governor: Governor, k: int) -> float:
    acceptance = governor.acceptance
    return 1 + acceptance.proposal_rate * float(np.cumprod(acceptance.rates()[:k]).sum())


def regret(name: str, rate: float, *, profiled: bool = False) -> dict[str, float]:
    """Decode three texts, one after the other, for several seeds; return speeds relative to fixed values of K."""
    machine = MACHINES[name]
    governed: list[list[float]] = [[], []]  # first requests, later ones
    fixed: list[list[dict[int, float]]] = [[], []]
    for seed in SEEDS:
        governor = machine.governor(profiled=profiled)
        for request in range(3):
            number = 10 * seed + request
            later = int(request > 0)
            governed[later].append(decode(governor, machine, Text(256, constant(rate), number), number)[0])
            fixed[later].append(fixed_costs(name, rate, number))
    best = min(FIXED, key=lambda k: mean(costs[k] for costs in fixed[0] + fixed[1]))
    found = {}
    for label, costs, own in zip(("first", "later"), fixed, governed, strict=True):
        found[label] = mean(cost[best] for cost in costs) / mean(own)
        found[f"{label}, of plain"] = mean(cost[0] for cost in costs) / mean(own)
    return found


@pytest.fixture(scope="module")
def regrets() -> dict[tuple[str, float], dict[str, float]]:
    return {(name, rate): regret(name, rate) for name in MACHINES for rate in RATES}


@pytest.mark.parametrize("name", MACHINES)
def test_loses_little_to_the_best_k_and_to_plain_decoding(
    regrets: dict[tuple[str, float], dict[str, float]], name: str
) -> None:
    for rate in RATES:
        found = regrets[name, rate]
        assert found["first"] > 0.92, (rate, found)
        assert found["later"] > 0.9, (rate, found)
        assert found["first, of plain"] > 0.95, (rate, found)
        assert found["later, of plain"] > 0.96, (rate, found)


def test_is_nearly_as_fast_as_the_best_k_on_average(regrets: dict[tuple[str, float], dict[str, float]]) -> None:
    assert mean(found["first"] for found in regrets.values()) > 0.96
    assert mean(found["later"] for found in regrets.values()) > 0.98
    later = sorted(found["later"] for found in regrets.values())
    assert later[len(later) // 5] > 0.965, "four of five cells reach nearly 0.97 of the best fixed K"
    assert later[2] > 0.95, "all but two reach 0.95"


def test_decodes_plainly_where_drafts_are_wrong() -> None:
    machine = MACHINES["50 % of slots, diverse"]
    governor = machine.governor()
    decode(governor, machine, Text(256, constant(0.1), 0))
    lengths = decode(governor, machine, Text(256, constant(0.1), 1), 1)[1]
    assert lengths.count(0) > 0.9 * len(lengths)


def test_drafts_long_where_rows_share_experts() -> None:
    machine = MACHINES["25 % of slots, shared"]
    governor = machine.governor()
    decode(governor, machine, Text(256, constant(0.97), 0))
    assert mean(decode(governor, machine, Text(256, constant(0.97), 1), 1)[1]) > 8


@pytest.mark.parametrize("name", ["resident", "90 % of slots, diverse", "25 % of slots, fine"])
def test_follows_acceptance_that_drops(name: str) -> None:
    machine, ratios = MACHINES[name], []
    for seed in range(4):
        text = Text(512, falling(0.9, 0.1), seed)
        governor = machine.governor()
        decode(governor, machine, Text(256, constant(0.9), 99), seed)
        cost, lengths = decode(governor, machine, text, seed)
        best = min(decode(k, machine, text, seed)[0] for k in FIXED)
        ratios.append(best / cost)
        assert mean(lengths[-40:]) < 3, lengths
    assert mean(ratios) > 0.97, "better than, or close to, any K that is kept"


def test_follows_a_link_that_slows_down() -> None:
    """With a fast link K=1 is a fifth faster than plain decoding; with a slow one plain decoding is."""
    machine, ratios, late = replace(MACHINES["90 % of slots, diverse"], share=0.06, load=0.4), [], []
    for seed in range(4):
        text = Text(768, constant(0.5), seed)

        def slowdown(place: float) -> float:
            return 1.0 if place < 0.4 else 10.0

        cost, lengths = decode(machine.governor(), machine, text, seed, slowdown)
        best = min(decode(k, machine, text, seed, slowdown)[0] for k in FIXED)
        ratios.append(best / cost)
        assert mean(lengths[:100]) > 0.6, lengths
        late.append(mean(lengths[-60:]))
    assert mean(late) < 0.3
    assert mean(ratios) > 0.97, "better than, or close to, any K that is kept"


@pytest.mark.parametrize("times", [10, 100, 1000])
def test_an_odd_first_step_changes_little(times: float) -> None:
    for name, rate in (("25 % of slots, shared", 0.9), ("50 % of slots, diverse", 0.4)):
        machine, text = MACHINES[name], Text(256, constant(rate), 3)
        cost = decode(machine.governor(), machine, text, 3, first_step=times)[0]
        usual = decode(machine.governor(), machine, text, 3)[0]
        assert cost < 1.12 * usual, (name, cost, usual)


def test_one_slow_step_among_others_changes_nothing_for_long() -> None:
    machine = MACHINES["resident"]
    governor = machine.governor()
    decode(governor, machine, Text(256, constant(0.8), 0))
    before = governor.estimates().costs
    k = governor.current
    governor.learn(StepReport(k, k, k, 1e6, 32 * (k + 1), 0))
    assert governor.estimates().costs == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("name", MACHINES)
def test_trials_stay_within_their_share_of_a_long_request(name: str) -> None:
    """Time beyond that of the K that was settled on is lost to trials."""
    machine = MACHINES[name]
    governor = machine.governor()
    decode(governor, machine, Text(256, constant(0.6), 0))
    text, lost, total = Text(2048, constant(0.6), 1), 0.0, 0.0
    rng, token, number = random.Random(1), 0, 0
    while token < text.tokens:
        k, settled = min(governor.current, text.tokens - token - 1), governor.settled
        seconds, needed, missing = machine.step(k, number + 50, rng, 1.0)
        accepted = text.accepted(token, k)
        if k != settled:
            expected, at = governor.estimates(), LENGTHS.index(k)
            lost += max(0.0, expected.seconds[at] - expected.tokens[at] * expected.costs[LENGTHS.index(settled)])
        governor.learn(StepReport(k, k, accepted, seconds, needed, missing))
        total += seconds
        token += accepted + 1
        number += 1
    assert lost < 1.5 * TRIAL_SHARE * total


def test_a_wrong_prior_from_an_earlier_run_is_unlearned() -> None:
    machine = MACHINES["50 % of slots, diverse"]
    other = MACHINES["resident"].governor()
    for seed in range(3):  # everything resident, and every draft right: long drafts are best
        decode(other, MACHINES["resident"], Text(256, constant(0.95), seed), seed)
    assert other.current >= 6
    state = json.loads(json.dumps(other.state()))
    ratios = []
    for seed in SEEDS:
        governor = machine.governor()
        assert governor.restore(state)
        assert governor.current == other.settled
        text = Text(256, constant(0.3), 10 + seed)
        cost, lengths = decode(governor, machine, text, seed)
        ratios.append(decode(0, machine, text, seed)[0] / cost)
        assert mean(lengths[40:]) < 1, lengths
    assert mean(ratios) > 0.85


def test_a_right_prior_from_an_earlier_run_saves_the_search() -> None:
    machine = MACHINES["25 % of slots, shared"]
    known = machine.governor()
    for seed in range(2):
        decode(known, machine, Text(256, constant(0.95), seed), seed)
    ratios = []
    for seed in SEEDS:
        governor, text = machine.governor(), Text(256, constant(0.95), 20 + seed)
        assert governor.restore(known.state())
        best = min(decode(k, machine, text, seed)[0] for k in FIXED)
        ratios.append(best / decode(governor, machine, text, seed)[0])
    assert mean(ratios) > 0.95


@pytest.mark.parametrize(
    "damage",
    [
        {"costs": None},
        {"costs": {"mean": [1.0], "covariance": [[1.0]]}},
        {"lengths": [0, 1]},
        {"reached": ["x"]},
        {"accepted": [float("nan")] * MOST},
        {"settled": 5},
        {"experts_in_use": float("inf")},
    ],
)
def test_a_damaged_state_is_ignored(damage: dict[str, object]) -> None:
    machine = MACHINES["resident"]
    known = machine.governor()
    decode(known, machine, Text(64, constant(0.9), 0))
    governor = machine.governor()
    assert not governor.restore({**known.state(), **damage})
    assert not governor.restore({})
    assert (
        decode(governor, machine, Text(64, constant(0.9), 1))[1]
        == decode(machine.governor(), machine, Text(64, constant(0.9), 1))[1]
    )


def test_the_next_step_begins_before_this_one_is_learned_from_unless_k_may_change() -> None:
    machine, rng = MACHINES["resident"], random.Random(0)
    governor, waited, at_once, tried, ended = machine.governor(), 0, 0, 0, 0
    for number in range(400):
        k, before, in_trial = governor.current, governor.steps, governor.current != governor.settled
        governor.report(StepReport(k, k, (k + 1) // 2, *machine.step(k, number, rng, 1.0)))
        if governor.steps == before:
            assert k == governor.current
            waited += 1
            tried += in_trial
        else:
            at_once += 1
            ended += in_trial
        governor.learn_reported()
        assert governor.steps == before + 1
    assert waited > 200
    assert at_once > 5
    assert tried > 5, "steps within a trial follow each other as settled ones do"
    assert ended > 2, "the last step of a trial is learned from before the next one begins"


def test_a_step_with_another_k_does_not_count_for_a_trial() -> None:
    machine, rng = MACHINES["50 % of slots, diverse"], random.Random(0)
    governor = machine.governor()
    while governor.current == governor.settled:
        governor.learn(StepReport(governor.current, governor.current, 0, *machine.step(governor.current, 9, rng, 1.0)))
    tried = governor.current
    for _ in range(10):
        governor.learn(StepReport(governor.settled, governor.settled, 0, *machine.step(governor.settled, 9, rng, 1.0)))
        assert governor.current == tried


def test_learns_from_drafts_that_do_not_exist() -> None:
    """An n-gram drafter proposes nothing in most steps; such a step is one of plain decoding."""
    machine, rng = MACHINES["resident"], random.Random(0)
    governor = machine.governor()
    for number in range(300):
        k = governor.current
        drafted = k if rng.random() < 0.3 else 0
        seconds, needed, missing = machine.step(drafted, number, rng, 1.0)
        governor.learn(StepReport(k, drafted, drafted, seconds, needed, missing))
    assert governor.current >= 8, "drafts are always right, and cost nothing where there is none"
    assert expected_tokens(governor, 8) == pytest.approx(1 + 0.3 * 8, rel=0.3)


def test_same_reports_lead_to_same_choices() -> None:
    machine, text = MACHINES["50 % of slots, diverse"], Text(256, constant(0.6), 5)
    assert decode(machine.governor(), machine, text)[1] == decode(machine.governor(), machine, text)[1]


@pytest.mark.parametrize("most", [0, 1, 4, 5, MOST])
def test_never_exceeds_the_maximum(most: int) -> None:
    governor, machine = Governor(most, 16, 16, 2), MACHINES["resident"]
    lengths = decode(governor, machine, Text(400, constant(1.0), 0))[1]
    assert max(lengths) == max(k for k in LENGTHS if k <= most)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, MOST), st.floats(0.0, 1.0), st.floats(0.0, 1e3), st.integers(0, 300), st.floats(0.0, 1.0)
        ),
        max_size=60,
    )
)
def test_estimates_stay_valid_for_any_steps(steps: list[tuple[int, float, float, int, float]]) -> None:
    governor = Governor(MOST, 16, 64, 8)
    for other, share, seconds, needed, missing in steps:
        k = governor.current if other % 2 else other
        governor.learn(StepReport(k, k, round(k * share), seconds, needed, round(needed * missing)))
        assert governor.current in LENGTHS
        assert all(1 <= expected_tokens(governor, k) <= k + 1 for k in LENGTHS)
        if governor.plain_cost is not None:
            assert all(0 < cost < float("inf") for cost in governor.estimates().costs)


def test_one_slow_comparison_does_not_end_comparisons() -> None:
    governor = MACHINES["25 % of slots, shared"].governor(profiled=True)
    decode(governor, MACHINES["25 % of slots, shared"], Text(64, constant(0.0), 0))
    governor.begin_request()
    governor.plain_cost = 1e3
    assert governor.wants_comparison(64)
    governor.learn_matches([False] * 4, 1e6)
    assert not governor.wants_comparison(64)
    governor.begin_request()
    assert governor.wants_comparison(64)
