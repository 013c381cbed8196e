"""Prefetch admission: load an expert ahead of demand only if that is expected to save time.

A predicted expert that is needed saves the part of its copy that is hidden; one that is not needed wastes a copy. So,
in units of one copy, a prefetch is worth

    worth = min(1, idle / load) - (1 - precision) - delay

- idle: seconds until the expert's layer runs in which the link has nothing else to do: the rest of the draft, then the
  verified layers before it, less the prefetches that were admitted before and are due no later;
- load: seconds of one copy;
- precision: share of such predictions that were right, learned by layer, draft pass and score;
- delay: chance that the copy holds up an expert that a router demands: the busy share of the link during verification,
  or 0 if the copy ends before the draft does.

It is admitted if `worth` is positive, and it may evict a resident whose own chance of use is lower. Where the link is
the bottleneck, nothing is idle and nothing is admitted. All predictions, admitted or not, reach the eviction policy.
While all of it saves less than the host spends on it, predictions are paused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.predict.costs import Rates
from spmoe.types import NO_PREFETCHES, PrefetchRequests

_BINS = 8  # classes of scores; an even share of a row's weight is the lower bound of the fifth
_PASSES = 16  # draft passes that are told apart
_DECAY = 0.98  # weight of a prediction, per later step
_WIDER = 4.0  # predictions that the rate of a wider class counts for in a narrower one
_PRIOR = 0.5  # share of right predictions before any was made
_NEW_STEPS = 16  # steps that are all learned from; then one of `_STEPS_BETWEEN` is
_STEPS_BETWEEN = 4
_MEAN_DECAY = 0.9  # weight of a step's gain and effort, per later step
_REALIZED = 0.3  # of the expected saving: a layer's loads overlap with one another, and with the host's own work
_STEPS_OF_A_JUDGEMENT = 12  # after which predictions that cost more than they save are paused
_FIRST_PAUSE = 64  # steps; twice as many the next time, and so on
_LONGEST_PAUSE = 1024


class Precision:
    """Share of predicted experts that their step needed, by layer, draft pass and score.

    The class after the last pass holds predictions from the target's own layers. A class with few predictions follows
    that of all layers, and this one that of all passes.
    """

    def __init__(self, layers: int, top_k: int) -> None:
        self.rates = np.full((layers, _PASSES + 1, _BINS), _PRIOR)
        self._counts = np.zeros((2, *self.rates.shape))  # predicted, right
        self._scale = 0.5 * _BINS * top_k

    def classes(self, layers: np.ndarray, passes: np.ndarray | int, scores: np.ndarray) -> np.ndarray:
        """Return the index of each prediction's class in the flat table of rates."""  # all: [predictions]
        bins = np.minimum((self._scale * scores).astype(np.int64), _BINS - 1)
        found: np.ndarray = (layers * (_PASSES + 1) + passes) * _BINS + bins
        return found

    def learn(self, classes: np.ndarray, right: np.ndarray, steps: int = 1) -> None:
        """Count the predictions of one step, the last of so many."""  # both: [predictions]
        counts = [np.bincount(classes, weights, self.rates.size) for weights in (None, right)]
        self._counts = _DECAY**steps * self._counts + np.stack(counts).reshape(self._counts.shape)
        rate: np.ndarray | float = _PRIOR
        for predicted, correct in (
            self._counts.sum(axis=(1, 2)),  # by score
            self._counts.sum(axis=1),  # by pass and score
            self._counts,
        ):
            rate = (correct + _WIDER * rate) / (predicted + _WIDER)
        self.rates = np.asarray(rate)


class Benefit:
    """Whether predictions pay: what prefetching is expected to save, against the host's effort."""

    def __init__(self) -> None:
        self.paused = False
        self._saved = self._spent = 0.0  # decayed means, in seconds per step
        self._steps = 0  # since the last pause began or ended
        self._pause = _FIRST_PAUSE

    def add_step(self, saved: float, spent: float) -> None:
        """Take note of a step: expected saving and effort in seconds; decide about the next."""
        self._steps += 1
        if self.paused:
            if self._steps >= self._pause:
                self.paused, self._steps, self._pause = False, 0, min(2 * self._pause, _LONGEST_PAUSE)
                self._saved = self._spent = 0.0
            return
        self._saved = _MEAN_DECAY * self._saved + (1 - _MEAN_DECAY) * saved
        self._spent = _MEAN_DECAY * self._spent + (1 - _MEAN_DECAY) * spent
        if self._steps >= _STEPS_OF_A_JUDGEMENT:
            if _REALIZED * self._saved < self._spent:
                self.paused, self._steps = True, 0
            else:
                self._pause = _FIRST_PAUSE


