"""Draft-informed eviction: keep experts that are likely used when their layer runs next, and soon.

Layers run in a fixed cycle, so when one step uses more experts than there are slots, least-recently-used evicts exactly
the experts that the next layers need. This policy combines how often experts were used with the draft's predictions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction.base import ScoredEviction
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import PrefetchRequests


class PredictionAccuracy:
    """Share of recent predictions that were right, by the number of predictions of an expert and their best score."""

    _SCORE_BOUNDS = np.array([0.25, 0.5, 0.75])  # between the classes of scores
    _STEP_DECAY = 0.95  # weight of a step's observations, one step later
    _PRIOR = 8.0  # predictions that the initial assumption counts for

    def __init__(self) -> None:
        assumed = np.linspace(0.7, 0.95, len(self._SCORE_BOUNDS) + 1)
        self._predicted = np.full((2, len(assumed)), self._PRIOR)  # [predicted once or more often, score class]
        self._right = self._predicted * np.stack((assumed, np.sqrt(assumed)))
        self._expected_uses = self._PRIOR  # of experts that were not predicted, by their frequency
        self._unpredicted_uses = self._PRIOR * 0.6
        # share of right predictions: [times predicted (0 counts as 1), score class]
        self._chances = np.empty((3, len(assumed)))
        self._update_chances()

    @property
    def unpredicted_factor(self) -> float:
        """Factor on an expert's frequency of use when the draft did not predict it."""
        return min(1.0, self._unpredicted_uses / self._expected_uses)

    def chance(self, times: np.ndarray, score: np.ndarray) -> np.ndarray:
        """Return the chance that an expert is used, from how often it was predicted and its best score."""
        chance: np.ndarray = self._chances[np.minimum(times, 2), self._SCORE_BOUNDS.searchsorted(score)]
        return chance

    def learn(self, times: np.ndarray, score: np.ndarray, used: np.ndarray, frequency: np.ndarray) -> None:
        """Learn from a step, from its layers that had predictions."""  # all: [layers, experts]
        predicted = times > 0
        cells = (times[predicted] > 1) * self._predicted.shape[1] + self._SCORE_BOUNDS.searchsorted(score[predicted])
        for table, weights in ((self._predicted, None), (self._right, used[predicted])):
            table *= self._STEP_DECAY
            table += np.bincount(cells, weights, table.size).reshape(table.shape)
        self._update_chances()
        self._expected_uses = self._STEP_DECAY * self._expected_uses + frequency[~predicted].sum()
        self._unpredicted_uses = self._STEP_DECAY * self._unpredicted_uses + used[~predicted].sum()

    def _update_chances(self) -> None:
        np.divide(self._right, self._predicted, out=self._chances[1:])
        self._chances[0] = self._chances[1]


_INDEPENDENT_ROWS = 4  # rows of a step that are routed independently: it has a few more, which tend to agree
_PROMPT_WEIGHT = 0.7  # of a prompt's routing in the frequency of use, against that of the requests before


