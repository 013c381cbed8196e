"""Draft-informed eviction: how likely is each resident expert's use at its layer's next turn, and how far off is that.

Layers run in a fixed cycle, so when one step's experts outnumber the slots, least-recently-used throws out exactly
what the next layers need. Here habit, and what the draft foretells, say what will be needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.valued import Valued
from spmoe.types import ExpertKey, Wish


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

    @property
    def silence(self) -> float:
        """What remains of a habit where the draft has not named the expert."""
        return min(1.0, self._surprise / self._habit)

    def of(self, named: np.ndarray, score: np.ndarray) -> np.ndarray:
        """The chance that an expert is needed, from how often it was named and the best score it got."""
        chance: np.ndarray = (self._true / self._given)[self._place(named, score)]
        return chance

    def learn(self, named: np.ndarray, score: np.ndarray, used: np.ndarray, habit: np.ndarray) -> None:
        """What a step has shown, in layers that were spoken of."""  # all: [layers, experts]
        said = named > 0
        for table, came in ((self._given, np.ones(said.sum())), (self._true, used[said].astype(float))):
            table *= self._MEMORY
            np.add.at(table, self._place(named[said], score[said]), came)
        self._habit = self._MEMORY * self._habit + habit[~said].sum()
        self._surprise = self._MEMORY * self._surprise + used[~said].sum()

    def _place(self, named: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.clip(named, 1, 2) - 1, np.searchsorted(self._SCORES, score)


class DraftInformed(Valued):
    """Expected use at the next turn and, if not then, at later ones, discounted by the distance to them.

    The expectation of the next turn starts from habit, the decayed frequency of use. For a layer that this step has
    still to run and the draft has spoken of, its word counts instead, as much as its words have lately turned out to be
    true: what it names is needed that often, and what it does not name that much less than usual, the more so the more
    of its passes are over. `reluctance` is what a wish must overcome: a swap among two equally likely experts only
    costs bytes.
    """

    def __init__(
        self, experts: Sequence[int], decay: float = 0.9, discount: float = 0.8, reluctance: float = 0.8
    ) -> None:
        super().__init__(experts)
        self._decay = decay
        self._discount = discount
        self._reluctance = reluctance
        self._frequency = np.zeros(self._shape)  # decayed share of steps in which the expert was used
        self._used = np.zeros(self._shape, dtype=bool)  # in this step
        self._named = np.zeros(self._shape, dtype=int)  # how often in this step
        self._score = np.zeros(self._shape)  # the best it was named with
        self._passes = np.zeros(self._shape[0], dtype=int)  # of the draft, in this step, that have spoken of the layer
        self._usual_passes = 1
        self._reliability = Reliability()
        self._foreseen: tuple[int, np.ndarray] | None = None  # a layer, and what worths will be once it is reached

    def used(self, key: ExpertKey) -> None:
        self._used[key] = True
        self._touch(key)

    def wished(self, wishes: Sequence[Wish]) -> None:
        if not wishes:
            return
        width, best = self._shape[1], dict[int, float]()  # of each expert, by its place in the tables
        for (layer, expert), score, *_ in wishes:
            place = layer * width + expert
            best[place] = max(score, best.get(place, 0.0))
        places, scores = np.array(list(best)), np.array(list(best.values()))
        self._named.ravel()[places] += 1
        self._score.ravel()[places] = np.maximum(self._score.ravel()[places], scores)
        self._passes[list({wish.key.layer for wish in wishes})] += 1
        self._worths = self._foreseen = None

    def reached(self, layer: int) -> None:
        foreseen, self._foreseen = self._foreseen, None
        super().reached(layer)
        if foreseen is not None and foreseen[0] == layer:
            self._worths = foreseen[1]

    def foresee(self, layer: int) -> None:
        now, self._position = self._position, layer
        self._foreseen = (layer, self._value())
        self._position = now

    def begin_step(self, request: int = 0) -> None:
        self._foreseen = None
        if len(spoken := np.flatnonzero(self._passes)):
            seen = (self._named, self._score, self._used, self._frequency)
            self._reliability.learn(*(figure[spoken] for figure in seen))
            self._usual_passes = int(self._passes.max())
        self._frequency = self._decay * self._frequency + (1 - self._decay) * self._used
        self._used[:] = False
        self._named[:] = 0
        self._score[:] = 0.0
        self._passes[:] = 0
        super().begin_step(request)

    def worth(self, key: ExpertKey) -> float:
        return self._reluctance * super().worth(key)

    def _value(self) -> np.ndarray:
        count = self._shape[0]
        expected = self._frequency.copy()
        told = np.flatnonzero((self._passes > 0) & (np.arange(count) > self._position))
        if len(told):
            spoken = np.minimum(1.0, self._passes[told] / self._usual_passes)
            expected[told] *= (1 - spoken * (1 - self._reliability.silence))[:, None]
            word = self._reliability.of(self._named[told], self._score[told])
            expected[told] = np.where(self._named[told] > 0, np.maximum(word, expected[told]), expected[told])
        near = self._discount ** (self._distance() / count)
        return first_use(expected, later_use(self._frequency, self._discount), near)


def first_use(expected: np.ndarray, later: np.ndarray, near: np.ndarray) -> np.ndarray:
    """The discounted chance of being used first at the next turn, at the one after it, and so on.

    What is not needed in its layer's next turn is not worthless: by habit it is needed in a later one. Else an expert
    of daily use would leave for good whenever one draft does not name it.
    """
    # expected, later: [layers, experts]; near, the discount until the next turn: [layers]
    worths: np.ndarray = (expected + (1 - expected) * later) * near[:, None]
    return worths


def later_use(habit: np.ndarray, discount: float) -> np.ndarray:
    """The same of the turns after the next, seen from the next, in each of which habit is the chance."""
    worths: np.ndarray = discount * habit / (1 - (1 - habit) * discount)
    return worths
