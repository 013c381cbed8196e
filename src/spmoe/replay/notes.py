"""Records of a generation as they come, to become a trace's arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmoe.replay.trace import Shape, Trace


@dataclass
class Notes:
    """Records as they come, to become a trace's arrays."""

    request: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    slab_pass: list[int] = field(default_factory=list)
    slab_layers: list[tuple[int, int]] = field(default_factory=list)
    slab_seconds: list[float] = field(default_factory=list)
    slab_rows: list[int] = field(default_factory=list)
    foretold: list[np.ndarray] = field(default_factory=list)
    foretold_score: list[np.ndarray] = field(default_factory=list)
    forward_rows: list[int] = field(default_factory=list)
    front: list[np.ndarray] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)
    weight: list[np.ndarray] = field(default_factory=list)
    ahead: list[np.ndarray] = field(default_factory=list)
    ahead_score: list[np.ndarray] = field(default_factory=list)

    def trace(self, shape: Shape, about: dict[str, Any]) -> Trace:
        """All of them, as a trace."""
        layers, top_k, rows = shape.layers, shape.top_k, sum(self.forward_rows)

        def join(parts: list[np.ndarray], empty: tuple[int, ...], dtype: Any, axis: int = 0) -> np.ndarray:
            return np.concatenate(parts, axis=axis).astype(dtype) if parts else np.zeros(empty, dtype=dtype)

        return Trace(
            shape,
            about,
            np.unique(self.request, return_inverse=True)[1].astype(np.int32),
            np.array(self.drafted, dtype=np.int16),
            np.array(self.accepted, dtype=np.int16),
            np.array(self.chunks, dtype=np.int16),
            np.array(self.forwards, dtype=np.int16),
            np.array(self.rest, dtype=np.float32),
            np.array(self.slab_pass, dtype=np.int16),
            np.array(self.slab_layers, dtype=np.int16).reshape(-1, 2),
            np.array(self.slab_seconds, dtype=np.float32),
            np.array(self.slab_rows, dtype=np.int32),
            join(self.foretold, (0, top_k), np.int16),
            join(self.foretold_score, (0, top_k), np.float16),
            np.array(self.forward_rows, dtype=np.int32),
            np.stack(self.front),
            np.stack(self.experts),
            join(self.chosen, (0, layers, top_k), np.int16),
            join(self.weight, (0, layers, top_k), np.float16),
            join(self.ahead, (0, rows, layers, top_k), np.int16, axis=1),
            join(self.ahead_score, (0, rows, layers, top_k), np.float16, axis=1),
        )
