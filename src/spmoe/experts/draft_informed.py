"""Draft-informed eviction: how likely is each resident expert's use at its layer's next turn, and how far off is that.

Layers run in a fixed cycle, so when one step's experts outnumber the slots, least-recently-used throws out exactly
what the next layers need. Here habit, and what the draft foretells, say what will be needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.scored import ScoredEviction
from spmoe.types import PrefetchRequests


class Reliability:
    """How often the draft's word came true lately, by how often and how strongly it was given; learnt as steps end."""

    _SCORES = np.array([0.25, 0.5, 0.75])  # bounds between weak and strong words
    _MEMORY = 0.95  # of a step, one step later
    _DOUBT = 8.0  # predictions that what is assumed at first counts for

    def __init__(self) -> None:
        strength = np.linspace(0.7, 0.95, len(self._SCORES) + 1)
        self._given = np.full((2, len(strength)), self._DOUBT)  # [named once or more often, strength]
        self._true = self._given * np.stack((strength, np.sqrt(strength)))
        self._habit = self._DOUBT  # uses expected, by habit, of experts that were not named
        self._surprise = self._DOUBT * 0.6  # and those that there were
        # the share of words that came true: by how often an expert was named, none counting as once, and strength
        self._chances = np.empty((3, len(strength)))
        self._renew_chances()

    @property
    def silence(self) -> float:
        """What remains of a habit where the draft has not named the expert."""
        return min(1.0, self._surprise / self._habit)

    def of(self, named: np.ndarray, score: np.ndarray) -> np.ndarray:
        """The chance that an expert is needed, from how often it was named and the best score it got."""
        chance: np.ndarray = self._chances[np.minimum(named, 2), self._SCORES.searchsorted(score)]
        return chance

    def learn(self, named: np.ndarray, score: np.ndarray, used: np.ndarray, habit: np.ndarray) -> None:
        """What a step has shown, in layers that were spoken of."""  # all: [layers, experts]
        said = named > 0
        places = (named[said] > 1) * self._given.shape[1] + self._SCORES.searchsorted(score[said])
        for table, weights in ((self._given, None), (self._true, used[said])):
            table *= self._MEMORY
            table += np.bincount(places, weights, table.size).reshape(table.shape)
        self._renew_chances()
        self._habit = self._MEMORY * self._habit + habit[~said].sum()
        self._surprise = self._MEMORY * self._surprise + used[~said].sum()

    def _renew_chances(self) -> None:
        np.divide(self._true, self._given, out=self._chances[1:])
        self._chances[0] = self._chances[1]


_STEP_ROWS = 4  # rows of a step that choose for themselves: it has a few more, which tend to agree
_PROMPT_WEIGHT = 0.7  # of what a prompt says of its request, against the habits of those before


