"""The policy `draft-gate`: prefetch requests from the draft's hidden states. And `on-demand`, which makes none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmoe.predict.policies.draft_gate import DraftGate, layers_by_draft_depth
from spmoe.predict.policies.on_demand import OnDemand
from spmoe.types import DraftOutcome, ExpertKey, LayerChunk, PrefetchRequest, Routing, Stage

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


class LinearGates:
    """One linear gate per MoE layer; records the layers of every call."""

    def __init__(self, layer_depths: Sequence[int], depth_count: int) -> None:
        self.layer_depths = layer_depths
        self.depth_count = depth_count
        rng = torch.Generator().manual_seed(1)
        self.weights = torch.randn(len(layer_depths), EXPERTS, HIDDEN, generator=rng)
        self.calls: list[list[int]] = []

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        assert residual.shape[0] == len(layers)
        self.calls.append(list(layers))
        logits = torch.einsum("lrh,leh->lre", residual, self.weights[list(layers)])
        best = logits.softmax(dim=-1).topk(TOP_K, dim=-1)
        return Routing(best.indices, best.values / best.values.sum(dim=-1, keepdim=True))


class FixedGates:
    """Gates that return fixed routing, whatever the hidden states are."""

    def __init__(self, experts: list[list[list[int]]], scores: list[list[list[float]]]) -> None:
        self.layer_depths = range(len(experts))
        self.depth_count = len(experts)
        self._experts, self._scores = torch.tensor(experts), torch.tensor(scores)

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        return Routing(self._experts[list(layers)], self._scores[list(layers)])


def chunk(residual: Tensor, first: int = 0, stage: Stage = Stage.DRAFT) -> LayerChunk:
    """A chunk of decoder layers from `first` on."""
    depths = range(first, first + len(residual))
    return LayerChunk(stage, depths, residual)


def states(depths: int, rows: int = 3) -> Tensor:
    return torch.randn(depths, rows, HIDDEN, generator=torch.Generator().manual_seed(2))


def expected_requests(gates: LinearGates, layer_states: dict[int, Tensor]) -> dict[ExpertKey, float]:
    """Compute, row by row and layer by layer, the best score that any row gives to an expert it selects."""
    prefetches: dict[ExpertKey, float] = {}
    for layer, rows in layer_states.items():
        for row in rows:
            weights = (gates.weights[layer] @ row).exp()
            picked = sorted(range(EXPERTS), key=lambda e: -float(weights[e]))[:TOP_K]
            for expert in picked:
                key = ExpertKey(layer, expert)
                prefetches[key] = max(prefetches.get(key, 0.0), float(weights[expert] / weights[picked].sum()))
    return prefetches


def check(prefetches: list[PrefetchRequest], expected: dict[ExpertKey, float]) -> None:
    assert len({w.key for w in prefetches}) == len(prefetches)
    assert {w.key: w.score for w in prefetches} == pytest.approx(expected, abs=1e-5)
    assert all(w.deadline == w.key.layer for w in prefetches)


# --- prefetch requests ---


@pytest.mark.parametrize("cutoff", [0, 1, 3, 5, 9])
def test_requests_selected_experts_and_fetches_below_the_cutoff(cutoff: int) -> None:
    gates = LinearGates(range(5), 5)
    residual = states(5)
    prefetches = list(DraftGate(gates, draft_depth=5, cutoff=cutoff).on_chunk(chunk(residual)))
    check(prefetches, expected_requests(gates, {layer: residual[layer] for layer in range(5)}))
    assert gates.calls == [[0, 1, 2, 3, 4]]  # in one call
    assert all(0.0 <= w.score <= 1.0 for w in prefetches)
    assert all(w.fetch == (w.key.layer < cutoff) for w in prefetches)


def test_one_request_per_expert_with_its_best_score_and_its_layer_as_deadline() -> None:
    gates = FixedGates(
        experts=[[[0, 3], [3, 0], [3, 1]], [[2, 0], [2, 0], [2, 0]]],
        scores=[[[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]], [[0.8, 0.2], [0.55, 0.45], [0.6, 0.4]]],
    )
    prefetches = list(DraftGate(gates, draft_depth=2, cutoff=2).on_chunk(chunk(torch.zeros(2, 3, 1))))
    assert {w.key: w.score for w in prefetches} == pytest.approx(
        {(0, 0): 0.7, (0, 3): 0.9, (0, 1): 0.1, (1, 2): 0.8, (1, 0): 0.45}
    )
    assert len(prefetches) == 5
    assert all(w.deadline == w.key.layer for w in prefetches)


def test_equal_expert_indices_of_two_layers_are_two_requests() -> None:
    gates = FixedGates(experts=[[[4]], [[4]]], scores=[[[1.0]], [[1.0]]])
    prefetches = list(DraftGate(gates, draft_depth=2, cutoff=2).on_chunk(chunk(torch.zeros(2, 1, 1))))
    assert prefetches == [PrefetchRequest(ExpertKey(0, 4), 1.0, 0), PrefetchRequest(ExpertKey(1, 4), 1.0, 1)]


@pytest.mark.parametrize("draft_depth", [2, 4, 6, 9])
@pytest.mark.parametrize("sizes", [[1], [2, 1], [3], [4, 2]])
def test_requests_do_not_depend_on_chunk_sizes(draft_depth: int, sizes: list[int]) -> None:
    residual = states(draft_depth)

    def prefetches(chunk_sizes: list[int]) -> list[PrefetchRequest]:
        policy = DraftGate(LinearGates(range(1, 6), 6), draft_depth, cutoff=4)
        out: list[PrefetchRequest] = []
        first = turn = 0
        while first < draft_depth:
            last = min(first + chunk_sizes[turn % len(chunk_sizes)], draft_depth)
            out += policy.on_chunk(chunk(residual[first:last], first, draft_depth))
            first, turn = last, turn + 1
        return out

    whole = prefetches([draft_depth])
    assert {w.key.layer for w in whole if w.fetch} == {0, 1, 2, 3}
    assert {w.key.layer for w in whole if not w.fetch} == {4}
    pieces = prefetches(sizes)
    assert [(w.key, w.deadline) for w in pieces] == [(w.key, w.deadline) for w in whole]
    assert [w.score for w in pieces] == pytest.approx([w.score for w in whole], rel=1e-5)


@pytest.mark.parametrize("draft_depth", [2, 4, 8])
def test_each_layer_is_predicted_from_its_draft_layer(draft_depth: int) -> None:
    gates = LinearGates(range(4), 4)
    residual = states(draft_depth)
    source = {2: [0, 0, 1, 1], 4: [0, 1, 2, 3], 8: [1, 3, 5, 7]}[draft_depth]
    prefetches = list(DraftGate(gates, draft_depth, cutoff=4).on_chunk(chunk(residual)))
    check(prefetches, expected_requests(gates, {layer: residual[depth] for layer, depth in enumerate(source)}))


def test_dense_layers_of_the_target_are_skipped() -> None:
    gates = LinearGates([1, 3], 4)  # decoder layers 0 and 2 have no experts
    residual = states(4)
    prefetches = list(DraftGate(gates, draft_depth=4, cutoff=2).on_chunk(chunk(residual)))
    check(prefetches, expected_requests(gates, {0: residual[1], 1: residual[3]}))


def test_a_chunk_without_layers_to_predict_calls_no_gate() -> None:
    gates = LinearGates([0, 1], 4)  # decoder layers 2 and 3 have no experts
    policy = DraftGate(gates, draft_depth=4, cutoff=2)
    assert list(policy.on_chunk(chunk(states(4)[2:], first=2))) == []
    assert gates.calls == []


def test_accepted_tokens_change_nothing() -> None:
    policy = DraftGate(LinearGates(range(3), 3), draft_depth=3, cutoff=3)
    before = list(policy.on_chunk(chunk(states(3))))
    policy.on_accept(DraftOutcome(drafted=4, accepted=0))
    assert before
    assert list(policy.on_chunk(chunk(states(3)))) == before


def test_is_shown_the_draft_and_not_the_target() -> None:
    assert DraftGate.stages == {Stage.PREFILL, Stage.DRAFT}


# --- the map from draft layers to target layers ---


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 16, 27, 48, 61, 94])
def test_map_is_the_identity_at_equal_depth(depth: int) -> None:
    assert layers_by_draft_depth(range(depth), depth, depth) == [[layer] for layer in range(depth)]
    # with a dense first layer, layers count from the first that has experts
    assert layers_by_draft_depth(range(1, depth), depth, depth) == [[], *([layer] for layer in range(depth - 1))]


@st.composite
def depths(draw: st.DrawFn) -> tuple[list[int], int, int]:
    count = draw(st.integers(1, 100))
    moe = draw(st.sets(st.integers(0, count - 1)))
    return sorted(moe), count, draw(st.integers(1, 100))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(depths())
def test_map_is_monotone_complete_and_nearest(case: tuple[list[int], int, int]) -> None:
    layer_depths, count, draft_depth = case
    by_depth = layers_by_draft_depth(layer_depths, count, draft_depth)
    assert len(by_depth) == draft_depth
    # every target layer once, in order
    assert [layer for layers in by_depth for layer in layers] == list(range(len(layer_depths)))
    middles = [Fraction(2 * d + 1, 2 * draft_depth) for d in range(draft_depth)]
    for depth, layers in enumerate(by_depth):
        for layer in layers:
            middle = Fraction(2 * layer_depths[layer] + 1, 2 * count)
            assert abs(middles[depth] - middle) == min(abs(m - middle) for m in middles)


def test_map_spreads_a_deep_target_evenly_over_a_shallow_draft() -> None:
    assert Counter(len(layers) for layers in layers_by_draft_depth(range(32), 32, 8)) == {4: 8}


# --- on demand ---


@pytest.mark.parametrize("stage", Stage)
def test_on_demand_requests_nothing(stage: Stage) -> None:
    policy = OnDemand()
    assert policy.stages == frozenset()
    assert list(policy.on_chunk(chunk(states(4), stage=stage))) == []
    policy.on_accept(DraftOutcome(drafted=4, accepted=2))
    assert list(policy.on_chunk(chunk(states(4), stage=stage))) == []
