"""Prediction from the target's own layers, alone and together with the draft's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmoe.predict.draft_gate import DraftGate, prefetches
from spmoe.predict.next_gate import CombinedPolicy, NextGate, prefetches_of_one_layer
from spmoe.types import DraftOutcome, LayerChunk, PrefetchRequest, Routing, Stage

HIDDEN, EXPERTS = 4, 6


class MarkedGates:
    """Each layer's gate picks expert (first number of the state + its own layer), whatever else there is."""

    hidden_size = HIDDEN

    def __init__(self, layer_depths: Sequence[int], depth_count: int) -> None:
        self.layer_depths = layer_depths
        self.depth_count = depth_count

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        assert len(layers) == len(residual)
        picks = (residual[..., :1].long() + torch.tensor(layers)[:, None, None]) % EXPERTS  # [layers, rows, 1]
        return Routing(picks, torch.ones_like(picks, dtype=torch.float32))


def states(depths: range, rows: int = 2) -> Tensor:
    """The first number of row r at depth d is 10 d + r."""
    found = torch.zeros(len(depths), rows, HIDDEN)
    found[..., 0] = torch.tensor([[10 * depth + row for row in range(rows)] for depth in depths])
    return found


def seen(stage: Stage, depths: range) -> LayerChunk:
    return LayerChunk(stage, depths, 4, states(depths))


def picked(prefetches: list[PrefetchRequest]) -> set[tuple[int, int]]:
    assert all(request.deadline == request.key.layer and request.fetch for request in prefetches)
    return {(request.key.layer, request.key.expert) for request in prefetches}


def test_a_layer_speaks_of_the_next_one() -> None:
    policy = NextGate(MarkedGates(range(4), 4))
    for depth in range(3):
        expected = {(depth + 1, (10 * depth + row + depth + 1) % EXPERTS) for row in range(2)}
        assert picked(list(policy.on_chunk(seen(Stage.VERIFY, range(depth, depth + 1))))) == expected
    assert list(policy.on_chunk(seen(Stage.VERIFY, range(3, 4)))) == [], "there is no layer after the last"


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.5, 1.1]))
def test_one_layer_s_wishes_are_those_of_columns(seed: int, rows: int, top_k: int, least: float) -> None:
    dice = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(EXPERTS, generator=dice)[:top_k] for _ in range(rows)])[None]
    routing = Routing(experts, torch.rand(1, rows, top_k, generator=dice).softmax(dim=-1))
    columns = prefetches([3], routing, fetch_below=4)
    assert sorted(prefetches_of_one_layer(3, routing, least)) == sorted(columns.where(columns.scores >= least))


def test_two_layers_ahead() -> None:
    policy = NextGate(MarkedGates(range(4), 4), ahead=2)
    assert {layer for layer, _ in picked(list(policy.on_chunk(seen(Stage.VERIFY, range(1)))))} == {1, 2}
    assert {layer for layer, _ in picked(list(policy.on_chunk(seen(Stage.VERIFY, range(2, 3)))))} == {3}


def test_dense_layers_speak_of_the_next_layer_with_experts() -> None:
    policy = NextGate(MarkedGates([1, 3], 4))  # decoder layers 0 and 2 are dense
    assert {layer for layer, _ in picked(list(policy.on_chunk(seen(Stage.VERIFY, range(1)))))} == {0}
    assert {layer for layer, _ in picked(list(policy.on_chunk(seen(Stage.VERIFY, range(1, 2)))))} == {1}
    assert {layer for layer, _ in picked(list(policy.on_chunk(seen(Stage.VERIFY, range(2, 3)))))} == {1}


def test_an_answer_that_is_there_is_not_asked_for_again() -> None:
    policy, depths = NextGate(MarkedGates(range(4), 4)), range(1)
    routing = Routing(torch.tensor([[[5], [5]]]), torch.tensor([[[0.25], [0.5]]]))
    (request,) = policy.on_chunk(LayerChunk(Stage.VERIFY, depths, 4, torch.empty(0), routing))
    assert (request.key, request.score) == ((1, 5), 0.5)


def test_what_has_less_than_an_even_share_is_left_out_where_it_must_be_sure() -> None:
    routing = Routing(torch.tensor([[[5, 1], [2, 1]]]), torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]))
    told = LayerChunk(Stage.VERIFY, range(1), 4, torch.empty(0), routing)
    assert {request.key.expert for request in NextGate(MarkedGates(range(4), 4)).on_chunk(told)} == {1, 2, 5}
    assert {request.key.expert for request in NextGate(MarkedGates(range(4), 4), sure=True).on_chunk(told)} == {1, 2, 5}
    unsure = Routing(routing.experts, torch.tensor([[[0.75, 0.25], [0.51, 0.49]]]))
    told = LayerChunk(Stage.VERIFY, range(1), 4, torch.empty(0), unsure)
    assert {request.key.expert for request in NextGate(MarkedGates(range(4), 4), sure=True).on_chunk(told)} == {2, 5}


def test_it_is_silent_about_drafts_and_prompts() -> None:
    policy = NextGate(MarkedGates(range(4), 4))
    for stage in (Stage.DRAFT, Stage.PREFILL):
        assert policy.ask(stage, range(2), states(range(2))) is None
        assert list(policy.on_chunk(seen(stage, range(2)))) == []


def test_both_speak_each_in_its_stage() -> None:
    gates = MarkedGates(range(4), 4)
    draft, target = DraftGate(gates, 4, 4), NextGate(gates)
    policy = CombinedPolicy(draft, target)
    assert policy.name == "draft-gate+next-gate"
    assert policy.stages == {Stage.PREFILL, Stage.DRAFT, Stage.VERIFY}
    for stage, part in ((Stage.DRAFT, draft), (Stage.PREFILL, draft), (Stage.VERIFY, target)):
        what = seen(stage, range(1, 2))
        assert list(policy.on_chunk(what)) == list(part.on_chunk(what)) != []
        asked, own = (p.ask(stage, range(1, 2), what.residual) for p in (policy, part))
        assert asked is not None
        assert own is not None
        assert torch.equal(asked.experts, own.experts)
    policy.on_accept(DraftOutcome(4, 2))
