"""The latency model: how long a step takes, from what its parts take and how much of what it needs is missing.

A step is played in experts and fractions of them. The link serves one copy at a time. What is foretold waits in the
order of layers, from the draft pass that names it on. When a layer's router has chosen, what it lacks goes first,
foretold or not, and the layer computes what is there meanwhile. docs/latency-model.md says what is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from spmoe.errors import UsageError

POLICIES = ("on-demand", "draft-gate", "next-gate", "draft-gate+next-gate", "oracle")  # that it knows


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a step take when nothing else runs. Seconds."""

    draft_pass: float
    verify_layer: float  # every expert in a slot
    load: float  # of one expert
    expert_share: float = 0.0  # of a verified layer, what comes after its router has chosen
    compute_slowdown: float = 1.0  # times as long, while copies run
    link_slowdown: float = 1.0  # times as long, while compute runs


@dataclass(frozen=True, slots=True)
class Guess:
    """How good foresight is, counted in experts that are missing."""

    recall: float  # of the needed ones, those that were named
    precision: float  # of the named ones, those that were needed


SURE, BLIND = Guess(1.0, 1.0), Guess(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Step:
    """A step to predict."""

    costs: Costs
    policy: str  # one of `POLICIES`
    layers: int  # MoE layers of the target
    passes: int  # of the draft: K
    cutoff: int  # layers that the draft stage prefetches for
    missing: float  # experts per layer that are needed and in no slot as the step begins
    needed: float  # experts per layer that are needed
    row_share: float  # of a layer's experts, what one row uses
    draft: Guess = BLIND  # what the draft foretells
    own: Guess = BLIND  # what the layer before foretells
    slots: float = math.inf  # which bound what can be moved ahead of demand
    by_layer: tuple[float, ...] = ()  # how many times the mean each layer misses; empty: all alike


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step is predicted to take. Seconds."""

    seconds: float
    draft_seconds: float
    stall_seconds: float
    loads: float  # experts moved, in vain ones included


def predict_step(step: Step) -> StepTime:
    """Play one step."""
    if step.policy not in POLICIES:
        raise UsageError(f"the latency model knows {', '.join(POLICIES)}, not {step.policy}; choose one of them")
    play, parts, costs = _Play(step), step.policy.split("+"), step.costs
    if step.policy == "oracle":
        play.name(range(step.layers), SURE)
    for number in range(step.passes):
        play.compute(costs.draft_pass)
        if "draft-gate" in parts:
            news = _named_by(number + 1, step) - _named_by(number, step)
            play.name(range(min(step.cutoff, step.layers)), Guess(step.draft.recall * news, step.draft.precision))
    drafted = play.now
    for layer in range(step.layers):
        play.compute(costs.verify_layer * (1 - costs.expert_share))
        play.experts(layer, foretells="next-gate" in parts and layer + 1 < step.layers)
    return StepTime(play.now, drafted, play.stalled, play.moved)


def _named_by(passes: int, step: Step) -> float:
    """The share of all that the draft names which it has named after so many passes, each of which adds one row."""
    return (1 - (1 - step.row_share) ** passes) / (1 - (1 - step.row_share) ** step.passes) if step.row_share else 0.0


class _Play:
    """The clock, the link and what waits for it."""

    def __init__(self, step: Step) -> None:
        self.now = 0.0
        self.stalled = 0.0
        self.moved = 0.0
        self._step = step
        self._costs = step.costs
        self._right = [0.0] * step.layers  # experts that wait, by layer
        self._wrong = [0.0] * step.layers
        self._named = [0.0] * step.layers  # of a layer's missing experts
        self._budget = step.slots  # no more is moved ahead of demand in a step
        self._missing = [step.missing * times for times in step.by_layer or (1.0,) * step.layers]
        self._hits = [max(0.0, step.needed - one) for one in self._missing]  # they keep their slots until they ran
        self._room = max(0.0, step.slots - sum(self._hits))
        self._fetched = [0.0] * step.layers  # ahead, into slots that are held until their layer has run
        self._waiting = 0.0
        self._first = 0  # nothing waits before this layer

    def name(self, layers: range, guess: Guess) -> None:
        """Experts of these layers are foretold: a share of all that are missing."""
        for layer in layers:
            right = min(guess.recall * self._missing[layer], self._missing[layer] - self._named[layer])
            wrong = right * (1 / guess.precision - 1) if guess.precision else 0.0
            self._named[layer] += right
            self._right[layer] += right
            self._wrong[layer] += wrong
            self._waiting += right + wrong
        if layers:
            self._first = min(self._first, layers.start)

    def compute(self, seconds: float) -> None:
        """Compute for so long, what waits moving meanwhile; both are slower where they meet."""
        costs = self._costs
        together = seconds * costs.compute_slowdown
        waiting = self._allowed * costs.load * costs.link_slowdown
        if waiting < together:  # the link falls idle on the way
            together = waiting + seconds - waiting / costs.compute_slowdown
        self._serve(together, costs.link_slowdown)
        self.now += together

    def experts(self, layer: int, foretells: bool) -> None:
        """A layer's router has chosen: what it lacks moves first, then what it may foretell of the next layer."""
        self._run_experts(layer, foretells)
        self._room += self._hits[layer] + self._fetched[layer]  # it has run

    def _run_experts(self, layer: int, foretells: bool) -> None:
        step, costs = self._step, self._costs
        late = self._right[layer]
        self._waiting = max(0.0, self._waiting - late - self._wrong[layer])
        self._right[layer] = self._wrong[layer] = 0.0
        demanded = late + self._missing[layer] - self._named[layer]
        if foretells and self._missing[layer + 1] > 0.0:
            unnamed = 1 - self._named[layer + 1] / self._missing[layer + 1]
            self.name(range(layer + 1, layer + 2), Guess(step.own.recall * unnamed, step.own.precision))
        compute = costs.verify_layer * costs.expert_share
        if demanded <= 0.0:
            self.compute(compute)
            return
        loading = demanded * costs.load
        self.moved += demanded
        busy = compute + (costs.compute_slowdown - 1) * min(compute, loading)
        last = compute * min(1.0, demanded) / max(1.0, step.needed)  # of the experts that arrive last
        took = last + _longer(busy - last, demanded, max(1, round(step.needed)), costs.load)
        self._serve(took - loading, costs.link_slowdown)
        self.stalled += took - busy
        self.now += took

    @property
    def _allowed(self) -> float:
        """Of what waits, what may move now."""
        return min(self._waiting, self._budget, self._room)

    def _serve(self, seconds: float, slowdown: float) -> None:
        """Move what waits, the nearest layers first."""
        each = self._costs.load * slowdown
        amount = min(self._allowed, seconds / each) if each else self._allowed
        self._waiting -= amount
        self._budget -= amount
        self._room -= amount
        self.moved += amount
        while amount > 0.0 and self._first < self._step.layers:
            here = self._right[self._first] + self._wrong[self._first]
            self._fetched[self._first] += min(here, amount)
            if here <= amount:
                amount -= here
                self._right[self._first] = self._wrong[self._first] = 0.0
                self._first += 1
            else:
                left = 1 - amount / here
                self._right[self._first] *= left
                self._wrong[self._first] *= left
                return


@lru_cache(maxsize=1024)  # layers are alike, and so are the depths that are compared
def _longer(compute: float, demanded: float, needed: int, load: float) -> float:
    """The mean of the longer one, compute or loads, where each needed expert is demanded by a chance of its own.

    Their number varies from layer to layer: those that lack many wait, and those that lack none gain nothing by it.
    """
    chance = min(1.0, demanded / needed)
    if compute <= 0.0 or chance >= 1.0 or load <= 0.0:
        return max(compute, demanded * load)
    without = 1 - chance
    mean, likely = compute, without**needed  # of none
    for count in range(1, needed + 1):
        likely *= (needed - count + 1) / count * chance / without
        if (longer := count * load - compute) > 0.0:
            mean += likely * longer
    return mean


# ---- how much is needed and missing


def evenly_needed(experts: int, top_k: int, rows: int) -> float:
    """Expected experts of a layer that so many rows need between them, under even routing."""
    return experts * (1 - (1 - top_k / experts) ** rows)


@dataclass(frozen=True, slots=True)
class Habits:
    """What a run has shown of one policy's needs, and the rules by which that says something of others."""

    layers: int
    experts_per_layer: int
    top_k: int
    slots: int
    rows: int  # verified together: K + 1
    needed: float  # experts per layer and step
    missing: float

    def needed_for(self, rows: int) -> float:
        """As even routing grows with the rows, from where this run was."""
        grown = evenly_needed(self.experts_per_layer, self.top_k, rows)
        here = evenly_needed(self.experts_per_layer, self.top_k, self.rows)
        return min(float(self.experts_per_layer), self.needed * grown / here)

    def missing_for(self, rows: int, slots: int) -> float:
        """The share that is missing is (1 - slots / experts) to the power that this run has shown."""
        return self.needed_for(rows) * self._missing_share(slots)

    def _missing_share(self, slots: int) -> float:
        every = self.layers * self.experts_per_layer
        without, here = max(0.0, 1 - slots / every), max(0.0, 1 - self.slots / every)
        shown = min(1.0, self.missing / self.needed) if self.needed else 0.0
        if without == 0.0 or here in (0.0, 1.0):  # all have slots; or the run had none, or all, and shows nothing
            return without
        if shown == 0.0:
            return 0.0 if slots >= self.slots else without
        return float(without ** (math.log(shown) / math.log(here)))
