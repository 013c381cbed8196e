"""The latency model: predict the time of one step from the times of its parts and the number of missing experts.

The model simulates one step with one link that serves one copy at a time. Numbers of experts are expected values, so
they are fractions. Prefetched experts are queued in the order of layers, from the draft pass that predicts them on.
When a layer's router has selected its experts, the layer's missing experts move before everything queued, and the
layer computes its resident experts meanwhile. docs/latency-model.md says what the model leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times of the parts of a step, in seconds."""

    draft_pass: float
    verify_layer: float  # every expert resident
    load: float  # one expert
    expert_share: float = 0.0  # share of `verify_layer` that comes after the router, from 0 to 1
    cpu: float = 0.0  # one expert on the CPU while the link is busy; 0: missing experts are always loaded
    cpu_alone: float = 0.0  # the same while the link is idle

    def missing_seconds(self, count: int) -> float:
        """Return the time until so many missing experts are there: loaded, or computed on the CPU."""
        return self._best_split(count)[0] if self.cpu else count * self.load

    def loaded_share(self, count: int) -> float:
        """Return the share of so many missing experts that is loaded, if they are divided for the shortest time."""
        return 1 - self._best_split(count)[1] / count if self.cpu else 1.0

    def _best_split(self, count: int) -> tuple[float, int]:
        """Return the shortest time and the experts that the CPU computes for it."""
        found = [(count * self.load, 0), (count * (self.cpu_alone or self.cpu), count)]
        return min(found + [(max((count - n) * self.load, n * self.cpu), n) for n in range(1, count)])


@dataclass(frozen=True, slots=True)
class PredictionQuality:
    """Quality of a source of predictions, counted over experts that are not resident."""

    recall: float  # predicted and needed / needed
    precision: float  # predicted and needed / predicted


NO_PREDICTION = PredictionQuality(recall=0.0, precision=1.0)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Description of the step to predict."""

    costs: StepCosts
    layers: int  # MoE layers of the target
    draft_passes: int  # K
    cutoff: int  # layers that the draft stage prefetches for
    missing: float  # needed experts per layer that are not resident when the step begins
    needed: float  # needed experts per layer
    row_share: float  # top_k / experts of a layer
    from_draft: PredictionQuality = NO_PREDICTION  # predictions made from the draft's hidden states
    from_previous_layer: PredictionQuality = NO_PREDICTION  # predictions made when the previous layer has routed
    slots: float = math.inf  # upper bound on prefetched experts
    missing_by_layer: tuple[float, ...] = ()  # missing experts of each layer / `missing`; empty: 1 for every layer


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted times of a step, in seconds, and the number of experts that it loads."""

    seconds: float
    draft_seconds: float
    stall_seconds: float
    loads: float  # wasted prefetches included


def predict_step(step: StepInputs) -> StepTime:
    """Simulate one step and return its predicted times."""
    simulation, costs = _StepSimulation(step), step.costs
    for number in range(step.draft_passes):
        simulation.compute(costs.draft_pass)
        if step.from_draft.recall:
            added = _predicted_share(step, number + 1) - _predicted_share(step, number)
            quality = PredictionQuality(step.from_draft.recall * added, step.from_draft.precision)
            simulation.queue(range(min(step.cutoff, step.layers)), quality)
    draft_seconds = simulation.now
    for layer in range(step.layers):
        simulation.compute(costs.verify_layer * (1 - costs.expert_share))
        simulation.run_experts(layer)
    return StepTime(simulation.now, draft_seconds, simulation.stalled, simulation.loaded)


def _predicted_share(step: StepInputs, passes: int) -> float:
    """Return the share of the draft's predictions that exist after `passes` passes; each pass adds one row."""
    unused = 1 - step.row_share
    return (1 - unused**passes) / (1 - unused**step.draft_passes) if step.row_share else 0.0


