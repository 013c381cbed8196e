"""Maps from the draft's hidden states to the target's, one affine map per MoE layer, fitted by ridge regression.

The target's gates do not accept hidden states of another width, and those of the same width may mean something else.
A map from the draft's residual stream to the target's, as it is before that layer's gate, solves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # tried on held-out text; in units of a feature's mean square


class HiddenStateProjection:
    """Maps a chunk of the draft's states to the target's, in one batched product."""

    def __init__(self, weights: Tensor, biases: Tensor) -> None:
        self.weights = weights  # [layers, draft hidden, hidden]
        self.biases = biases  # [layers, 1, hidden]

    @property
    def nbytes(self) -> int:
        """Size of the maps in bytes."""
        return self.weights.nbytes + self.biases.nbytes

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return a copy on this device, in this dtype."""
        return type(self)(self.weights.to(device, dtype), self.biases.to(device, dtype))

    def __call__(self, layers: Sequence[int], residual: Tensor) -> Tensor:
        """Return the target's states at these consecutive layers."""
        # residual: [layers, rows, draft hidden] -> [layers, rows, hidden]
        some = slice(layers[0], layers[-1] + 1)
        return torch.baddbmm(self.biases[some], residual, self.weights[some])


class LayerFit:
    """The normal equations of one layer, accumulated in float64, and their solution for any ridge.

    Every token weighs the same: rows are divided by the size of the target's state, because the gate's norm removes it.
    At equal widths the map is fitted as a correction to the identity, so a large ridge leaves the states as they are.
    """

    def __init__(self, draft_hidden: int, hidden: int, device: torch.device) -> None:
        self._same_width = draft_hidden == hidden
        self._gram = torch.zeros(draft_hidden + 1, draft_hidden + 1, dtype=torch.float64, device=device)
        self._cross = torch.zeros(draft_hidden + 1, hidden, dtype=torch.float64, device=device)

    def add(self, states: Tensor, wanted: Tensor) -> None:
        """Add tokens: states of the draft, and those of the target."""  # [rows, draft hidden], [rows, hidden]
        x, y = _with_one(states), wanted.double()
        size = y.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-30)
        x, y = x / size, (y - states.double() if self._same_width else y) / size
        self._gram += x.T @ x
        self._cross += x.T @ y

    def solve(self) -> None:
        """Decompose the equations, in place; call it once, after all tokens were added."""
        self._scale = self._gram.diagonal().sqrt().clamp_min(1e-30)  # equalizes features, so that one ridge suits all
        values, vectors = torch.linalg.eigh(self._gram / self._scale[:, None] / self._scale)
        self._values, self._gram = values.clamp_min(0.0), vectors
        self._cross = vectors.T @ (self._cross / self._scale[:, None])

    def predict(self, states: Tensor, ridges: Sequence[float]) -> list[Tensor]:
        """Predict the target's states with each ridge's map."""  # [rows, draft hidden] -> ridges x [rows, hidden]
        rotated = (_with_one(states) / self._scale) @ self._gram
        base = states.double() if self._same_width else 0.0
        return [(rotated / (self._values + ridge)) @ self._cross + base for ridge in ridges]

    def map(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return weight and bias of one ridge's map."""  # -> [draft hidden, hidden], [1, hidden]
        solution = (self._gram @ (self._cross / (self._values + ridge)[:, None])) / self._scale[:, None]
        if self._same_width:
            solution[:-1].diagonal().add_(1.0)
        return solution[:-1], solution[-1:]


def _with_one(states: Tensor) -> Tensor:
    return torch.nn.functional.pad(states.double(), (0, 1), value=1.0)
