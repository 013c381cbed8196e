"""Steps made from a trace, and what becomes of them when K is smaller than recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import make_trace, with_further_passes

from spmoe.errors import UsageError
from spmoe.replay.steps import foretell, plan_steps

TRACE = make_trace(k=4)


def test_as_recorded_nothing_is_cut() -> None:
    steps = plan_steps(TRACE)
    assert [step.drafted for step in steps] == TRACE.step_drafted.tolist()
    assert sum(forward.rows for step in steps for forward in step.forwards) == TRACE.forward_rows.sum()
    row = int(TRACE.forward_rows[0])
    needed = {layer * 8 + int(e) for layer in range(6) for e in TRACE.chosen[row : row + 5, layer].ravel()}
    assert {key for layer in steps[1].forwards[0].needed for key in layer} == needed


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_cut_steps_produce_the_same_tokens_from_the_same_rows(k: int) -> None:
    whole, cut = plan_steps(TRACE), plan_steps(TRACE, k)
    assert sum(step.tokens for step in cut) == sum(step.tokens for step in whole)
    assert max(step.drafted for step in cut) == k
    for step in cut:
        assert step.accepted <= step.drafted
        if step.drafted:
            assert step.forwards[0].rows == step.drafted + 1
            assert sum(chunk.layers for chunk in step.chunks) == step.drafted * TRACE.shape.layers, (
                "a pass for each draft"
            )


@pytest.mark.parametrize("k", [1, 2, 4])
def test_passes_beyond_the_drafted_ones_are_ignored(k: int) -> None:
    older = with_further_passes(TRACE)
    assert older.slab_pass.max() == 4 == TRACE.slab_pass.max() + 1
    for ours, theirs in zip(plan_steps(TRACE, k), plan_steps(older, k), strict=True):
        assert [(chunk.layers, chunk.seconds, chunk.prefetches.by_rank) for chunk in theirs.chunks] == [
            (chunk.layers, chunk.seconds, chunk.prefetches.by_rank) for chunk in ours.chunks
        ]
        assert bool(ours.chunks) == (ours.drafted > 0 or ours.forwards[0].rows > k + 1)


def test_where_a_step_is_cut() -> None:
    """Of four drafts three are accepted; with two a step, that is two of two and one of two."""
    number = next(
        i for i, (d, a) in enumerate(zip(TRACE.step_drafted, TRACE.step_accepted, strict=True)) if (d, a) == (4, 3)
    )
    before = sum(len(plan_steps_of(i, 2)) for i in range(number))
    pieces = plan_steps(TRACE, 2)[before : before + 2]
    assert [(piece.drafted, piece.accepted, piece.tokens) for piece in pieces] == [(2, 2, 3), (1, 0, 1)]
    first = int(TRACE.forward_rows[:number].sum())
    for piece, rows in zip(pieces, (slice(first, first + 3), slice(first + 3, first + 5)), strict=True):
        for layer, needed in enumerate(piece.forwards[0].needed):
            assert needed == [layer * 8 + int(e) for e in np.unique(TRACE.chosen[rows, layer])]


def plan_steps_of(number: int, k: int) -> list[int]:
    """How many pieces a step becomes, one entry each."""
    drafted, accepted = int(TRACE.step_drafted[number]), int(TRACE.step_accepted[number])
    pieces, start = [], 0
    while start <= accepted:
        kept = min(accepted - start, min(start + k, drafted) - start)
        pieces.append(kept)
        start += kept + 1
    return pieces


def test_a_larger_k_is_refused() -> None:
    with pytest.raises(UsageError, match="recorded with 4 draft tokens"):
        plan_steps(TRACE, 5)


def test_of_several_rows_an_expert_is_foretold_once_with_its_best_score() -> None:
    experts = np.array([[[3, 1], [1, 2]]])  # one layer, two rows
    scores = np.array([[[0.75, 0.25], [0.5, 0.5]]])
    told = foretell(np.array([2]), experts, scores, width=8)
    assert {tuple(request.key): request.score for request in told.prefetches} == {
        (2, 3): 0.75,
        (2, 1): 0.5,
        (2, 2): 0.5,
    }
    assert told.by_rank == [(2, -0.75, 19), (2, -0.5, 17), (2, -0.5, 18)]


def test_no_expert_is_no_need_of_another_layer() -> None:
    """Layers that choose fewer than others have -1 in their place."""
    trace = make_trace()
    chosen = trace.chosen.copy()
    chosen[:, 0, 1] = chosen[:, 3, 1] = -1
    trace, at = replace(trace, chosen=chosen), 0
    width = max(trace.shape.experts)
    for step in plan_steps(trace)[:3]:
        for forward in step.forwards:
            for layer, needed in enumerate(forward.needed):
                rows = chosen[at : at + forward.rows, layer].ravel()
                assert needed == sorted({int(expert) + layer * width for expert in rows if expert >= 0})
            at += forward.rows
