"""Activation matrices: similarity of requests, and the experts that they predict."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.observe.activations import Activations

Step = list[list[int]]  # each layer's experts


def run_step(history: Activations, sequence_id: int, layers: Step) -> None:
    history.begin_step(sequence_id)
    for layer, experts in enumerate(layers):
        history.add([layer] * len(experts), experts)


def run_request(history: Activations, sequence_id: int, *steps: Step) -> None:
    """Run a whole request: a prompt that uses every expert, then these steps."""
    run_step(history, sequence_id, [[0, 1, 2, 3]] * 3)
    for step in steps:
        run_step(history, sequence_id, step)


def make_history(**options: int) -> Activations:
    return Activations([4, 4, 4], **options)


def test_expects_nothing_before_any_request_has_run() -> None:
    history = make_history()
    assert not history.expected().any()
    history.begin_step(1)
    history.add([0], [1])
    assert not history.expected().any()
    assert not history.similarities().any()


def test_expects_experts_of_own_steps_without_the_prompt() -> None:
    history = make_history()
    run_request(history, 1, [[0], [1], [2]], [[0], [1], [3]])
    history.begin_step(1)
    expected = np.zeros((3, 4))
    expected[0, 0] = expected[1, 1] = 1.0
    expected[2, 2] = expected[2, 3] = 0.5
    assert history.expected() == pytest.approx(expected)


def test_similarity_is_over_layers_that_have_run() -> None:
    history = make_history()
    run_request(history, 1, [[0], [1], [2]], [[0], [2], [2]])  # layer 0: [1 0 0 0], layer 1: [0 .5 .5 0]
    history.begin_step(2)
    history.add([0, 0], [0, 1])
    assert history.similarities()[0] == pytest.approx(1 / sqrt(2 * 1))
    history.add([1], [1])
    assert history.similarities()[0] == pytest.approx(1.5 / sqrt(3 * 1.5))
    history.add([1], [1])
    assert history.similarities()[0] == pytest.approx(1.5 / sqrt(3 * 1.5)), "an expert counts once"


def test_expectation_is_weighted_by_similarity() -> None:
    history = make_history(neighbours=2)
    run_request(history, 1, [[0], [0], [0]])
    run_request(history, 2, [[0, 1], [1], [1]])
    run_request(history, 3, [[3], [3], [3]])
    history.begin_step(4)
    history.add([0], [0])
    near, far = 1.0, 1 / sqrt(2)
    expected = np.zeros(4)
    expected[0], expected[1] = near / (near + far), far / (near + far)
    assert history.expected()[2] == pytest.approx(expected)
    history.add([0], [3])
    assert history.expected()[2, 3] > 0, "the third is among the two nearest now"


def test_interleaved_requests_have_separate_matrices() -> None:
    history = make_history()
    for _ in range(3):  # the first of each reads its prompt
        run_step(history, 1, [[0], [0], [0]])
        run_step(history, 2, [[1], [1], [1]])
    history.begin_step(1)
    assert history.expected()[:, 0] == pytest.approx(np.ones(3))
    assert not history.expected()[:, 1].any()


@pytest.mark.parametrize(("layers", "similar"), [([1, 1, 1], True), ([1, 1, 2], True), ([1, 2, 2], False)])
def test_drops_the_older_of_the_two_most_similar_when_full(layers: list[int], similar: bool) -> None:
    """With capacity for three of four requests: the second and third are similar, or the first and second."""
    history = make_history(capacity=3)
    second = [[1], [1], [1]] if similar else [[0], [0], [1]]
    run_request(history, 1, [[0], [0], [0]])
    run_request(history, 2, second)
    run_request(history, 3, [[expert] for expert in layers])
    run_request(history, 4, [[3], [3], [3]])
    assert len(history) == 3
    history.begin_step(4)
    history.add([0], [0])
    assert history.expected()[2, 0] == (1.0 if similar else 0.0), (
        "the first was kept, unless it was the older of the two"
    )
    history.begin_step(4)
    history.add([0], [1])
    assert history.expected()[2, layers[2]] == 1.0, "the third was kept"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=3, max_size=3)),
        max_size=25,
    )
)
def test_expectations_are_between_zero_and_one(steps: list[tuple[int, Step]]) -> None:
    history = Activations([4, 2, 4], capacity=4)
    for sequence_id, layers in steps:
        run_step(
            history,
            sequence_id,
            [[expert % (2 if layer == 1 else 4) for expert in experts] for layer, experts in enumerate(layers)],
        )
        expected, similarity = history.expected(), history.similarities()
        assert len(history) <= 4
        assert ((expected >= 0) & (expected <= 1 + 1e-6)).all()
        assert ((similarity >= 0) & (similarity <= 1 + 1e-6)).all()
        assert not expected[1, 2:].any(), "experts that a layer does not have"
