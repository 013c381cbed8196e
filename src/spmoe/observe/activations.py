"""Activation matrices: the experts that requests used, and those that similar past requests used next.

A request's matrix holds, for every layer and expert, the share of its steps that used the expert. The running step is
compared with every request's matrix over the layers that have run; the most similar ones predict the other layers. The
step that reads a prompt is left out: it uses nearly every expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Activations:
    """The matrices of up to `capacity` requests, the running one among them."""

    def __init__(self, experts_per_layer: Sequence[int], capacity: int = 128, neighbours: int = 3) -> None:
        shape = (len(experts_per_layer), max(experts_per_layer))
        self._neighbours = neighbours
        self._matrices = np.zeros((capacity, *shape), dtype=np.float32)  # share of steps
        self._squares = np.zeros((capacity, shape[0]))  # squared norm of each layer's row
        self._steps = np.zeros(capacity, dtype=int)
        self._index_of: dict[int, int] = {}  # sequence id -> index of its matrix, the oldest first
        self._current: int | None = None  # index of the running request's matrix
        self._is_decoding = False  # whether the running step is not the one that reads the prompt
        self._step_bytes = bytearray(shape[0] * shape[1])
        self._step = np.frombuffer(self._step_bytes, dtype=bool).reshape(shape)  # experts it used; shares memory
        self._uses = 0  # experts that it used
        self._layers: set[int] = set()  # layers that have run in it
        self._products = np.zeros(capacity)  # dot product of the step so far with every matrix
        self._sizes = np.zeros(capacity)  # squared norm of every matrix, over those layers

    def __len__(self) -> int:
        return len(self._index_of)

    def begin_step(self, sequence_id: int) -> None:
        """Add the last step to its request's matrix, and begin a step of this request."""
        if self._current is not None and self._is_decoding and self._uses:
            current, steps = self._current, self._steps[self._current]
            self._matrices[current] = (self._matrices[current] * steps + self._step) / (steps + 1)
            self._squares[current] = np.square(self._matrices[current], dtype=float).sum(axis=1)
            self._steps[current] += 1
        self._is_decoding = sequence_id in self._index_of
        if not self._is_decoding:
            self._index_of[sequence_id] = self._free_index()
        self._current = self._index_of[sequence_id]
        self._step[:] = False
        self._uses = 0
        self._layers.clear()
        self._products[:] = 0.0
        self._sizes[:] = 0.0

    def add(self, layers: Sequence[int], experts: Sequence[int]) -> None:
        """Add experts that the running step uses, each with its layer."""
        step, width = self._step_bytes, self._step.shape[1]
        rows: list[int] = []
        columns: list[int] = []
        for layer, expert in zip(layers, experts, strict=True):
            if not step[layer * width + expert]:
                step[layer * width + expert] = True
                rows.append(layer)
                columns.append(expert)
        if not rows:
            return
        self._uses += len(rows)
        known = len(self._index_of)  # indices are taken from 0 on
        self._products[:known] += self._matrices[:known, rows, columns].sum(axis=1)
        for layer in {*rows} - self._layers:
            self._layers.add(layer)
            self._sizes[:known] += self._squares[:known, layer]

    def similarities(self) -> np.ndarray:
        """Return the cosine of the step so far with every matrix, over the layers that have run."""  # [capacity]
        found: np.ndarray = self._products / np.sqrt(np.maximum(self._sizes * self._uses, 1e-30))
        return found

    def expected(self, start: int = 0) -> np.ndarray:
        """Return how likely this step uses each expert: the mean of the nearest matrices, weighted by similarity.

        Before the first layer it is the request's own matrix or, if that is empty, the mean of all.
        """
        # -> [layers from start, experts]
        known = self._steps.nonzero()[0]
        similarity = self.similarities()[known]
        if np.count_nonzero(similarity):
            nearest = (-similarity).argsort(kind="stable")[: self._neighbours]
            known, weights = known[nearest], similarity[nearest]
        elif self._current is not None and self._steps[self._current]:
            known, weights = np.array([self._current]), np.ones(1)
        else:
            weights = np.ones(len(known))
        found: np.ndarray | None = None
        for index, weight in zip(known.tolist(), (weights / weights.sum()).tolist(), strict=True):
            part = weight * self._matrices[index, start:]
            found = part.astype(float) if found is None else found + part
        return np.zeros(self._step[start:].shape) if found is None else found

    def _free_index(self) -> int:
        """Return an unused index; if there is none, drop the older of the two most similar requests."""
        if len(self._index_of) < len(self._steps):
            return len(self._index_of)
        flat = self._matrices.reshape(len(self._steps), -1)
        unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
        similarity = unit @ unit.T
        np.fill_diagonal(similarity, -np.inf)
        pair = divmod(int(similarity.argmax()), len(similarity))
        sequence_id, index = next((known, index) for known, index in self._index_of.items() if index in pair)
        del self._index_of[sequence_id]
        self._matrices[index], self._squares[index], self._steps[index] = 0.0, 0.0, 0
        return index
