"""The pipeline in virtual time: what prefetching hides, what it costs, and what bounds it.

A synthetic routing is replayed step by step through the real source, queue, cache and policy. Draft passes, attention,
experts and copies take virtual time; the predictor's accuracy is given, so what comes out can be reasoned about.
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
DRAFT = 4e-3  # per draft pass and layer: twice what the experts of one pass and layer take to move
ATTENTION = 2e-3
EXPERT = 0.2e-3
ALL = LAYERS * EXPERTS

Rows = list[list[int]]  # [rows][top_k]


def make_routing(experts: int = EXPERTS) -> list[list[Rows]]:
    """Experts by step, layer and row, evenly drawn."""
    draw = random.Random(0)
    return [[[draw.sample(range(experts), TOP_K) for _ in range(ROWS)] for _ in range(LAYERS)] for _ in range(STEPS)]


def guess(routing: list[list[Rows]], accuracy: float) -> list[list[Rows]]:
    """The routing as a predictor of this accuracy sees it: each expert is right, or any other."""
    draw = random.Random(1)

    def see(expert: int) -> int:
        return expert if draw.random() < accuracy else (expert + draw.randrange(1, EXPERTS)) % EXPERTS

    return [[[[see(e) for e in row] for row in rows] for rows in step] for step in routing]


class ReadGates:
    """Gates that pick the experts whose numbers stand in the hidden states."""

    hidden_size = TOP_K
    layer_depths: Sequence[int] = range(LAYERS)
    depth_count = LAYERS

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        return Routing(residual.long(), torch.full(residual.shape, 1 / TOP_K))


class NoWeights:
    """Slots that hold nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        return {}

    def close(self) -> None:
        pass


class RecordingTransfer(VirtualTransfer):
    """Remembers which copies were asked for ahead of demand."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.demanded: list[ExpertKey] = []
        self.wished: list[ExpertKey] = []

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        (self.demanded if urgent else self.wished).extend(job.key for job in jobs)
        return super().copy(jobs, urgent=urgent)


@dataclass
class Replay:
    """What came of a replay."""

    counters: Counters
    demanded: list[ExpertKey]
    wished: list[ExpertKey]
    seconds: float
    busy: float  # seconds that draft and target computed
    wished_by_step: list[int] = field(default_factory=list)

    @property
    def stall(self) -> float:
        return self.counters.stall_seconds

    @property
    def moved(self) -> int:
        return self.counters.demand_bytes + self.counters.issued_bytes

    @property
    def astray(self) -> int:
        """Bytes that served nothing, or nothing yet."""
        return self.counters.wasted_bytes + self.counters.held_bytes


def replay(
    routing: list[list[Rows]],
    guesses: list[list[Rows]] | None,
    *,
    cutoff: int = LAYERS,
    slots: int = ALL,
    eviction: str = "draft-informed",
    draft: float = DRAFT,
    budget: int | None = None,
) -> Replay:
    """Run the routing; with guesses, the draft's passes turn into prefetch requests."""
    clock, counters = VirtualClock(), Counters()
    transfer = RecordingTransfer(clock, BLOB, BLOB / COPY)
    rule = make_eviction(eviction, [EXPERTS] * LAYERS)
    source = ExpertSource(NoWeights(slots), transfer, rule, BLOB, clock, counters, threaded=False)
    source.grants.step_budget = budget
    clock.add_event_source(transfer.link.next_event, source.pump)
    policy: PrefetchPolicy = OnDemand() if guesses is None else DraftGate(ReadGates(), LAYERS, cutoff)
    found = Replay(counters, transfer.demanded, transfer.wished, 0.0, 0.0)

    def compute(seconds: float) -> None:
        clock.sleep(seconds)
        found.busy += seconds

    for step in range(STEPS):
        issued = counters.prefetch_loads
        source.begin_step()
        for row in range(ROWS):
            for layer in range(LAYERS):
                compute(draft)
                if guesses is not None:
                    states = torch.tensor([[guesses[step][layer][row]]], dtype=torch.float32)  # [1, 1, TOP_K]
                    source.prefetch(policy.on_chunk(LayerChunk(Stage.DRAFT, range(layer, layer + 1), LAYERS, states)))
        for layer in range(LAYERS):
            compute(ATTENTION)
            needed = sorted({expert for row in routing[step][layer] for expert in row})
            delivered: list[int] = []
            for batch in source.use(layer, needed):
                delivered += batch.experts
                compute(EXPERT * len(batch.experts))
            assert sorted(delivered) == needed
        source.end_step()
        found.wished_by_step.append(counters.prefetch_loads - issued)
    found.seconds = clock.now()
    source.close()
    return found


ROUTING = make_routing()


@cache
def on_demand() -> Replay:
    """What all others are compared with."""
    return replay(ROUTING, None)


def test_the_replay_is_sound() -> None:
    """On demand, every expert is loaded at its first use, and most of that is waited for."""
    needed = [
        ExpertKey(layer, expert)
        for step in ROUTING
        for layer, rows in enumerate(step)
        for expert in sorted({e for row in rows for e in row})
    ]
    assert on_demand().demanded == list(dict.fromkeys(needed))
    assert on_demand().wished == []
    assert on_demand().counters.prefetches_requested == 0
    assert on_demand().moved == BLOB * len(set(needed))
    assert on_demand().stall > 0.5 * COPY * len(set(needed)), "a link slow enough to matter"
    assert on_demand().counters.asked == len(needed)


