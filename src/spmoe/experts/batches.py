"""What a source hands out: experts of a layer that are ready together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Experts of one layer that are ready together; their slots stay theirs until the next batch is asked for."""

    layer: int
    experts: tuple[int, ...]
    slots: tuple[int, ...]
    weights: tuple[Mapping[str, Tensor], ...]


@dataclass(slots=True)
class PinnedLayer:
    """Experts of a layer that are READY, kept for compute that starts before it is known which of them it needs."""

    layer: int
    slots: np.ndarray  # int32 [experts], -1 of those that are not
    since: int = 0  # the transfer's mark: compute that was given before it is over when these are used or booked
    is_open: bool = True
