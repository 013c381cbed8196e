"""Activation matrices: what is remembered of requests, which are near, and what they say will be used."""

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
        history.note([layer] * len(experts), experts)


def remember(history: Activations, sequence_id: int, *steps: Step) -> None:
    """A whole request: a prompt that uses everything, and its steps."""
    run_step(history, sequence_id, [[0, 1, 2, 3]] * 3)
    for step in steps:
        run_step(history, sequence_id, step)


def history_of(**options: int) -> Activations:
    return Activations([4, 4, 4], **options)


def test_nothing_is_expected_before_anything_was_seen() -> None:
    history = history_of()
    assert not history.expected().any()
    history.begin_step(1)
    history.note([0], [1])
    assert not history.expected().any()
    assert not history.similarities().any()


def test_a_request_expects_what_its_own_steps_used_and_not_its_prompt() -> None:
    history = history_of()
    remember(history, 1, [[0], [1], [2]], [[0], [1], [3]])
    history.begin_step(1)
    expected = np.zeros((3, 4))
    expected[0, 0] = expected[1, 1] = 1.0
    expected[2, 2] = expected[2, 3] = 0.5
    assert history.expected() == pytest.approx(expected)


def test_the_cosine_is_over_the_layers_that_have_run() -> None:
    history = history_of()
    remember(history, 1, [[0], [1], [2]], [[0], [2], [2]])  # layer 0: [1 0 0 0], layer 1: [0 .5 .5 0]
    history.begin_step(2)
    history.note([0, 0], [0, 1])
    assert history.similarities()[0] == pytest.approx(1 / sqrt(2 * 1))
    history.note([1], [1])
    assert history.similarities()[0] == pytest.approx(1.5 / sqrt(3 * 1.5))
    history.note([1], [1])
    assert history.similarities()[0] == pytest.approx(1.5 / sqrt(3 * 1.5)), "an expert counts once"


def test_the_nearest_speak_weighed_by_how_near_they_are() -> None:
    history = history_of(neighbours=2)
    remember(history, 1, [[0], [0], [0]])
    remember(history, 2, [[0, 1], [1], [1]])
    remember(history, 3, [[3], [3], [3]])
    history.begin_step(4)
    history.note([0], [0])
    near, far = 1.0, 1 / sqrt(2)
    expected = np.zeros(4)
    expected[0], expected[1] = near / (near + far), far / (near + far)
    assert history.expected()[2] == pytest.approx(expected)
    history.note([0], [3])
    assert history.expected()[2, 3] > 0, "the third is among the two nearest now"


def test_requests_in_turns_keep_their_matrices_apart() -> None:
    history = history_of()
    for _ in range(3):  # the first of each reads its prompt
        run_step(history, 1, [[0], [0], [0]])
        run_step(history, 2, [[1], [1], [1]])
    history.begin_step(1)
    assert history.expected()[:, 0] == pytest.approx(np.ones(3))
    assert not history.expected()[:, 1].any()


@pytest.mark.parametrize(("layers", "alike"), [([1, 1, 1], True), ([1, 1, 2], True), ([1, 2, 2], False)])
def test_when_full_the_older_of_the_most_alike_makes_room(layers: list[int], alike: bool) -> None:
    """The second and third of four requests are alike, and only three have room; or the first and second are."""
    history = history_of(capacity=3)
    second = [[1], [1], [1]] if alike else [[0], [0], [1]]
    remember(history, 1, [[0], [0], [0]])
    remember(history, 2, second)
    remember(history, 3, [[expert] for expert in layers])
    remember(history, 4, [[3], [3], [3]])
    assert len(history) == 3
    history.begin_step(4)
    history.note([0], [0])
    assert history.expected()[2, 0] == (1.0 if alike else 0.0), "the first is there, or it was the older of the two"
    history.begin_step(4)
    history.note([0], [1])
    assert history.expected()[2, layers[2]] == 1.0, "the third is there"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=3, max_size=3)),
        max_size=25,
    )
)
def test_expectations_are_shares_whatever_happens(steps: list[tuple[int, Step]]) -> None:
    history = Activations([4, 2, 4], capacity=4)
    for sequence_id, layers in steps:
        run_step(
            history,
            sequence_id,
            [[expert % (2 if layer == 1 else 4) for expert in experts] for layer, experts in enumerate(layers)],
        )
        expected, near = history.expected(), history.similarities()
        assert len(history) <= 4
        assert ((expected >= 0) & (expected <= 1 + 1e-6)).all()
        assert ((near >= 0) & (near <= 1 + 1e-6)).all()
        assert not expected[1, 2:].any(), "experts that a layer does not have"