class DraftInformed(ScoredEviction):
    """Expected use at the next turn and, if not then, at later ones, discounted by the distance to them.

    The expectation of the next turn starts from habit, the decayed frequency of use, which a prompt sets by how many of
    its rows chose each expert. For a layer that this step has still to run and the draft has spoken of, its word counts
    instead, as much as its words have lately turned out to be true: what it names is needed that often, and what it
    does not name that much less than usual, the more so the more of its passes are over. `reluctance` is what a prefetch request
    must overcome: a swap among two equally likely experts only costs bytes.
    """

    def __init__(
        self, experts: Sequence[int], decay: float = 0.9, discount: float = 0.8, swap_margin: float = 0.8
    ) -> None:
        super().__init__(experts)
        self._decay = decay
        self._discount = discount
        self._swap_margin = swap_margin
        self._frequency = np.zeros(self.shape)  # decayed share of steps in which the expert was used
        self._marks = bytearray(self._recency.size)
        self._used = np.frombuffer(self._marks, dtype=bool).reshape(self.shape)  # in this step; the same memory
        self._shares = np.zeros(self.shape)  # of rows that chose the expert, summed over the parts of a prompt
        self._parts = np.zeros(self.shape[0], dtype=int)  # that were read in this step
        self._named = np.zeros(self.shape, dtype=int)  # how often in this step
        self._score = np.zeros(self.shape)  # the best it was named with
        self._word = np.zeros(self.shape)  # the chance that it is needed, by what was said of it
        self._passes = np.zeros(self.shape[0], dtype=int)  # of the draft, in this step, that have spoken of the layer
        self._usual_passes = 1
        self._reliability = Reliability()
        self._kept = self._kept_by_passes()  # of a habit, by the passes that have spoken of the layer
        self._later = np.zeros(self.shape)  # what turns after the next are worth, seen from it
        self._habitual = np.zeros(self.shape)  # what all turns are, seen from the next, by habit
        self._turns = np.zeros(self.shape)  # and by what the draft has said
        self._stale = slice(0, 0)  # layers for which that is to be worked out anew
        layer, count = np.arange(len(experts))[:, None], len(experts)
        near = [discount ** ((layer - at - 1) % count / count) for at in range(-1, count)]
        # the discount until the next turn, by position: each [layers, experts], faster to multiply than [layers, 1]
        self._near = [np.repeat(to_turn, self.shape[1], axis=1) for to_turn in near]

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        ages, marks, start = self._ages, self._marks, layer * self.shape[1]
        for tick, expert in enumerate(experts, start=self._ticks + 1):
            ages[start + expert] = tick
            marks[start + expert] = True
        self._ticks += len(experts)

    def on_prompt(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        self._shares[layer, experts] += shares
        self._parts[layer] += 1

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        if not len(prefetches):
            return
        places = prefetches.numbers(self.shape[1])
        named, score = self._named.ravel()[places] + 1, np.maximum(self._score.ravel()[places], prefetches.scores)
        self._named.ravel()[places] = named
        self._score.ravel()[places] = score
        self._word.ravel()[places] = self._reliability.of(named, score)
        self._passes[prefetches.layers] += 1  # once, however many of its experts are named
        first, last = prefetches.span()
        self._renew(first, last + 1)

    def on_layer(self, layer: int) -> None:
        before = self._position
        super().on_layer(layer)
        if layer > before:  # what was foretold of layers that have had their turn counts no more
            self._turns[before + 1 : layer + 1] = self._habitual[before + 1 : layer + 1]
        else:  # another pass over the layers, in the same step
            self._renew(layer + 1, self.shape[0])

    def begin_step(self, sequence_id: int = 0) -> None:
        if len(spoken := np.flatnonzero(self._passes)):
            seen = (self._named, self._score, self._used, self._frequency)
            self._reliability.learn(*(figure[spoken] for figure in seen))
            self._usual_passes = int(self._passes.max())
            self._kept = self._kept_by_passes()
        self._form_habits()
        self._later = later_use(self._frequency, self._discount)
        self._habitual = any_use(self._frequency, self._later)
        self._turns[:] = self._habitual
        self._used[:] = False
        self._named[:] = 0
        self._score[:] = 0.0
        self._word[:] = 0.0
        self._passes[:] = 0
        self._position, self._stale, self._worths = -1, slice(0, 0), None

    def _form_habits(self) -> None:
        kept, seen = np.full((self.shape[0], 1), self._decay), self._used.astype(float)
        if len(read := np.flatnonzero(self._parts)):
            share = np.minimum(1.0, self._shares[read] / self._parts[read, None])
            kept[read], seen[read] = 1 - _PROMPT_WEIGHT, 1 - (1 - share) ** _STEP_ROWS
            self._shares[:], self._parts[:] = 0.0, 0
        self._frequency = kept * self._frequency + (1 - kept) * seen

    def _renew(self, low: int, high: int) -> None:
        stale = self._stale
        if stale.start < stale.stop:
            low, high = min(low, stale.start), max(high, stale.stop)
        self._stale, self._worths = slice(low, high), None

    def _kept_by_passes(self) -> np.ndarray:
        """What remains of a habit that was not named, after no pass, one, and so on up to as many as usual."""
        spoken = np.arange(self._usual_passes + 1) / self._usual_passes
        kept: np.ndarray = 1 - spoken * (1 - self._reliability.silence)
        return kept

    def _value(self) -> np.ndarray:
        told = slice(max(self._stale.start, self._position + 1), self._stale.stop)
        self._stale = slice(0, 0)
        if told.start < told.stop:
            kept = self._kept[np.minimum(self._passes[told], self._usual_passes)]
            habit = self._frequency[told] * kept[:, None]
            self._turns[told] = any_use(np.maximum(self._word[told], habit), self._later[told])
        worths: np.ndarray = self._turns * self._near[self._position + 1]
        return worths


def any_use(expected: np.ndarray, later: np.ndarray) -> np.ndarray:
    """The discounted chance of being used first at the next turn, at the one after it, and so on, seen from the next.

    What is not needed in its layer's next turn is not worthless: by habit it is needed in a later one. Else an expert
    of daily use would leave for good whenever one draft does not name it.
    """
    # expected, later: [layers, experts]
    worths: np.ndarray = expected + (1 - expected) * later
    return worths


def later_use(habit: np.ndarray, discount: float) -> np.ndarray:
    """The same of the turns after the next, seen from the next, in each of which habit is the chance."""
    worths: np.ndarray = discount * habit / (1 - (1 - habit) * discount)
    return worths
