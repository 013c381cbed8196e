"""Prediction from past requests: the experts that similar requests went on to use.

It reads no hidden states. The routed experts of each layer, as the target runs, are compared with those of past
requests. It needs neither a draft nor callable gates, and predicts nothing before the first request has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from spmoe.observe.activations import Activations
from spmoe.predict.policies.base import Need, PolicyContext, PrefetchPolicy
from spmoe.registry import PREFETCH_POLICIES
from spmoe.types import PrefetchRequests


@PREFETCH_POLICIES.register("activation")
class Activation(PrefetchPolicy):
    """Requests, for each layer to come, as many of its likeliest experts as a step uses; each once per step.

    An expert's score is the share of steps expected to use it, discounted by the number of layers before it.
    """

    summary = "past requests predict the experts of similar ones"
    needs = frozenset({Need.ROUTING})
    learns = True
    eviction = "activation"

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        self._activations = Activations(experts_per_layer)
        self._requested = np.zeros((len(experts_per_layer), max(experts_per_layer)), dtype=bool)  # in this step

    @classmethod
    def build(cls, context: PolicyContext) -> Self:
        return cls(context.experts_per_layer)

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._activations.begin_step(sequence_id)
        self._requested[:] = False
        return self._requests_from(0)

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self._activations.add([layer] * len(experts), experts)
        return self._requests_from(layer + 1)

    def _requests_from(self, start: int) -> PrefetchRequests:
        """Request experts of the layers from `start`, the next to run, to the last."""
        expected = self._activations.expected(start)  # [layers to come, experts]
        likely, rows = np.zeros(expected.shape, dtype=bool), np.arange(len(expected))[:, None]
        within_usual_count = np.arange(expected.shape[1]) < np.ceil(expected.sum(axis=1))[:, None]
        likely[rows, np.argsort(-expected, axis=1, kind="stable")] = within_usual_count
        new = likely & (expected > 0) & ~self._requested[start:]
        self._requested[start:] |= new
        count = len(self._requested)
        distance, experts = np.nonzero(new)
        layers, scores = start + distance, expected[distance, experts] * (1 - distance / count)
        return PrefetchRequests(layers, experts, scores, layers, np.ones(len(layers), dtype=bool))