@EVICTION_POLICIES.register("draft-informed")
class DraftInformed(ScoredEviction):
    """Scores an expert by the chance of its use when its layer runs next, or later, discounted by the distance.

    The chance starts from the frequency of use, decayed with every step; a prompt sets it from the share of rows routed
    to each expert. If the draft made predictions for a layer that is still to run in this step, they replace the
    frequency, as far as predictions were right lately: a predicted expert has the chance measured for its score, and
    the frequency of the others is reduced, the more so the more draft passes are over. A prefetch evicts only experts
    that score below `swap_margin` times its own score: swapping two equally likely experts would only cost bytes.
    """

    scores_are_chances = True

    def __init__(
        self, experts_per_layer: Sequence[int], decay: float = 0.9, discount: float = 0.8, swap_margin: float = 0.8
    ) -> None:
        super().__init__(experts_per_layer)
        self._decay = decay  # of the frequency, per step
        self._discount = discount  # of a use one step later
        self._swap_margin = swap_margin
        self._frequency = np.zeros(self.shape)  # decayed share of steps that used the expert
        self._used_bytes = bytearray(self._last_touch.size)
        self._used = np.frombuffer(self._used_bytes, dtype=bool).reshape(self.shape)  # in this step; shares memory
        self._prompt_shares = np.zeros(self.shape)  # of rows routed to the expert, summed over the chunks of a prompt
        self._prompt_chunks = np.zeros(self.shape[0], dtype=int)  # read in this step, by layer
        self._times_predicted = np.zeros(self.shape, dtype=int)  # in this step
        self._best_score = np.zeros(self.shape)  # of this step's predictions
        self._chance = np.zeros(self.shape)  # of use, by the predictions of this step
        self._passes = np.zeros(self.shape[0], dtype=int)  # draft passes of this step that predicted the layer
        self._usual_passes = 1
        self._accuracy = PredictionAccuracy()
        self._factors = self._unpredicted_factors()
        self._later = np.zeros(self.shape)  # discounted chance of use in the steps after the next
        self._by_frequency = np.zeros(self.shape)  # discounted chance of use from the layer's next run on
        self._expected = np.zeros(self.shape)  # like it, with the predictions of this step
        self._stale = slice(0, 0)  # layers whose `_expected` must be computed again
        layer, count = np.arange(len(experts_per_layer))[:, None], len(experts_per_layer)
        nearness = [discount ** ((layer - at - 1) % count / count) for at in range(-1, count)]
        # by position; each is [layers, experts], which multiplies faster than [layers, 1]
        self._nearness = [np.repeat(column, self.shape[1], axis=1) for column in nearness]

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        last_touch, used, start = self._last_touch_view, self._used_bytes, layer * self.shape[1]
        for tick, expert in enumerate(experts, start=self._ticks + 1):
            last_touch[start + expert] = tick
            used[start + expert] = True
        self._ticks += len(experts)

    def on_prompt(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        self._prompt_shares[layer, experts] += shares
        self._prompt_chunks[layer] += 1

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        if not len(prefetches):
            return
        numbers = prefetches.numbers(self.shape[1])
        times = self._times_predicted.ravel()[numbers] + 1
        score = np.maximum(self._best_score.ravel()[numbers], prefetches.scores)
        self._times_predicted.ravel()[numbers] = times
        self._best_score.ravel()[numbers] = score
        self._chance.ravel()[numbers] = self._accuracy.chance(times, score)
        self._passes[prefetches.layers] += 1  # once per layer, however many of its experts are predicted
        first, last = prefetches.span()
        self._mark_stale(first, last + 1)

    def on_layer(self, layer: int) -> None:
        before = self._position
        super().on_layer(layer)
        if layer > before:  # predictions for layers that have run are void
            self._expected[before + 1 : layer + 1] = self._by_frequency[before + 1 : layer + 1]
        else:  # another forward in the same step
            self._mark_stale(layer + 1, self.shape[0])

    def begin_step(self, sequence_id: int = 0) -> None:
        if len(predicted := np.flatnonzero(self._passes)):
            observed = (self._times_predicted, self._best_score, self._used, self._frequency)
            self._accuracy.learn(*(table[predicted] for table in observed))
            self._usual_passes = int(self._passes.max())
            self._factors = self._unpredicted_factors()
        self._update_frequency()
        self._later = chance_of_later_use(self._frequency, self._discount)
        self._by_frequency = chance_of_any_use(self._frequency, self._later)
        self._expected[:] = self._by_frequency
        self._used[:] = False
        self._times_predicted[:] = 0
        self._best_score[:] = 0.0
        self._chance[:] = 0.0
        self._passes[:] = 0
        self._position, self._stale, self._scores = -1, slice(0, 0), None

    def compute_scores(self) -> np.ndarray:
        layers = slice(max(self._stale.start, self._position + 1), self._stale.stop)
        self._stale = slice(0, 0)
        if layers.start < layers.stop:
            factor = self._factors[np.minimum(self._passes[layers], self._usual_passes)]
            unpredicted = self._frequency[layers] * factor[:, None]
            self._expected[layers] = chance_of_any_use(
                np.maximum(self._chance[layers], unpredicted), self._later[layers]
            )
        scores: np.ndarray = self._expected * self._nearness[self._position + 1]
        return scores

    def _update_frequency(self) -> None:
        decay, observed = np.full((self.shape[0], 1), self._decay), self._used.astype(float)
        if len(read := np.flatnonzero(self._prompt_chunks)):
            share = np.minimum(1.0, self._prompt_shares[read] / self._prompt_chunks[read, None])
            decay[read], observed[read] = 1 - _PROMPT_WEIGHT, 1 - (1 - share) ** _INDEPENDENT_ROWS
            self._prompt_shares[:], self._prompt_chunks[:] = 0.0, 0
        self._frequency = decay * self._frequency + (1 - decay) * observed

    def _mark_stale(self, start: int, stop: int) -> None:
        stale = self._stale
        if stale.start < stale.stop:
            start, stop = min(start, stale.start), max(stop, stale.stop)
        self._stale, self._scores = slice(start, stop), None

    def _unpredicted_factors(self) -> np.ndarray:
        """Return the factor on the frequency of unpredicted experts, by the number of draft passes that are over."""
        over = np.arange(self._usual_passes + 1) / self._usual_passes
        factors: np.ndarray = 1 - over * (1 - self._accuracy.unpredicted_factor)
        return factors


def chance_of_any_use(next_chance: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Return the discounted chance that an expert is used when its layer runs next or, if not, later.

    Without the later part, a frequently used expert would be evicted whenever one draft does not predict it.
    """
    # both: [layers, experts]
    chance: np.ndarray = next_chance + (1 - next_chance) * later
    return chance


def chance_of_later_use(frequency: np.ndarray, discount: float) -> np.ndarray:
    """Return the discounted chance of use in the steps after the next, if each step uses an expert this frequently."""
    chance: np.ndarray = discount * frequency / (1 - (1 - frequency) * discount)
    return chance
