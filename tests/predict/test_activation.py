"""The policy `activation`: predictions from similar past requests."""

from __future__ import annotations

import pytest

from spmoe.predict.policies.activation import Activation
from spmoe.types import PrefetchRequest

Layers = list[list[int]]
PROMPT = [[0, 1, 2, 3]] * 3


def run_step(policy: Activation, sequence_id: int, layers: Layers) -> list[list[PrefetchRequest]]:
    """Return the requests made as the step begins, and after each layer."""
    found = [list(policy.begin_step(sequence_id))]
    return found + [list(policy.on_routed(layer, experts)) for layer, experts in enumerate(layers)]


def scores(prefetches: list[PrefetchRequest]) -> dict[tuple[int, int], float]:
    assert all(request.fetch and request.deadline == request.key.layer for request in prefetches)
    return {(request.key.layer, request.key.expert): request.score for request in prefetches}


def test_needs_no_hidden_states() -> None:
    policy = Activation([4, 4, 4])
    assert policy.stages == frozenset()


def test_requests_nothing_before_any_request_has_run() -> None:
    policy = Activation([4, 4, 4])
    assert run_step(policy, 1, PROMPT) == [[], [], [], []]


def test_own_earlier_steps_predict_with_less_weight_for_farther_layers() -> None:
    policy = Activation([4, 4, 4])
    run_step(policy, 1, PROMPT)
    run_step(policy, 1, [[0], [1], [2]])
    first, *later = run_step(policy, 1, [[0], [1], [2]])
    assert scores(first) == pytest.approx({(0, 0): 1.0, (1, 1): 2 / 3, (2, 2): 1 / 3})
    assert later == [[], [], []], "an expert is requested once per step"
    assert scores(list(policy.begin_step(1))) == scores(first), "and again in the next step"


def test_requests_as_many_experts_as_a_step_uses() -> None:
    policy = Activation([4, 4])
    run_step(policy, 1, [[0, 1, 2, 3]] * 2)
    for step in ([[0, 1], [0]], [[0, 2], [0]], [[0, 3], [1]], [[0, 3], [0]]):
        run_step(policy, 1, step)
    # layer 0 uses two experts per step: 0 always, and 3 most often; layer 1 uses one
    assert scores(list(policy.begin_step(1))) == pytest.approx({(0, 0): 1.0, (0, 3): 0.5, (1, 0): 0.75 / 2})


def test_first_layers_select_the_similar_past_request() -> None:
    policy = Activation([4, 4, 4])
    for sequence_id, expert in ((1, 0), (2, 3)):
        run_step(policy, sequence_id, PROMPT)
        for _ in range(4):
            run_step(policy, sequence_id, [[expert], [expert], [expert]])
    run_step(policy, 3, PROMPT)
    prefetches = run_step(policy, 3, [[3], [3], [3]])
    assert {(1, 3), (2, 3)} <= scores(prefetches[0] + prefetches[1]).keys()
    assert scores(prefetches[1])[1, 3] == pytest.approx(1.0), "the next layer is not discounted"
    assert scores(prefetches[1])[2, 3] == pytest.approx(2 / 3)


def test_requests_nothing_for_layers_that_have_run() -> None:
    policy = Activation([4, 4, 4])
    run_step(policy, 1, PROMPT)
    for step in ([[0], [1], [2]], [[3], [0], [1]]) * 3:
        _, *after = run_step(policy, 1, step)
        for layer, prefetches in enumerate(after):
            assert all(request.key.layer > layer for request in prefetches)