class _StepSimulation:
    """State of a simulated step: the time, the slots and the queue of prefetches. Counts are in experts."""

    def __init__(self, step: StepInputs) -> None:
        self.now = 0.0  # seconds since the step began
        self.stalled = 0.0  # seconds that compute waited for loads
        self.loaded = 0.0
        self._step = step
        self._costs = step.costs
        self._missing = [step.missing * factor for factor in step.missing_by_layer or (1.0,) * step.layers]
        self._predicted = [0.0] * step.layers  # correctly, out of `_missing`
        self._queued_right = [0.0] * step.layers  # correct prefetches that wait for the link
        self._queued_wrong = [0.0] * step.layers
        self._queued = 0.0  # sum of the two
        self._first_queued = 0  # no earlier layer has queued prefetches
        self._resident = [max(0.0, step.needed - one) for one in self._missing]
        self._prefetched = [0.0] * step.layers  # experts that hold a slot until their layer has run
        self._prefetch_budget = step.slots  # no step prefetches more experts than there are slots
        self._free_slots = max(0.0, step.slots - sum(self._resident))  # resident experts keep theirs until used

    def queue(self, layers: range, quality: PredictionQuality) -> None:
        """Queue prefetches for these layers, in proportion to what each layer is missing."""
        for layer in layers:
            right = min(quality.recall * self._missing[layer], self._missing[layer] - self._predicted[layer])
            wrong = right * (1 / quality.precision - 1) if quality.precision else 0.0
            self._predicted[layer] += right
            self._queued_right[layer] += right
            self._queued_wrong[layer] += wrong
            self._queued += right + wrong
        if layers:
            self._first_queued = min(self._first_queued, layers.start)

    def compute(self, seconds: float) -> None:
        """Advance the time by `seconds` of compute; queued prefetches load meanwhile."""
        self._prefetch(seconds)
        self.now += seconds

    def run_experts(self, layer: int) -> None:
        """Run the part of a layer after its router: load what is missing, predict the next layer, compute."""
        step, costs = self._step, self._costs
        demanded = self._queued_right[layer] + self._missing[layer] - self._predicted[layer]
        self._queued = max(0.0, self._queued - self._queued_right[layer] - self._queued_wrong[layer])
        self._queued_right[layer] = self._queued_wrong[layer] = 0.0  # wrong prefetches are dropped
        self._predict_next(layer + 1)
        compute = costs.verify_layer * costs.expert_share
        if demanded > 0.0:
            after_last = compute * min(1.0, demanded) / max(1.0, step.needed)  # compute of the last expert to arrive
            needed = max(1, round(step.needed))
            seconds, loaded = _expected_longer(compute - after_last, demanded, needed, costs)
            seconds += after_last
            self._prefetch(seconds - loaded * costs.load)
            self.loaded += loaded
            self.stalled += seconds - compute
            self.now += seconds
        else:
            self.compute(compute)
        self._free_slots += self._resident[layer] + self._prefetched[layer]

    def _predict_next(self, layer: int) -> None:
        """Queue prefetches for a layer, as predicted from the previous layer; the draft's predictions are excluded."""
        quality = self._step.from_previous_layer
        if quality.recall and layer < self._step.layers and self._missing[layer] > 0.0:
            unpredicted = 1 - self._predicted[layer] / self._missing[layer]
            self.queue(range(layer, layer + 1), PredictionQuality(quality.recall * unpredicted, quality.precision))

    def _prefetch(self, seconds: float) -> None:
        """Load queued prefetches for `seconds`, the nearest layers first, as far as slots allow."""
        amount = min(self._queued, self._prefetch_budget, self._free_slots)
        if self._costs.load:
            amount = min(amount, seconds / self._costs.load)
        self._queued -= amount
        self._prefetch_budget -= amount
        self._free_slots -= amount
        self.loaded += amount
        while amount > 0.0 and self._first_queued < self._step.layers:
            layer = self._first_queued
            queued = self._queued_right[layer] + self._queued_wrong[layer]
            self._prefetched[layer] += min(queued, amount)
            if queued > amount:
                remaining = 1 - amount / queued
                self._queued_right[layer] *= remaining
                self._queued_wrong[layer] *= remaining
                return
            amount -= queued
            self._queued_right[layer] = self._queued_wrong[layer] = 0.0
            self._first_queued += 1


@lru_cache(maxsize=1024)  # many layers, and many of the compared depths, have the same arguments
def _expected_longer(compute: float, demanded: float, needed: int, costs: StepCosts) -> tuple[float, float]:
    """Return the mean of max(compute, time of missing experts) in seconds, and the mean number that is loaded.

    The number of missing experts is binomial with mean `demanded`. It varies from layer to layer: a layer with many of
    them waits, and a layer without them gains nothing.
    """
    chance = min(1.0, demanded / needed)
    if not costs.cpu and (compute <= 0.0 or chance >= 1.0 or costs.load <= 0.0):
        return max(compute, demanded * costs.load), demanded
    if chance >= 1.0:
        return max(compute, costs.missing_seconds(needed)), needed * costs.loaded_share(needed)
    mean, loaded, probability = compute, 0.0, (1 - chance) ** needed  # of no missing expert
    for count in range(1, needed + 1):
        probability *= (needed - count + 1) / count * chance / (1 - chance)
        loaded += probability * count * costs.loaded_share(count)
        if (longer := costs.missing_seconds(count) - compute) > 0.0:
            mean += probability * longer
    return mean, loaded


# ---- how many experts a step needs and misses


def expected_experts(experts: float, top_k: float, rows: int) -> float:
    """Return the expected number of distinct experts that `rows` rows need in a layer, under uniform routing."""
    return experts * (1 - (1 - top_k / experts) ** rows)


@dataclass(frozen=True, slots=True)
class ObservedDemand:
    """Needed and missing experts of a measured run, and the rules that scale them to another K or number of slots."""

    layers: int
    experts_per_layer: int
    top_k: int
    slots: int
    rows: int  # verified per step: K + 1
    needed: float  # experts per layer and step
    missing: float

    def needed_for(self, rows: int) -> float:
        """Scale `needed` to another number of rows, in proportion to uniform routing."""
        there = expected_experts(self.experts_per_layer, self.top_k, rows)
        here = expected_experts(self.experts_per_layer, self.top_k, self.rows)
        return min(float(self.experts_per_layer), self.needed * there / here)

    def missing_for(self, rows: int, slots: int) -> float:
        """Scale `missing`: its share of `needed` is (1 - slots / experts) ** a, where a fits the measured run."""
        return self.needed_for(rows) * self._missing_share(slots)

    def _missing_share(self, slots: int) -> float:
        experts = self.layers * self.experts_per_layer
        there, here = max(0.0, 1 - slots / experts), max(0.0, 1 - self.slots / experts)
        share = min(1.0, self.missing / self.needed) if self.needed else 0.0
        if there == 0.0 or here in (0.0, 1.0):  # every expert has a slot; or the run had slots for all or none
            return there
        if share == 0.0:
            return 0.0 if slots >= self.slots else there
        return float(there ** (math.log(share) / math.log(here)))
