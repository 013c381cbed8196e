"""Least recently used: the classic, blind to what layers come next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from spmoe.types import ExpertKey, Wish


class LeastRecentlyUsed:
    """The classic. A wish never pushes out what was wished for in the same step and has not had its turn."""

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()
        self._promised: set[ExpertKey] = set()

    def inserted(self, key: ExpertKey) -> None:
        self._order[key] = None

    def removed(self, key: ExpertKey) -> None:
        del self._order[key]

    def used(self, key: ExpertKey) -> None:
        self._order.move_to_end(key)
        self._promised.discard(key)

    def wished(self, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            self._promised.add(wish.key)
            if wish.key in self._order:
                self._order.move_to_end(wish.key)

    def reached(self, layer: int) -> None:
        self._promised = {key for key in self._promised if key.layer >= layer}

    def foresee(self, layer: int) -> None:
        """It keeps its order as it goes."""

    def begin_step(self, request: int = 0) -> None:
        self._promised.clear()

    def worth(self, key: ExpertKey) -> float:
        return 0.0

    def victims(
        self, n: int, pinned: Collection[ExpertKey], below: float, layer: int | None = None
    ) -> list[ExpertKey] | None:
        spared = self._promised if below < float("inf") else ()
        chosen: list[ExpertKey] = []
        for key in self._order:
            if len(chosen) == n:
                break
            if key not in pinned and key not in spared:
                chosen.append(key)
        return chosen if len(chosen) == n else None