class PrefetchAdmission:
    """Decides which predicted experts are loaded; learns from steps how often predictions are right."""

    def __init__(self, layers: int, experts_per_layer: int, top_k: int, rates: Rates) -> None:
        self.precision = Precision(layers, top_k)
        self.benefit = Benefit()
        self._rates = rates
        self._needed = np.zeros((layers, experts_per_layer), dtype=bool)  # in this step, if it is learned from
        self._admitted = np.zeros((layers, experts_per_layer), dtype=bool)  # in this step
        self._due = np.zeros(layers)  # prefetches admitted in this step, by layer
        self._first: float | None = None  # seconds since the step began, at the first of them
        self._passes = np.zeros(layers, dtype=np.int64)  # draft passes of this step that predicted the layer
        self._layers = np.arange(layers)
        self._predictions: list[tuple[np.ndarray, PrefetchRequests]] = []  # classes, and the experts
        self._k: int | None = None  # of this step; None: it reads a prompt, and every request is admitted
        self._steps = 0
        self._learns = True  # whether this step is learned from
        self._saved = self._spent = 0.0  # in this step, in seconds

    @property
    def paused(self) -> bool:
        """Whether predictions are not even looked at in this step, since they cost more than they save."""
        return self.benefit.paused and self._k is not None

    def begin_step(self, k: int | None) -> None:
        """Learn from the step before, and begin one that drafts K tokens; None: one that reads a prompt."""
        if self._predictions:
            classes = np.concatenate([classes for classes, _ in self._predictions])
            right = np.concatenate([self._needed[experts.layers, experts.experts] for _, experts in self._predictions])
            self.precision.learn(classes, right, 1 if self._steps <= _NEW_STEPS else _STEPS_BETWEEN)
            self._predictions.clear()
            self._needed[:] = False
        if self._spent or self._saved or (self.benefit.paused and self._k is not None):
            self.benefit.add_step(self._saved, self._spent)
            self._saved = self._spent = 0.0
        if self._first is not None:
            self._admitted[:] = False
            self._due[:] = 0.0
            self._first = None
        self._passes[:] = 0
        self._k = k
        self._steps += k is not None
        self._learns = k is not None and (self._steps <= _NEW_STEPS or not self._steps % _STEPS_BETWEEN)

    def on_routed(self, layer: int, experts: Sequence[int]) -> None:
        """Take note of the experts that a layer needs."""
        if self._predictions:
            self._needed[layer, experts] = True

    def add_effort(self, seconds: float) -> None:
        """Take note of time that the host has spent on predictions."""
        self._spent += seconds

    def admit(self, requests: PrefetchRequests, absent: np.ndarray, layer: int) -> PrefetchRequests:
        """Return the requests to load, of those that are absent; `layer` runs, or -1 while the draft does."""
        # absent: bool [requests]
        if self._k is None:
            return requests.where(absent)
        drafting, rates = layer < 0, self._rates
        passes: np.ndarray | int = _PASSES
        if drafting:
            passes = np.minimum(self._passes[requests.layers], _PASSES - 1)
            self._passes[requests.layers] += 1  # once per layer, however many of its experts are predicted
        classes = self.precision.classes(requests.layers, passes, requests.scores)
        if self._learns:
            self._predictions.append((classes, requests))
        at = np.flatnonzero(absent)
        if not (len(at) and rates.load and rates.layer and (rates.draft_pass or not self._k)):
            return NO_PREFETCHES
        passes_over = min(int(np.max(passes)) + 1, self._k) if drafting else self._k
        draft_end = self._k * rates.draft_pass  # seconds since the step began, as all times here
        now = passes_over * rates.draft_pass + max(0, layer) * rates.layer
        chances, due = self.precision.rates.ravel()[classes[at]], requests.deadlines[at]
        # worth of each if no other were admitted now: most are not worth it, and need no closer look
        first = now if self._first is None else self._first
        start = np.maximum(now, first + np.cumsum(self._due) * rates.load)
        hidden = np.minimum(1.0, (draft_end + self._layers * rates.layer - start) / rates.load)
        hidden -= np.where(start + rates.load > draft_end, rates.busy, 0.0)
        worths = hidden[due] - (1 - chances)
        candidates = np.flatnonzero((worths > 0.0) & ~self._admitted[due, requests.experts[at]])
        if not len(candidates):
            return NO_PREFETCHES
        candidates = candidates[np.lexsort((-chances[candidates], due[candidates]))]
        admitted_at, admitted_worths = list[int](), list[float]()
        starts, candidate_chances = start[due[candidates]].tolist(), chances[candidates].tolist()
        for i, earliest, chance in zip(candidates.tolist(), starts, candidate_chances, strict=True):
            # those that were admitted now are due no later: they run first
            begin = earliest + len(admitted_at) * rates.load
            worth = min(1.0, (draft_end + due.item(i) * rates.layer - begin) / rates.load) - (1 - chance)
            worth -= rates.busy if begin + rates.load > draft_end else 0.0
            if worth > 0.0:
                admitted_at.append(at.item(i))
                admitted_worths.append(worth)
        if admitted_at:
            self._first = first
        admitted = requests.where(np.array(admitted_at, dtype=np.int64))
        self._admitted[admitted.deadlines, admitted.experts] = True
        np.add.at(self._due, admitted.deadlines, 1.0)
        self._saved += rates.load * sum(admitted_worths)
        return admitted.with_worth(np.array(admitted_worths))
