"""Plans of a trace's steps, and how steps are split when K is smaller than recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import make_trace, with_further_passes

from spmoe.errors import UsageError
from spmoe.replay.steps import ChunkPlan, plan_steps
from spmoe.types import Stage

TRACE = make_trace(k=4)


def values(chunk: ChunkPlan) -> tuple[object, ...]:
    """Return everything about a chunk as comparable values."""
    prediction = chunk.prediction
    routing = [part.tolist() for part in prediction.routing]
    return chunk.seconds, prediction.stage, prediction.layers, prediction.depths, routing


def test_recorded_k_splits_no_step() -> None:
    steps = plan_steps(TRACE)
    assert [step.drafted for step in steps] == TRACE.step_drafted.tolist()
    assert sum(forward.rows for step in steps for forward in step.forwards) == TRACE.forward_rows.sum()
    row = int(TRACE.forward_rows[0])
    needed = [sorted({int(e) for e in TRACE.routed[row : row + 5, layer].ravel()}) for layer in range(6)]
    assert steps[1].forwards[0].experts == needed
    stages = [{chunk.prediction.stage for chunk in step.chunks} for step in steps]
    assert stages == [{Stage.DRAFT if step.drafted else Stage.PREFILL} for step in steps]


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_split_steps_produce_the_same_tokens_from_the_same_rows(k: int) -> None:
    whole, split = plan_steps(TRACE), plan_steps(TRACE, k)
    assert sum(step.tokens for step in split) == sum(step.tokens for step in whole)
    assert max(step.drafted for step in split) == k
    for step in split:
        assert step.accepted <= step.drafted
        if step.drafted:
            assert step.forwards[0].rows == step.drafted + 1
            layers = sum(len(chunk.prediction.layers) for chunk in step.chunks)
            assert layers == step.drafted * TRACE.shape.layers, "a pass for each draft"


@pytest.mark.parametrize("k", [1, 2, 4])
def test_passes_beyond_the_drafted_ones_are_ignored(k: int) -> None:
    older = with_further_passes(TRACE)
    assert older.chunk_pass.max() == 4 == TRACE.chunk_pass.max() + 1
    for ours, theirs in zip(plan_steps(TRACE, k), plan_steps(older, k), strict=True):
        assert [values(chunk) for chunk in theirs.chunks] == [values(chunk) for chunk in ours.chunks]
        assert bool(ours.chunks) == (ours.drafted > 0 or ours.forwards[0].rows > k + 1)


def test_rows_of_a_split_step() -> None:
    """Three of four draft tokens are accepted; with K = 2 that is two of two and one of two."""
    number = next(
        i for i, (d, a) in enumerate(zip(TRACE.step_drafted, TRACE.step_accepted, strict=True)) if (d, a) == (4, 3)
    )
    before = sum(parts_of(i, 2) for i in range(number))
    parts = plan_steps(TRACE, 2)[before : before + 2]
    assert [(part.drafted, part.accepted, part.tokens) for part in parts] == [(2, 2, 3), (1, 0, 1)]
    first = int(TRACE.forward_rows[:number].sum())
    for part, rows in zip(parts, (slice(first, first + 3), slice(first + 3, first + 5)), strict=True):
        for layer, experts in enumerate(part.forwards[0].experts):
            assert experts == np.unique(TRACE.routed[rows, layer]).tolist()


def parts_of(number: int, k: int) -> int:
    """Return the number of parts that a step is split into."""
    drafted, accepted = int(TRACE.step_drafted[number]), int(TRACE.step_accepted[number])
    parts = start = 0
    while start <= accepted:
        parts += 1
        start += min(accepted - start, min(start + k, drafted) - start) + 1
    return parts


def test_larger_k_is_refused() -> None:
    with pytest.raises(UsageError, match="recorded with 4 draft tokens"):
        plan_steps(TRACE, 5)


def test_predictions_of_later_layers_are_those_recorded() -> None:
    row = int(TRACE.forward_rows[0])
    forward = plan_steps(TRACE)[1].forwards[0]
    assert forward.ahead[-1] is None, "no layer follows the last one"
    for layer, prediction in enumerate(forward.ahead[:-1]):
        assert prediction is not None
        assert (prediction.stage, prediction.depths) == (Stage.VERIFY, range(layer, layer + 1))
        assert prediction.layers == range(layer + 1, min(layer + 4, 6))
        for distance, later in enumerate(prediction.layers):
            expected = TRACE.ahead[distance, row : row + forward.rows, later]
            assert prediction.routing.experts[distance].tolist() == expected.tolist()
    nothing = replace(TRACE, ahead=np.full_like(TRACE.ahead, -1))
    assert plan_steps(nothing)[1].forwards[0].ahead == [None] * 6


def test_missing_expert_is_not_taken_for_one_of_the_layer_before() -> None:
    """Layers that route to fewer experts than others have -1 in the place of the rest."""
    trace = make_trace()
    routed = trace.routed.copy()
    routed[:, 0, 1] = routed[:, 3, 1] = -1
    trace, at = replace(trace, routed=routed), 0
    for step in plan_steps(trace)[:3]:
        for forward in step.forwards:
            for layer, experts in enumerate(forward.experts):
                rows = routed[at : at + forward.rows, layer].ravel()
                assert experts == sorted({int(expert) for expert in rows if expert >= 0})
            at += forward.rows
