"""Fitted maps: what a draft's residual stream says of the target's, layer by layer, found by ridge regression.

A draft of another width fits no gate of the target; one of the same width may mean something else by its states. Both
are mended by one affine map per MoE layer, from the draft's stream to the target's at that layer's gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # tried on text held out; in units of a feature's mean square


class HiddenStateProjection:
    """Maps a chunk of the draft's states to the target's, in one batched product."""

    def __init__(self, weights: Tensor, biases: Tensor) -> None:
        self.weights = weights  # [layers, draft hidden, hidden]
        self.biases = biases  # [layers, 1, hidden]

    @property
    def nbytes(self) -> int:
        """What the maps occupy."""
        return self.weights.nbytes + self.biases.nbytes

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same maps elsewhere."""
        return type(self)(self.weights.to(device, dtype), self.biases.to(device, dtype))

    def __call__(self, layers: Sequence[int], residual: Tensor) -> Tensor:
        """The target's states at these layers, which are neighbours."""
        # residual: [layers, rows, draft hidden] -> [layers, rows, hidden]
        some = slice(layers[0], layers[-1] + 1)
        return torch.baddbmm(self.biases[some], residual, self.weights[some])


class LayerFit:
    """Normal equations of one layer, accumulated in float64, and then their solutions for every ridge.

    Every token weighs the same: rows are divided by the size of the target's state, of which the gate's norm only sees
    the direction. Where widths are equal the map is fitted as a correction to the identity, so a ridge that is large
    enough leaves the states as they are.
    """

    def __init__(self, draft_hidden: int, hidden: int, device: torch.device) -> None:
        self._same = draft_hidden == hidden
        self._gram = torch.zeros(draft_hidden + 1, draft_hidden + 1, dtype=torch.float64, device=device)
        self._cross = torch.zeros(draft_hidden + 1, hidden, dtype=torch.float64, device=device)

    def add(self, states: Tensor, wanted: Tensor) -> None:
        """Take in some tokens."""  # [rows, draft hidden], [rows, hidden]
        x, y = _with_one(states), wanted.double()
        size = y.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-30)
        x, y = x / size, (y - states.double() if self._same else y) / size
        self._gram += x.T @ x
        self._cross += x.T @ y

    def solve(self) -> None:
        """Turn the equations, in place, into what every ridge's solution is quickly made of."""
        self._scale = self._gram.diagonal().sqrt().clamp_min(1e-30)  # features of one size, so that one ridge suits all
        values, vectors = torch.linalg.eigh(self._gram / self._scale[:, None] / self._scale)
        self._values, self._gram = values.clamp_min(0.0), vectors
        self._cross = vectors.T @ (self._cross / self._scale[:, None])

    def guess(self, states: Tensor, ridges: Sequence[float]) -> list[Tensor]:
        """The target's states by each ridge's map."""  # [rows, draft hidden] -> ridges x [rows, hidden]
        turned = (_with_one(states) / self._scale) @ self._gram
        base = states.double() if self._same else 0.0
        return [(turned / (self._values + ridge)) @ self._cross + base for ridge in ridges]

    def map(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Weight and bias of one ridge's map."""  # -> [draft hidden, hidden], [1, hidden]
        whole = (self._gram @ (self._cross / (self._values + ridge)[:, None])) / self._scale[:, None]
        if self._same:
            whole[:-1].diagonal().add_(1.0)
        return whole[:-1], whole[-1:]


def _with_one(states: Tensor) -> Tensor:
    return torch.nn.functional.pad(states.double(), (0, 1), value=1.0)
