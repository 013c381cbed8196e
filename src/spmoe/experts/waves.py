"""What a source hands out: experts of a layer that are ready together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from spmoe.experts.cache import Entry


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts of one layer that are ready together; their slots stay theirs until the next wave is asked for."""

    layer: int
    experts: tuple[int, ...]
    slots: tuple[int, ...]
    weights: tuple[Mapping[str, Tensor], ...]


@dataclass(slots=True)
class Opened:
    """Experts of a layer that are READY, pinned for compute that starts before it is known which of them it needs."""

    layer: int
    entries: list[Entry]

    @property
    def experts(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(entry.key.expert for entry in self.entries)

    @property
    def slots(self) -> tuple[int, ...]:
        """Where they are."""
        return tuple(entry.slot for entry in self.entries)
