"""The policy `next-gate`: prefetch requests from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmoe.predict.policies._requests import requests_from_routing, requests_of_one_layer
from spmoe.predict.policies.next_gate import NextGate
from spmoe.types import LayerChunk, PrefetchRequest, Routing, Stage

HIDDEN, EXPERTS = 4, 6


class ShiftedGates:
    """Gates that select one expert: the first number of the state plus the layer."""

    def __init__(self, layer_depths: Sequence[int], depth_count: int) -> None:
        self.layer_depths = layer_depths
        self.depth_count = depth_count

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        assert len(layers) == len(residual)
        experts = (residual[..., :1].long() + torch.tensor(layers)[:, None, None]) % EXPERTS  # [layers, rows, 1]
        return Routing(experts, torch.ones_like(experts, dtype=torch.float32))


def states(depths: range, rows: int = 2) -> Tensor:
    """Make states whose first number, in row r at depth d, is 10 d + r."""
    found = torch.zeros(len(depths), rows, HIDDEN)
    found[..., 0] = torch.tensor([[10 * depth + row for row in range(rows)] for depth in depths])
    return found


def chunk(stage: Stage, depths: range) -> LayerChunk:
    return LayerChunk(stage, depths, states(depths))


def requested(prefetches: list[PrefetchRequest]) -> set[tuple[int, int]]:
    assert all(request.deadline == request.key.layer and request.fetch for request in prefetches)
    return {(request.key.layer, request.key.expert) for request in prefetches}


def requested_layers(policy: NextGate, depths: range) -> set[int]:
    return {layer for layer, _ in requested(list(policy.on_chunk(chunk(Stage.VERIFY, depths))))}


def test_a_layer_predicts_the_next_one() -> None:
    policy = NextGate(ShiftedGates(range(4), 4))
    for depth in range(3):
        expected = {(depth + 1, (10 * depth + row + depth + 1) % EXPERTS) for row in range(2)}
        assert requested(list(policy.on_chunk(chunk(Stage.VERIFY, range(depth, depth + 1))))) == expected
    assert list(policy.on_chunk(chunk(Stage.VERIFY, range(3, 4)))) == [], "there is no layer after the last"


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.5, 1.1]))
def test_both_ways_to_make_requests_agree(seed: int, rows: int, top_k: int, min_score: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(EXPERTS, generator=rng)[:top_k] for _ in range(rows)])[None]
    routing = Routing(experts, torch.rand(1, rows, top_k, generator=rng).softmax(dim=-1))
    columns = requests_from_routing([3], routing, fetch_below=4)
    assert sorted(requests_of_one_layer(3, routing, min_score)) == sorted(columns.where(columns.scores >= min_score))


def test_predicts_two_layers_ahead() -> None:
    policy = NextGate(ShiftedGates(range(4), 4), ahead=2)
    assert requested_layers(policy, range(1)) == {1, 2}
    assert requested_layers(policy, range(2, 3)) == {3}


def test_dense_layers_predict_the_next_moe_layer() -> None:
    policy = NextGate(ShiftedGates([1, 3], 4))  # decoder layers 0 and 2 are dense
    assert requested_layers(policy, range(1)) == {0}
    assert requested_layers(policy, range(1, 2)) == {1}
    assert requested_layers(policy, range(2, 3)) == {1}


def test_uses_the_routing_of_a_chunk_if_there_is_one() -> None:
    policy, depths = NextGate(ShiftedGates(range(4), 4)), range(1)
    routing = Routing(torch.tensor([[[5], [5]]]), torch.tensor([[[0.25], [0.5]]]))
    (request,) = policy.on_chunk(LayerChunk(Stage.VERIFY, depths, torch.empty(0), routing))
    assert (request.key, request.score) == ((1, 5), 0.5)


def test_likely_only_omits_experts_below_an_even_share() -> None:
    experts = torch.tensor([[[5, 1], [2, 1]]])

    def requested_with(scores: list[list[float]], likely_only: bool) -> set[int]:
        policy = NextGate(ShiftedGates(range(4), 4), likely_only=likely_only)
        routing = Routing(experts, torch.tensor([scores]))
        shown = LayerChunk(Stage.VERIFY, range(1), torch.empty(0), routing)
        return {request.key.expert for request in policy.on_chunk(shown)}

    assert requested_with([[0.75, 0.25], [0.5, 0.5]], False) == {1, 2, 5}
    assert requested_with([[0.75, 0.25], [0.5, 0.5]], True) == {1, 2, 5}
    assert requested_with([[0.75, 0.25], [0.51, 0.49]], True) == {2, 5}


def test_predicts_only_in_the_verify_stage() -> None:
    policy = NextGate(ShiftedGates(range(4), 4))
    for stage in (Stage.DRAFT, Stage.PREFILL):
        assert policy.predict_routing(stage, range(2), states(range(2))) is None
        assert list(policy.on_chunk(chunk(stage, range(2)))) == []