@pytest.mark.parametrize("accuracy", [None, 0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("slots", [ALL, 130])
def test_time_is_compute_and_stall_and_nothing_else(accuracy: float | None, slots: int) -> None:
    guesses = None if accuracy is None else guess(ROUTING, accuracy)
    found = replay(ROUTING, guesses, slots=slots)
    assert found.seconds == pytest.approx(found.busy + found.stall)
    assert found.busy == pytest.approx(on_demand().busy)
    assert found.moved == BLOB * (len(found.demanded) + len(found.wished))
    assert found.counters.asked == on_demand().counters.asked


# ---- what it hides


def test_prefetching_hides_most_of_the_stall() -> None:
    """At the accuracy that a trained draft has, at least two thirds of what on-demand loading waits for."""
    found = replay(ROUTING, guess(ROUTING, 0.85))
    assert found.stall < on_demand().stall / 3
    assert found.seconds < on_demand().seconds


def test_the_better_the_predictor_the_less_is_waited_for() -> None:
    stalls = [replay(ROUTING, guess(ROUTING, accuracy)).stall for accuracy in (0.25, 0.5, 0.75, 1.0)]
    assert stalls == sorted(stalls, reverse=True)
    assert len(set(stalls)) == len(stalls)
    assert stalls[0] < on_demand().stall


def test_a_perfect_predictor_with_time_enough_waits_for_nothing() -> None:
    found = replay(ROUTING, guess(ROUTING, 1.0))
    assert found.stall == 0.0
    assert found.counters.demand_loads == found.counters.late == 0
    assert found.counters.hits == found.counters.asked
    assert found.seconds == pytest.approx(on_demand().busy)


def test_a_perfect_predictor_without_time_waits() -> None:
    """The link, not the predictor, is then the limit: copies begin with the draft and are never idle."""
    found = replay(ROUTING, guess(ROUTING, 1.0), draft=DRAFT / 20)
    assert found.stall > 0
    hasty = replay(ROUTING, None, draft=DRAFT / 20)
    assert found.stall < hasty.stall
    assert found.moved == hasty.moved


def test_a_useless_predictor_delays_a_layer_by_one_copy_at_most() -> None:
    """Only half of the experts are ever needed, only the other half is wished for; a demand load overtakes prefetch requests."""
    half = EXPERTS // 2
    routing = make_routing(experts=half)
    plain = replay(routing, None)
    found = replay(routing, [[[[e + half for e in row] for row in rows] for rows in step] for step in routing])
    assert found.demanded == plain.demanded
    assert len(found.wished) > len(found.demanded) / 2
    assert found.astray == BLOB * len(found.wished)
    assert plain.stall <= found.stall <= plain.stall + STEPS * LAYERS * COPY


# ---- what it costs


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("cutoff", [2, LAYERS])
def test_no_more_is_moved_than_what_is_needed_and_what_is_owned_up_to(accuracy: float, cutoff: int) -> None:
    found = replay(ROUTING, guess(ROUTING, accuracy), cutoff=cutoff)
    assert found.moved <= on_demand().moved + found.astray
    assert set(on_demand().demanded) <= set(found.demanded) | set(found.wished)
    never = set(found.wished) - set(on_demand().demanded)
    assert found.counters.held_bytes == BLOB * len(never), "the ledger knows what was for nothing"
    assert found.counters.wasted_bytes == 0, "nothing was pushed out"
    if accuracy == 1.0:
        assert found.astray == 0
        assert found.moved == on_demand().moved


@pytest.mark.parametrize("eviction", ["lru", "draft-informed"])
def test_with_few_slots_it_still_pays(eviction: str) -> None:
    """Slots for a little over two steps' experts, so that what is brought in pushes something out."""
    scarce = replay(ROUTING, None, slots=130, eviction=eviction)
    found = replay(ROUTING, guess(ROUTING, 0.85), slots=130, eviction=eviction)
    assert scarce.moved > on_demand().moved, "few enough slots to evict"
    assert found.stall < scarce.stall / 2
    assert found.counters.wasted_bytes > 0
    assert 0 <= found.counters.held_bytes < 130 * BLOB
    assert found.moved <= scarce.moved + 2 * found.astray, "what came for nothing, and what it pushed out once more"


# ---- what bounds it


@pytest.mark.parametrize("accuracy", [0.5, 1.0])
def test_the_cutoff_bounds_what_is_moved_ahead(accuracy: float) -> None:
    guesses = guess(ROUTING, accuracy)
    found = [replay(ROUTING, guesses, cutoff=cutoff) for cutoff in range(LAYERS + 1)]
    for cutoff, result in enumerate(found):
        assert all(key.layer < cutoff for key in result.wished)
        predicted = {ExpertKey(layer, e) for s in guesses for layer in range(cutoff) for row in s[layer] for e in row}
        assert result.counters.issued_bytes <= BLOB * len(predicted)
        assert (result.counters.issued_bytes > 0) == (cutoff > 0)
    issued = [result.counters.issued_bytes for result in found]
    assert issued == sorted(issued)
    stalls = [result.stall for result in found]
    assert stalls[0] == on_demand().stall, "a cutoff of none is loading on demand"
    assert found[0].moved == on_demand().moved
    assert stalls[LAYERS] < stalls[LAYERS // 2] < stalls[0]


@pytest.mark.parametrize("experts", [0, 1, 10])
def test_a_steps_budget_is_kept(experts: int) -> None:
    found = replay(ROUTING, guess(ROUTING, 1.0), budget=experts * BLOB)
    assert found.wished_by_step == [experts] * STEPS
    assert found.counters.prefetches_over_budget > 0
    assert (found.stall < on_demand().stall) == (experts > 0)
