"""Maps from draft states to target states: ridge regression, and predictions through the maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.predict.projection import RIDGES, HiddenStateProjection, LayerFit
from spmoe.types import LayerChunk, Routing, Stage

CPU = torch.device("cpu")
ROWS, BATCHES = 40, 6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fitted(states: Tensor, wanted: Tensor) -> LayerFit:
    fit = LayerFit(states.shape[1], wanted.shape[1], CPU)
    for some, other in zip(states.split(ROWS), wanted.split(ROWS), strict=True):
        fit.add(some, other)
    fit.solve()
    return fit


@pytest.mark.parametrize(("narrow", "wide"), [(6, 10), (10, 6), (8, 8)])
def test_recovers_an_affine_map(narrow: int, wide: int) -> None:
    states, weight, bias = normal(ROWS * BATCHES, narrow), normal(narrow, wide, seed=1), normal(1, wide, seed=2)
    found = fitted(states, states @ weight + bias).map(1e-9)
    torch.testing.assert_close(found[0].float(), weight, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1].float(), bias, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 2.0])
def test_solves_penalised_least_squares(ridge: float) -> None:
    """Compare with a solver that gets the penalty as extra rows."""
    states, wanted = normal(ROWS * BATCHES, 5) * torch.tensor([1, 50, 0.02, 3, 1]), normal(ROWS * BATCHES, 7, seed=4)
    weight, bias = fitted(states, wanted).map(ridge)
    size = wanted.double().square().mean(-1, keepdim=True).sqrt()
    x = torch.cat([states.double(), torch.ones(len(states), 1)], dim=1) / size
    penalty = torch.diag(x.square().sum(0).mul(ridge).sqrt())
    rows = torch.cat([x, penalty])
    right = torch.cat([wanted.double() / size, torch.zeros(6, 7)])
    torch.testing.assert_close(torch.cat([weight, bias]), torch.linalg.lstsq(rows, right).solution)


@pytest.mark.parametrize("hidden", [5, 9])
def test_predictions_agree_with_the_maps(hidden: int) -> None:
    states, wanted = normal(ROWS * BATCHES, 5), normal(ROWS * BATCHES, hidden, seed=4)
    fit = fitted(states, wanted)
    for ridge, predicted in zip(RIDGES, fit.predict(states, RIDGES), strict=True):
        weight, bias = fit.map(ridge)
        torch.testing.assert_close(predicted, states.double() @ weight + bias)


def test_infinite_ridge_is_the_identity_at_equal_widths() -> None:
    weight, bias = fitted(normal(ROWS, 5), normal(ROWS, 5, seed=1)).map(float("inf"))
    assert torch.equal(weight, torch.eye(5, dtype=torch.float64))
    assert not bias.any()


def test_large_states_weigh_no_more_than_others() -> None:
    states, weight = normal(ROWS * BATCHES, 6), normal(6, 8, seed=1)
    wanted = states @ weight
    states[0], wanted[0] = states[0] * 1e4, normal(8, seed=9) * 1e4
    found, _ = fitted(states, wanted).map(1e-9)
    assert float((found.float() - weight).abs().max()) < 0.2


def test_constant_features_give_finite_predictions() -> None:
    states = normal(ROWS * BATCHES, 6)
    states[:, 2], states[:, 3] = 0.0, states[:, 1]
    for predicted in fitted(states, normal(ROWS * BATCHES, 4, seed=3)).predict(states, RIDGES):
        assert predicted.isfinite().all()


# ---- with gates


class LargestEntries:
    """Gates that select the largest entries of a state."""

    layer_depths, depth_count = (0, 1, 2), 3

    def route(self, layers: list[int], residual: Tensor) -> Routing:
        assert residual.shape[::2] == (len(layers), 4)
        best = residual.softmax(-1).topk(2, dim=-1)
        return Routing(best.indices, best.values / best.values.sum(-1, keepdim=True))


@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize("draft_depth", [1, 2, 3, 7])
def test_draft_states_go_through_the_map_of_the_layer_they_predict(draft_depth: int, chunk: int) -> None:
    maps = HiddenStateProjection(normal(3, 6, 4, seed=5), normal(3, 1, 4, seed=6))
    residual = normal(draft_depth, 5, 6, seed=7)
    policy, prefetches = DraftGate(LargestEntries(), draft_depth, cutoff=3, projection=maps), []
    for depths in (range(start, min(start + chunk, draft_depth)) for start in range(0, draft_depth, chunk)):
        prefetches += policy.on_chunk(LayerChunk(Stage.DRAFT, depths, residual[depths.start : depths.stop]))
    for layer in range(3):
        depth = min(int((layer + 0.5) / 3 * draft_depth), draft_depth - 1)
        states = residual[depth] @ maps.weights[layer] + maps.biases[layer]
        selected = {int(e) for row in states for e in row.topk(2).indices}
        assert {request.key.expert for request in prefetches if request.key.layer == layer} == selected
