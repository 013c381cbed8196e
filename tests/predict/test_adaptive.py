"""The policy `adaptive`: predictions several layers ahead, as deep as they are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmoe.predict.policies.adaptive import Adaptive
from spmoe.types import LayerChunk, PrefetchRequest, Routing, Stage

LAYERS, EXPERTS = 5, 8


class ScriptedGates:
    """Gates that select the experts written into the hidden states, the same for every row."""

    def __init__(self, layer_depths: Sequence[int] = range(LAYERS), depth_count: int = LAYERS) -> None:
        self.layer_depths = layer_depths
        self.depth_count = depth_count

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        # a state holds the experts of the layers one, two and three ahead
        picks = torch.stack([state[:, :1] * 0 + state[:, index % 3, None] for index, state in enumerate(residual)])
        return Routing(picks.long(), torch.ones_like(picks))


def chunk(depth: int, experts: Sequence[int]) -> LayerChunk:
    """A decoder layer whose states predict these experts for the layers one, two and three ahead."""
    return LayerChunk(Stage.VERIFY, range(depth, depth + 1), torch.tensor([[list(experts)]], dtype=torch.float32))


def run_step(policy: Adaptive, right: Sequence[bool]) -> list[list[PrefetchRequest]]:
    """Run a step in which layer l uses expert l, with right or wrong predictions over each distance."""
    assert list(policy.begin_step(1)) == []
    found = []
    for layer in range(LAYERS):
        predicted = [layer + 1 + d if right[d] else 7 for d in range(3)]
        found.append(list(policy.on_chunk(chunk(layer, predicted))))
        assert list(policy.on_routed(layer, [layer])) == []
    return found


def max_distance(prefetches: list[list[PrefetchRequest]]) -> int:
    """Return how many layers ahead the requests of the first layer go."""
    assert all(request.fetch and request.deadline == request.key.layer for part in prefetches for request in part)
    return max(request.key.layer for request in prefetches[0])


@pytest.mark.parametrize(
    ("right", "depth"),
    [
        ((True, True, True), 3),
        ((True, True, False), 2),
        ((True, False, True), 1),  # no distance beyond one that fails
        ((False, True, True), 3),  # the next layer is always prefetched
        ((False, False, False), 1),
    ],
)
def test_prefetches_as_deep_as_predictions_were_right(right: tuple[bool, ...], depth: int) -> None:
    policy = Adaptive(ScriptedGates())
    assert policy.depth == 1, "nothing was predicted yet"
    for _ in range(30):
        prefetches = run_step(policy, right)
    assert policy.depth == depth
    assert max_distance(prefetches) == depth


def test_share_of_right_predictions_decays() -> None:
    policy = Adaptive(ScriptedGates())
    run_step(policy, (True, True, True))
    # layers 2, 3 and 4 are predicted at distance two, once each; the prior of eight has decayed once
    prior = 8 * 0.98
    assert policy._predicted[1] == pytest.approx(prior + 3)
    assert policy._right[1] == pytest.approx(3)
    for _ in range(30):
        run_step(policy, (True, True, True))
    assert policy.depth == 3
    for _ in range(60):
        run_step(policy, (True, False, True))
    assert policy.depth == 1, "old predictions are forgotten"


def test_last_layers_predict_fewer_layers() -> None:
    policy = Adaptive(ScriptedGates())
    for _ in range(30):
        prefetches = run_step(policy, (True, True, True))
    assert [sorted(request.key for request in part) for part in prefetches[2:]] == [[(3, 3), (4, 4)], [(4, 4)], []]


def test_predicts_only_in_the_verify_stage() -> None:
    policy = Adaptive(ScriptedGates())
    assert policy.stages == {Stage.VERIFY}
    for stage in (Stage.DRAFT, Stage.PREFILL):
        shown = replace(chunk(0, (1, 2, 3)), stage=stage)
        assert list(policy.on_chunk(shown)) == []
        assert policy.predict_routing(stage, shown.depths, shown.residual) is None


def test_dense_layers_predict_the_next_moe_layers() -> None:
    policy = Adaptive(ScriptedGates([1, 3], 4))  # decoder layers 0 and 2 are dense
    assert {request.key.layer for request in policy.on_chunk(chunk(0, (1, 2, 3)))} == {0}
    assert {request.key.layer for request in policy.on_chunk(chunk(2, (1, 2, 3)))} == {1}
    assert list(policy.on_chunk(chunk(3, (1, 2, 3)))) == []
