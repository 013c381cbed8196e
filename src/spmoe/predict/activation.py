"""Request-level prediction: what requests like this one went on to use, by the experts that it has used so far.

It looks at no hidden state: the routers' choices, layer by layer as the target runs, are matched with those of past
requests. It needs neither a draft nor gates that can be asked, and knows nothing before requests have shown it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.observe.activations import Activations
from spmoe.predict.base import PrefetchPolicy
from spmoe.types import PrefetchRequests


class Activation(PrefetchPolicy):
    """Prefetch requests, for each layer to come, for as many of its likeliest experts as a step uses of it, each once a step.

    An expert's score is the share of steps that are expected to use it, the less the more layers come before.
    """

    name = "activation"

    def __init__(self, experts: Sequence[int]) -> None:
        self._activations = Activations(experts)
        self._wished = np.zeros((len(experts), max(experts)), dtype=bool)  # in this step

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._activations.begin_step(sequence_id)
        self._wished[:] = False
        return self._wishes(0)

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self._activations.note([layer] * len(experts), experts)
        return self._wishes(layer + 1)

    def _wishes(self, start: int) -> PrefetchRequests:
        """For the layers from this one on, which is the next to run."""
        expected = self._activations.expected(start)  # [layers to come, experts]
        likely, rows = np.zeros(expected.shape, dtype=bool), np.arange(len(expected))[:, None]
        usual = np.arange(expected.shape[1]) < np.ceil(expected.sum(axis=1))[:, None]
        likely[rows, np.argsort(-expected, axis=1, kind="stable")] = usual
        new = likely & (expected > 0) & ~self._wished[start:]
        self._wished[start:] |= new
        count = len(self._wished)
        ahead, experts = np.nonzero(new)
        layers, scores = start + ahead, expected[ahead, experts] * (1 - ahead / count)
        return PrefetchRequests(layers, experts, scores, layers, np.ones(len(layers), dtype=bool))
