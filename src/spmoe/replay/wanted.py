"""What is wished for and not yet on its way, by layer: those of the layer that runs next first, the surest first."""

from __future__ import annotations

Rank = tuple[int, float, int]  # (layer, -score, expert number)


class Wanted:
    """Prefetch requests by layer, in order of rank; where several came together they are put in order when one is asked for."""

    def __init__(self, layers: int) -> None:
        self.none = self.first = layers  # the first layer that something is wished for; `none` when nothing is
        self._by_layer: list[list[Rank]] = [[] for _ in range(layers + 1)]
        self._mixed: set[int] = set()  # layers whose list is in no order, and may name an expert twice

    def add(self, layer: int, ranks: list[Rank]) -> None:
        """Prefetch request for these of a layer, which are in order; of two prefetch requests for one expert the surer counts."""
        there = self._by_layer[layer]
        if there:
            there += ranks
            self._mixed.add(layer)
        else:
            self._by_layer[layer] = ranks
            if layer < self.first:
                self.first = layer

    def head(self) -> Rank:
        """The one whose turn it is; there must be one."""
        if self.first in self._mixed:
            self._sort(self.first)
        return self._by_layer[self.first][0]

    def take(self) -> None:
        """It is wished for no longer: what `head` gave."""
        there = self._by_layer[self.first]
        del there[0]
        if not there:
            self._find_first()

    def drop_passed(self, layer: int) -> int:
        """Forget all up to this layer; returns how many experts that were."""
        dropped = 0
        for passed in range(self.first, layer + 1):
            if self._by_layer[passed]:
                dropped += self._count(passed)
                self._by_layer[passed] = []
        self._mixed -= set(range(self.first, layer + 1))
        self._find_first()
        return dropped

    def drop_all(self) -> int:
        """Forget everything; returns how many experts that were."""
        return self.drop_passed(self.none - 1) if self.first < self.none else 0

    def _count(self, layer: int) -> int:
        there = self._by_layer[layer]
        return len({rank[2] for rank in there}) if layer in self._mixed else len(there)

    def _sort(self, layer: int) -> None:
        best: dict[int, Rank] = {}
        for rank in sorted(self._by_layer[layer]):
            best.setdefault(rank[2], rank)
        self._by_layer[layer] = list(best.values())
        self._mixed.discard(layer)

    def _find_first(self) -> None:
        first, by_layer = self.first, self._by_layer
        while first < self.none and not by_layer[first]:
            first += 1
        self.first = first
