"""Counts of the experts that layers were routed to, for the dashboard."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import numpy as np

_MAX_PENDING = 2048  # forwards of a layer


class UseCounts(NamedTuple):
    """Counts since the engine was built. Subtract two snapshots to get the counts between them."""

    forwards: np.ndarray  # int64 [layers]: times that the layer ran
    uses: np.ndarray  # int64 [layers, experts]: times that it was routed to the expert


class ExpertUses:
    """Counts the uses of every expert. Thread-safe.

    The thread that decodes only appends to a queue; `snapshot` counts. Of more forwards than the queue holds, between
    two snapshots, the newest ones count: shares of forwards are right nonetheless.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._counts = UseCounts(np.zeros(layers, dtype=np.int64), np.zeros((layers, experts), dtype=np.int64))
        self._pending: deque[tuple[int, Sequence[int]]] = deque(maxlen=_MAX_PENDING)
        self._lock = threading.Lock()  # of the counts; the queue needs none

    def add(self, layer: int, experts: Sequence[int]) -> None:
        """Count one forward of a layer that is routed to these experts, each named once. Keeps the sequence."""
        self._pending.append((layer, experts))

    def snapshot(self) -> UseCounts:
        """Return a copy of the counts."""
        with self._lock:
            self._count_pending()
            return UseCounts(self._counts.forwards.copy(), self._counts.uses.copy())

    def _count_pending(self) -> None:
        taken: list[tuple[int, Sequence[int]]] = []
        with suppress(IndexError):  # the queue is empty
            while len(taken) < _MAX_PENDING:
                taken.append(self._pending.popleft())
        forwards, uses = self._counts
        layers = np.array([layer for layer, _ in taken], dtype=np.int64)
        experts = np.fromiter(chain.from_iterable(experts for _, experts in taken), dtype=np.int64)
        numbers = layers.repeat([len(experts) for _, experts in taken]) * uses.shape[1] + experts
        forwards += np.bincount(layers, minlength=forwards.size)
        uses += np.bincount(numbers, minlength=uses.size).reshape(uses.shape)
