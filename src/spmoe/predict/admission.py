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

    def learn(self, classes: np.ndarray, right: np.ndarray) -> None:
        """Count the predictions of one step."""  # both: [predictions]
        counts = [np.bincount(classes, weights, self.rates.size) for weights in (None, right)]
        self._counts = _DECAY * self._counts + np.stack(counts).reshape(self._counts.shape)
        rate: np.ndarray | float = _PRIOR
        for predicted, correct in (
            self._counts.sum(axis=(1, 2)),  # by score
            self._counts.sum(axis=1),  # by pass and score
            self._counts,
        ):
            rate = (correct + _WIDER * rate) / (predicted + _WIDER)
        self.rates = np.asarray(rate)


class PrefetchAdmission:
    """Decides which predicted experts are loaded; learns from every step how often predictions are right."""

    def __init__(self, layers: int, experts_per_layer: int, top_k: int, rates: Rates) -> None:
        self.precision = Precision(layers, top_k)
        self._rates = rates
        self._needed = np.zeros((layers, experts_per_layer), dtype=bool)  # in this step
        self._admitted = np.zeros((layers, experts_per_layer), dtype=bool)  # in this step
        self._due = np.zeros(layers)  # prefetches admitted in this step, by layer
        self._passes = np.zeros(layers, dtype=np.int64)  # draft passes of this step that predicted the layer
        self._predictions: list[tuple[np.ndarray, PrefetchRequests]] = []  # classes, and the experts
        self._k: int | None = None  # of this step; None: it reads a prompt, and every request is admitted

    def begin_step(self, k: int | None) -> None:
        """Learn from the step before, and begin one that drafts K tokens; None: one that reads a prompt."""
        if self._predictions:
            classes = np.concatenate([classes for classes, _ in self._predictions])
            right = np.concatenate([self._needed[one.layers, one.experts] for _, one in self._predictions])
            self.precision.learn(classes, right)
            self._predictions.clear()
        self._needed[:] = False
        self._admitted[:] = False
        self._due[:] = 0.0
        self._passes[:] = 0
        self._k = k

    def on_routed(self, layer: int, experts: Sequence[int]) -> None:
        """Take note of the experts that a layer needs."""
        self._needed[layer, experts] = True

    def admit(self, requests: PrefetchRequests, absent: np.ndarray, layer: int) -> PrefetchRequests:
        """Return the requests to load, of those that are absent; `layer` runs, or -1 while the draft does."""
        # absent: bool [requests]
        if self._k is None:
            return requests.where(absent)
        passes: np.ndarray | int = _PASSES
        if layer < 0:
            passes = np.minimum(self._passes[requests.layers], _PASSES - 1)
            self._passes[requests.layers] += 1  # once per layer, however many of its experts are predicted
        classes = self.precision.classes(requests.layers, passes, requests.scores)
        self._predictions.append((classes, requests))
        load, done = self._rates.load, int(np.max(passes)) + 1 if layer < 0 else self._k
        if not (absent.any() and load and self._rates.layer and (self._rates.draft_pass or not self._k)):
            return NO_PREFETCHES
        draft = self._k * self._rates.draft_pass
        passed = min(done, self._k) * self._rates.draft_pass + max(0, layer) * self._rates.layer
        at = np.flatnonzero(absent)
        chances = self.precision.rates.ravel()[classes[at]]
        order = np.lexsort((-chances, requests.deadlines[at]))
        at, chances = at[order], chances[order]
        admitted = np.cumsum(self._due)
        chosen, worths = list[int](), list[float]()
        for i, chance, key in zip(
            at.tolist(),
            chances.tolist(),
            zip(requests.deadlines[at].tolist(), requests.experts[at].tolist(), strict=True),
            strict=True,
        ):
            if self._admitted[key]:
                continue  # of an earlier pass; it waits in the queue
            due = key[0]
            start = max(passed, admitted[due] * load)
            idle = draft + due * self._rates.layer - start
            worth = min(1.0, idle / load) - (1 - chance) - (self._rates.busy if start + load > draft else 0.0)
            if worth > 0.0:
                self._admitted[key] = True
                self._due[due] += 1
                admitted[due:] += 1
                chosen.append(i)
                worths.append(worth)
        return requests.where(np.array(chosen, dtype=np.int64)).worth_of(np.array(worths))
