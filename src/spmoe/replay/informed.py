"""Draft-informed eviction, as the live rule does it, with expectations renewed only where something was said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts import draft_informed
from spmoe.experts.draft_informed import Reliability
from spmoe.replay.rule import Valued, live_default
from spmoe.replay.steps import Foretold, StepPlan


class Habit(Valued):
    """Decayed frequency of use, by step."""

    decay = live_default(draft_informed.DraftInformed, "decay")

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self.frequency = np.zeros(layers * width)
        self.seen = np.zeros(layers * width, dtype=bool)  # in this step

    def used(self, keys: list[int]) -> None:
        super().used(keys)
        self.seen[keys] = True

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.frequency = self.decay * self.frequency + (1 - self.decay) * self.seen
        self.seen[:] = False


class DraftInformed(Habit):
    """The live rule: the discounted chance of use, at the layer's next turn or a later one."""

    discount = live_default(draft_informed.DraftInformed, "discount")
    reluctance = live_default(draft_informed.DraftInformed, "reluctance")

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self.named = np.zeros((layers, width), dtype=int)
        self.score = np.zeros((layers, width))
        self.passes = np.zeros(layers, dtype=int)
        self.usual_passes = 1
        self.reliability = Reliability()
        self._expected = np.zeros((layers, width))
        self._low, self._high = layers, 0  # layers whose expectation is to be worked out anew
        self._worths: np.ndarray | None = None
        count = np.arange(layers)
        self._nearness = [self.discount ** ((count - at - 1) % layers / layers) for at in range(-1, layers)]
        self._later = np.zeros((layers, width))

    def wished(self, wishes: Foretold, keys: np.ndarray, scores: np.ndarray, layers: np.ndarray) -> None:
        if not len(keys):
            return
        self.named.ravel()[keys] += 1
        flat = self.score.ravel()
        flat[keys] = np.maximum(flat[keys], scores)
        self.passes[layers] += 1
        self._low, self._high = min(self._low, int(layers[0])), max(self._high, int(layers[-1]) + 1)
        self._worths = None

    def reached(self, layer: int) -> None:
        before, self.position = self.position, layer
        self._worths = None
        if layer > before:  # what was foretold of layers that have had their turn counts no more
            told = slice(before + 1, layer + 1)
            self._expected[told] = self.frequency.reshape(self.layers, self.width)[told]
        else:  # another pass over the layers, in the same step
            self._low, self._high = layer + 1, self.layers

    def begin_step(self, step: int) -> None:
        spoken = np.flatnonzero(self.passes)
        if len(spoken):
            shape = (self.layers, self.width)
            used, habit = self.seen.reshape(shape), self.frequency.reshape(shape)
            self.reliability.learn(self.named[spoken], self.score[spoken], used[spoken], habit[spoken])
            self.usual_passes = int(self.passes.max())
        super().begin_step(step)
        self.named[:] = 0
        self.score[:] = 0.0
        self.passes[:] = 0
        habit = self.frequency.reshape(self.layers, self.width)
        self._expected[:] = habit
        self._later = draft_informed.later_use(habit, self.discount)
        self._low, self._high = self.layers, 0
        self._worths = None

    def worths(self) -> np.ndarray:
        if self._worths is None:
            if self._low < self._high:
                self._renew()
            near = self._nearness[self.position + 1]
            self._worths = draft_informed.first_use(self._expected, self._later, near).ravel()
        return self._worths

    def _renew(self) -> None:
        told = slice(max(self._low, self.position + 1), self._high)
        self._low, self._high = self.layers, 0
        if told.start < told.stop:
            named = self.named[told]
            spoken = np.minimum(1.0, self.passes[told] / self.usual_passes)
            expected = self.frequency.reshape(self.layers, self.width)[told]
            expected = expected * (1 - spoken * (1 - self.reliability.silence))[:, None]
            word = self.reliability.of(named, self.score[told])
            self._expected[told] = np.where(named > 0, np.maximum(word, expected), expected)
