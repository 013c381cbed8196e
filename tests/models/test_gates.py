"""Gates asked in one batched call answer as each does alone, and step aside where they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checkpoints import HIDDEN, LAYERS, Pair
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.gates import StackedGates
from spmoe.models.load import load_without_experts
from spmoe.models.target import Target


@pytest.fixture
def target(pair: Pair) -> Target:
    return Target(load_without_experts(Checkpoint.find(str(pair.target)), torch.float32))


@pytest.mark.parametrize("layers", [range(LAYERS), range(1, LAYERS), range(2)])
def test_a_slab_is_answered_as_its_layers_are(target: Target, layers: range) -> None:
    assert target._stacked is not None, "both families' gates can be batched"
    states = torch.randn(len(layers), 7, HIDDEN, generator=torch.Generator().manual_seed(1))
    together = target.route(layers, states)
    for row, layer in enumerate(layers):
        alone = target.route([layer], states[row : row + 1])
        assert torch.equal(together.experts[row], alone.experts[0])
        torch.testing.assert_close(together.scores[row], alone.scores[0])


def test_ranking_puts_what_the_gate_picks_first_and_names_every_expert_once(target: Target) -> None:
    states = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(2))
    ranking = target.rank(1, states[0])
    picked = target.route([1], states).experts[0]
    assert torch.equal(ranking[:, : target.top_k].sort().values, picked.sort().values)
    experts = target.model.get_submodule(target.moe[1].path).spmoe_shapes["down_proj"][0]
    assert all(row == list(range(experts)) for row in ranking.sort().values.tolist())


def test_gates_that_cannot_be_stacked_are_asked_one_by_one(target: Target) -> None:
    first, *others = target.moe
    assert first.router is not None
    assert StackedGates.of(target.moe[:1]) is None, "nothing to gain"
    assert StackedGates.of([replace(first, norm=None), *others]) is None
    biased = replace(first, router=replace(first.router, args=(torch.zeros(1),)))
    assert StackedGates.of([biased, *others]) is None, "a router with arguments of its own"
    other_kind = replace(first, norm=torch.nn.LayerNorm(HIDDEN))
    assert StackedGates.of([other_kind, *others]) is None, "norms of two kinds"
