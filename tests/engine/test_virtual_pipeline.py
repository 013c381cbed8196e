"""The pipeline on virtual time: how much stall prefetching hides, what it costs, and what limits it.

A synthetic routing is replayed step by step through the real expert pool, scheduler and prefetch policy. Draft passes,
attention, experts and copies take virtual time; the accuracy of the predictions is given, so that results can be
reasoned about.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.link import VirtualTransfer
from spmoe.experts.transfer import CopyHandle, CopyJob
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.predict.policies.on_demand import OnDemand
from spmoe.types import ExpertKey, LayerChunk, Routing, Stage

LAYERS, EXPERTS, TOP_K, ROWS, STEPS = 8, 64, 2, 4, 6
BLOB = 10**6
COPY = 1e-3  # seconds per expert on the link
DRAFT = 4e-3  # seconds per draft pass and layer: twice as long as copying the experts of one pass and layer
ATTENTION = 2e-3  # seconds per layer
EXPERT = 0.2e-3  # seconds per expert
ALL = LAYERS * EXPERTS

Rows = list[list[int]]  # [rows][top_k]


def make_routing(experts: int = EXPERTS) -> list[list[Rows]]:
    """Draw the routed experts of every step, layer and row evenly."""
    draw = random.Random(0)
    return [[[draw.sample(range(experts), TOP_K) for _ in range(ROWS)] for _ in range(LAYERS)] for _ in range(STEPS)]


def predict(routing: list[list[Rows]], accuracy: float) -> list[list[Rows]]:
    """Return the routing as predicted with this accuracy: each expert is right, or replaced by any other."""
    draw = random.Random(1)

    def predict_one(expert: int) -> int:
        return expert if draw.random() < accuracy else (expert + draw.randrange(1, EXPERTS)) % EXPERTS

    return [[[[predict_one(e) for e in row] for row in rows] for rows in step] for step in routing]


class NumberGates:
    """Gates that select the experts whose numbers are in the hidden states."""

    layer_depths: Sequence[int] = range(LAYERS)
    depth_count = LAYERS

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        return Routing(residual.long(), torch.full(residual.shape, 1 / TOP_K))


class EmptySlots:
    """Slots without weights."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        return {}

    def close(self) -> None:
        pass


class RecordingTransfer(VirtualTransfer):
    """Transfer that remembers which experts were loaded on demand, and which were prefetched."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.demanded: list[ExpertKey] = []
        self.prefetched: list[ExpertKey] = []

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        (self.demanded if urgent else self.prefetched).extend(job.key for job in jobs)
        return super().copy(jobs, urgent=urgent)


@dataclass
class Replay:
    """Result of a replay."""

    counters: Counters
    demanded: list[ExpertKey]
    prefetched: list[ExpertKey]
    seconds: float = 0.0
    compute_seconds: float = 0.0  # of draft and target
    prefetched_by_step: list[int] = field(default_factory=list)

    @property
    def stall(self) -> float:
        """Seconds."""
        return self.counters.stall_seconds

    @property
    def bytes_moved(self) -> int:
        return self.counters.demand_bytes + self.counters.issued_bytes

    @property
    def bytes_unused(self) -> int:
        """Bytes of prefetched experts that were evicted before use, or not used so far."""
        return self.counters.wasted_bytes + self.counters.held_bytes


def replay(
    routing: list[list[Rows]],
    predictions: list[list[Rows]] | None,
    *,
    cutoff: int = LAYERS,
    slots: int = ALL,
    eviction: str = "draft-informed",
    draft: float = DRAFT,
    budget: int | None = None,
) -> Replay:
    """Replay the routing; the draft's passes turn predictions into prefetch requests."""
    clock = VirtualClock()
    transfer = RecordingTransfer(clock, BLOB, BLOB / COPY)
    eviction_policy = make_eviction(eviction, [EXPERTS] * LAYERS)
    experts = Experts.build(EmptySlots(slots), transfer, eviction_policy, BLOB, clock, threaded=False)
    counters = experts.ledger.counters
    experts.scheduler.step_budget = budget
    clock.add_event_source(transfer.link.next_event, experts.scheduler.pump)
    policy: PrefetchPolicy = OnDemand() if predictions is None else DraftGate(NumberGates(), LAYERS, cutoff)
    result = Replay(counters, transfer.demanded, transfer.prefetched)

    def compute(seconds: float) -> None:
        clock.sleep(seconds)
        result.compute_seconds += seconds

    for step in range(STEPS):
        issued = counters.prefetch_loads
        experts.step.begin()
        for row in range(ROWS):
            for layer in range(LAYERS):
                compute(draft)
                if predictions is not None:
                    states = torch.tensor([[predictions[step][layer][row]]], dtype=torch.float32)  # [1, 1, TOP_K]
                    chunk = LayerChunk(Stage.DRAFT, range(layer, layer + 1), states)
                    experts.scheduler.request(policy.on_chunk(chunk))
        for layer in range(LAYERS):
            compute(ATTENTION)
            routed = sorted({expert for row in routing[step][layer] for expert in row})
            delivered: list[int] = []
            for batch in experts.access.use(layer, routed):
                delivered += batch.experts
                compute(EXPERT * len(batch.experts))
            assert sorted(delivered) == routed
        experts.step.end()
        result.prefetched_by_step.append(counters.prefetch_loads - issued)
    result.seconds = clock.now()
    experts.close()
    return result


