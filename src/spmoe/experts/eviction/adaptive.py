"""Per-layer quotas of slots that follow the measured gain of each layer from further slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from spmoe.experts.eviction.lru_per_layer import EqualQuotas
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import PrefetchRequests


@EVICTION_POLICIES.register("adaptive")
class AdaptiveQuotas(EqualQuotas):
    """Gives more slots to layers that gain more from them, by dynamic programming over measured gains.

    With c slots a layer hits its c most recently used experts, so the reuse distances of its uses say what each further
    slot saves. A predicted load is partly hidden, though it still occupies the link: a layer's gain is discounted by
    the share of its uses that were predicted. Quotas are equal until enough steps were observed, and are updated from
    time to time.
    """

    _FIRST_UPDATE, _MAX_INTERVAL = 16, 256  # steps; the interval between updates doubles up to the maximum
    _STEP_DECAY = 0.99  # weight of a step's measurements, one step later
    _HIDDEN_SHARE = 0.5  # of a load that was predicted
    _PRIOR = 0.01  # uses at distance 0; 1/2 of it at distance 1, 1/3 at 2: a prior for distances not observed

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        super().__init__(experts_per_layer)
        # each layer's experts, the last used first; a bytearray is searched faster than a list
        self._stacks = [list(range(count)) if count > 256 else bytearray(range(count)) for count in experts_per_layer]
        self._distances = np.zeros(self.shape)  # uses by reuse distance: the position in the stack
        self._distances_view = self._distances.reshape(-1).data  # shares memory
        self._uses = np.zeros(len(experts_per_layer))
        self._predicted_uses = np.zeros(len(experts_per_layer))  # uses that were predicted in the same step
        self._predicted_bytes = bytearray(self._distances.size)
        self._predicted = np.frombuffer(self._predicted_bytes, dtype=bool).reshape(self.shape)  # in this step
        self._steps = 0
        self._next_update = self._FIRST_UPDATE

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        stack, start = self._stacks[layer], layer * self.shape[1]
        distances, predicted, uses = self._distances_view, self._predicted_bytes, self._predicted_uses.item(layer)
        for expert in experts:
            distance = stack.index(expert)
            del stack[distance]
            stack.insert(0, expert)
            distances[start + distance] += 1
            if predicted[start + expert]:
                uses += 1
        self._predicted_uses[layer] = uses
        self._uses[layer] += len(experts)

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        super().on_prefetches(prefetches)
        self._predicted.ravel()[prefetches.numbers(self.shape[1])] = True

    def begin_step(self, sequence_id: int = 0) -> None:
        super().begin_step(sequence_id)
        self._predicted[:] = False
        self._steps += 1
        if self._steps >= self._next_update:
            self._next_update += min(self._steps, self._MAX_INTERVAL)
            self._update_quotas()
        self._uses *= self._STEP_DECAY
        self._predicted_uses *= self._STEP_DECAY
        self._distances *= self._STEP_DECAY

    def gains(self) -> list[np.ndarray]:
        """Return, for each layer, the recent loads that 0, 1, 2, ... slots would have saved."""  # [experts + 1] each
        visible = 1 - self._HIDDEN_SHARE * self._predicted_uses / np.maximum(self._uses, 1)
        found = []
        for share, all_uses, count in zip(visible, self._distances, self._experts_per_layer, strict=True):
            uses = all_uses[:count]
            prior = self._PRIOR / np.arange(1, len(uses) + 1)
            found.append(np.concatenate(([0.0], (share * uses + prior).cumsum())))
        return found

    def _compute_quotas(self) -> list[int]:
        enough = self._steps >= self._FIRST_UPDATE
        return best_quotas(self.gains(), self._slots) if enough else super()._compute_quotas()


def best_quotas(gains: Sequence[np.ndarray], slots: int) -> list[int]:
    """Share out slots so that the sum of `gains[layer][slots of the layer]` is maximal.

    All slots are shared out, as far as layers have experts.
    """
    # best[s]: the largest gain of the layers so far with s slots between them
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
    for layer_slots in reversed(taken):
        quotas.append(int(layer_slots[total]))
        total -= quotas[-1]
    return quotas[::-1]
