"""Prediction several layers ahead, as deep as it proves right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spmoe.predict.adaptive import Adaptive
from spmoe.types import LayerChunk, PrefetchRequest, Routing, Stage

LAYERS, EXPERTS = 5, 8


class Foretelling:
    """Gates that name, for layer l, whatever they were told: the same experts for every row."""

    hidden_size = 1

    def __init__(self, layer_depths: Sequence[int] = range(LAYERS), depth_count: int = LAYERS) -> None:
        self.layer_depths = layer_depths
        self.depth_count = depth_count

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        # the state says what the layer one ahead, two ahead and three ahead will use
        picks = torch.stack([state[:, :1] * 0 + state[:, index % 3, None] for index, state in enumerate(residual)])
        return Routing(picks.long(), torch.ones_like(picks))


def told(depth: int, guesses: Sequence[int]) -> LayerChunk:
    """What a decoder layer guesses of the layers one, two and three ahead."""
    return LayerChunk(
        Stage.VERIFY, range(depth, depth + 1), LAYERS, torch.tensor([[list(guesses)]], dtype=torch.float32)
    )


def run_step(policy: Adaptive, right: Sequence[bool]) -> list[list[PrefetchRequest]]:
    """A step in which layer l uses expert l, and guesses over each distance are right or not; what is wished for."""
    assert list(policy.begin_step(1)) == []
    found = []
    for layer in range(LAYERS):
        guesses = [layer + 1 + d if right[d] else 7 for d in range(3)]
        found.append(list(policy.on_chunk(told(layer, guesses))))
        assert list(policy.on_routed(layer, [layer])) == []
    return found


def reached(prefetches: list[list[PrefetchRequest]]) -> int:
    """How many layers ahead the first layer's prefetch requests go."""
    assert all(request.fetch and request.deadline == request.key.layer for part in prefetches for request in part)
    return max(request.key.layer for request in prefetches[0])


@pytest.mark.parametrize(
    ("right", "depth"),
    [
        ((True, True, True), 3),
        ((True, True, False), 2),
        ((True, False, True), 1),  # nothing is fetched behind a distance that fails
        ((False, True, True), 3),  # the next layer is always prefetched for
        ((False, False, False), 1),
    ],
)
def test_it_goes_as_deep_as_its_guesses_came_true(right: tuple[bool, ...], depth: int) -> None:
    policy = Adaptive(Foretelling())
    assert policy.depth == 1, "nothing has been proved yet"
    for _ in range(30):
        prefetches = run_step(policy, right)
    assert policy.depth == depth
    assert reached(prefetches) == depth


def test_the_share_is_of_guesses_and_forgets() -> None:
    policy = Adaptive(Foretelling())
    run_step(policy, (True, True, True))
    # distance two guesses of layers 2, 3 and 4, once each, beside eight that count as wrong and have decayed once
    doubt = 8 * 0.98
    assert policy._given[1] == pytest.approx(doubt + 3)
    assert policy._true[1] == pytest.approx(3)
    for _ in range(30):
        run_step(policy, (True, True, True))
    assert policy.depth == 3
    for _ in range(60):
        run_step(policy, (True, False, True))
    assert policy.depth == 1, "what was right long ago is forgotten"


def test_the_last_layers_have_fewer_ahead() -> None:
    policy = Adaptive(Foretelling())
    for _ in range(30):
        prefetches = run_step(policy, (True, True, True))
    assert [sorted(request.key for request in part) for part in prefetches[2:]] == [[(3, 3), (4, 4)], [(4, 4)], []]


def test_it_speaks_only_as_the_target_runs() -> None:
    policy = Adaptive(Foretelling())
    assert policy.stages == {Stage.VERIFY}
    for stage in (Stage.DRAFT, Stage.PREFILL):
        seen = told(0, (1, 2, 3))
        assert list(policy.on_chunk(LayerChunk(stage, seen.depths, LAYERS, seen.residual))) == []
        assert policy.ask(stage, seen.depths, seen.residual) is None


def test_dense_layers_speak_of_the_next_ones_with_experts() -> None:
    policy = Adaptive(Foretelling([1, 3], 4))  # decoder layers 0 and 2 are dense
    assert {request.key.layer for request in policy.on_chunk(told(0, (1, 2, 3)))} == {0}
    assert {request.key.layer for request in policy.on_chunk(told(2, (1, 2, 3)))} == {1}
    assert list(policy.on_chunk(told(3, (1, 2, 3)))) == []