ROUTING = make_routing()


@cache
def on_demand() -> Replay:
    """Replay without prefetching, the baseline of every comparison."""
    return replay(ROUTING, None)


def test_baseline_loads_every_expert_at_its_first_use_and_mostly_waits_for_it() -> None:
    routed = [
        ExpertKey(layer, expert)
        for step in ROUTING
        for layer, rows in enumerate(step)
        for expert in sorted({e for row in rows for e in row})
    ]
    assert on_demand().demanded == list(dict.fromkeys(routed))
    assert on_demand().prefetched == []
    assert on_demand().counters.prefetches_requested == 0
    assert on_demand().bytes_moved == BLOB * len(set(routed))
    assert on_demand().stall > 0.5 * COPY * len(set(routed)), "the link is slow enough to matter"
    assert on_demand().counters.asked == len(routed)


@pytest.mark.parametrize("accuracy", [None, 0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("slots", [ALL, 130])
def test_time_is_the_sum_of_compute_and_stall(accuracy: float | None, slots: int) -> None:
    predictions = None if accuracy is None else predict(ROUTING, accuracy)
    result = replay(ROUTING, predictions, slots=slots)
    assert result.seconds == pytest.approx(result.compute_seconds + result.stall)
    assert result.compute_seconds == pytest.approx(on_demand().compute_seconds)
    assert result.bytes_moved == BLOB * (len(result.demanded) + len(result.prefetched))
    assert result.counters.asked == on_demand().counters.asked


# ---- benefit


def test_prefetching_hides_most_of_the_stall() -> None:
    """At the accuracy of a trained draft, at least two thirds of the stall of on-demand loading is hidden."""
    result = replay(ROUTING, predict(ROUTING, 0.85))
    assert result.stall < on_demand().stall / 3
    assert result.seconds < on_demand().seconds


def test_stall_falls_with_the_accuracy_of_predictions() -> None:
    stalls = [replay(ROUTING, predict(ROUTING, accuracy)).stall for accuracy in (0.25, 0.5, 0.75, 1.0)]
    assert stalls == sorted(stalls, reverse=True)
    assert len(set(stalls)) == len(stalls)
    assert stalls[0] < on_demand().stall


def test_perfect_predictions_and_a_slow_draft_leave_no_stall() -> None:
    result = replay(ROUTING, predict(ROUTING, 1.0))
    assert result.stall == 0.0
    assert result.counters.demand_loads == result.counters.late == 0
    assert result.counters.hits == result.counters.asked
    assert result.seconds == pytest.approx(on_demand().compute_seconds)


def test_perfect_predictions_and_a_fast_draft_leave_a_stall() -> None:
    """The link is the limit then, not the accuracy."""
    result = replay(ROUTING, predict(ROUTING, 1.0), draft=DRAFT / 20)
    assert result.stall > 0
    baseline = replay(ROUTING, None, draft=DRAFT / 20)
    assert result.stall < baseline.stall
    assert result.bytes_moved == baseline.bytes_moved


def test_wrong_predictions_delay_a_layer_by_at_most_one_copy() -> None:
    """Only half of the experts are ever routed to, and only the other half is prefetched; demand loads go first."""
    half = EXPERTS // 2
    routing = make_routing(experts=half)
    baseline = replay(routing, None)
    result = replay(routing, [[[[e + half for e in row] for row in rows] for rows in step] for step in routing])
    assert result.demanded == baseline.demanded
    assert len(result.prefetched) > len(result.demanded) / 2
    assert result.bytes_unused == BLOB * len(result.prefetched)
    assert baseline.stall <= result.stall <= baseline.stall + STEPS * LAYERS * COPY


# ---- cost


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("cutoff", [2, LAYERS])
def test_bytes_moved_beyond_the_baseline_are_counted_as_unused(accuracy: float, cutoff: int) -> None:
    result = replay(ROUTING, predict(ROUTING, accuracy), cutoff=cutoff)
    assert result.bytes_moved <= on_demand().bytes_moved + result.bytes_unused
    assert set(on_demand().demanded) <= set(result.demanded) | set(result.prefetched)
    never_used = set(result.prefetched) - set(on_demand().demanded)
    assert result.counters.held_bytes == BLOB * len(never_used)
    assert result.counters.wasted_bytes == 0, "nothing was evicted"
    if accuracy == 1.0:
        assert result.bytes_unused == 0
        assert result.bytes_moved == on_demand().bytes_moved


@pytest.mark.parametrize("eviction", ["lru", "draft-informed"])
def test_prefetching_pays_with_few_slots(eviction: str) -> None:
    """There are slots for the experts of a little more than two steps, so that prefetches evict."""
    baseline = replay(ROUTING, None, slots=130, eviction=eviction)
    result = replay(ROUTING, predict(ROUTING, 0.85), slots=130, eviction=eviction)
    assert baseline.bytes_moved > on_demand().bytes_moved, "there are few enough slots to evict"
    assert result.stall < baseline.stall / 2
    assert result.counters.wasted_bytes > 0
    assert 0 <= result.counters.held_bytes < 130 * BLOB
    assert result.bytes_moved <= baseline.bytes_moved + 2 * result.bytes_unused, (
        "an unused prefetch costs its own copy, and one of the expert that it evicted"
    )


# ---- limits


@pytest.mark.parametrize("accuracy", [0.5, 1.0])
def test_cutoff_limits_the_prefetched_layers(accuracy: float) -> None:
    predictions = predict(ROUTING, accuracy)
    results = [replay(ROUTING, predictions, cutoff=cutoff) for cutoff in range(LAYERS + 1)]
    for cutoff, result in enumerate(results):
        assert all(key.layer < cutoff for key in result.prefetched)
        predicted = {
            ExpertKey(layer, e) for s in predictions for layer in range(cutoff) for row in s[layer] for e in row
        }
        assert result.counters.issued_bytes <= BLOB * len(predicted)
        assert (result.counters.issued_bytes > 0) == (cutoff > 0)
    issued = [result.counters.issued_bytes for result in results]
    assert issued == sorted(issued)
    stalls = [result.stall for result in results]
    assert stalls[0] == on_demand().stall, "a cutoff of 0 is on-demand loading"
    assert results[0].bytes_moved == on_demand().bytes_moved
    assert stalls[LAYERS] < stalls[LAYERS // 2] < stalls[0]


@pytest.mark.parametrize("experts", [0, 1, 10])
def test_step_budget_limits_the_prefetched_experts(experts: int) -> None:
    result = replay(ROUTING, predict(ROUTING, 1.0), budget=experts * BLOB)
    assert result.prefetched_by_step == [experts] * STEPS
    assert result.counters.prefetches_over_budget > 0
    assert (result.stall < on_demand().stall) == (experts > 0)
