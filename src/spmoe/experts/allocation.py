"""Allocation: how many slots each layer is best given, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def equal_quotas(experts: Sequence[int], slots: int) -> list[int]:
    """The same number for every layer, as far as layers have experts; what is left over goes to the first layers."""
    quotas = [0] * len(experts)
    left = min(slots, sum(experts))
    while left:
        open_layers = [layer for layer, count in enumerate(experts) if quotas[layer] < count]
        share = max(1, min(left // len(open_layers), *(experts[layer] - quotas[layer] for layer in open_layers)))
        for layer in open_layers[:left]:
            quotas[layer] += share
            left -= share
    return quotas


def best_quotas(gains: Sequence[np.ndarray], slots: int) -> list[int]:
    """Slots per layer, so that the sum of `gains[layer][slots of the layer]` is the largest there is.

    All slots are given out, as far as layers can take them.
    """
    # best[s]: the most that the layers so far gain with s slots between them, s up to all
    total = min(slots, sum(len(gain) - 1 for gain in gains))
    best = np.concatenate(([0.0], np.full(total, -np.inf)))
    taken: list[np.ndarray] = []
    for gain in gains:
        most = min(len(gain) - 1, total)
        before = sliding_window_view(np.concatenate((np.full(most, -np.inf), best)), most + 1)[:, ::-1]
        options = before + gain[: most + 1]  # [s, slots of this layer]
        taken.append(options.argmax(axis=1))
        best = options[np.arange(total + 1), taken[-1]]
    quotas: list[int] = []
    for choice in reversed(taken):
        quotas.append(int(choice[total]))
        total -= quotas[-1]
    return quotas[::-1]
