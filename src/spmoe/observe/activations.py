"""Activation matrices: which experts requests have used, and what the past ones that are like this one went on to use.

A request's matrix holds, for every layer and expert, the share of its steps that used it. The step under way is
compared, by the layers that have run, with every request's matrix; the nearest say what the layers to come will use.
The step that reads a prompt is left out: it uses nearly everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Activations:
    """A bounded collection of requests' matrices, the running one's among them."""

    def __init__(self, experts: Sequence[int], capacity: int = 128, neighbours: int = 3) -> None:
        shape = (len(experts), max(experts))
        self._neighbours = neighbours
        self._matrices = np.zeros((capacity, *shape), dtype=np.float32)  # share of steps
        self._squares = np.zeros((capacity, shape[0]))  # of each layer's row
        self._steps = np.zeros(capacity, dtype=int)
        self._places: dict[int, int] = {}  # by request, the oldest first
        self._here: int | None = None  # the running request's place
        self._counts = False  # whether the running step does
        self._marks = bytearray(shape[0] * shape[1])
        self._step = np.frombuffer(self._marks, dtype=bool).reshape(shape)  # what it has used; the same memory
        self._uses = 0  # how many that is
        self._layers: set[int] = set()  # those that have run in it
        self._products = np.zeros(capacity)  # of the step so far with every matrix
        self._sizes = np.zeros(capacity)  # squares of every matrix, over those layers

    def __len__(self) -> int:
        return len(self._places)

    def begin_step(self, sequence_id: int) -> None:
        """The last step is over and joins its request's matrix; one of this request begins."""
        if self._here is not None and self._counts and self._uses:
            here, steps = self._here, self._steps[self._here]
            self._matrices[here] = (self._matrices[here] * steps + self._step) / (steps + 1)
            self._squares[here] = np.square(self._matrices[here], dtype=float).sum(axis=1)
            self._steps[here] += 1
        self._counts = sequence_id in self._places
        if not self._counts:
            self._places[sequence_id] = self._make_room()
        self._here = self._places[sequence_id]
        self._step[:] = False
        self._uses = 0
        self._layers.clear()
        self._products[:] = 0.0
        self._sizes[:] = 0.0

    def note(self, layers: Sequence[int], experts: Sequence[int]) -> None:
        """The running step uses these: each expert with its layer."""
        marks, width = self._marks, self._step.shape[1]
        rows: list[int] = []
        columns: list[int] = []
        for layer, expert in zip(layers, experts, strict=True):
            if not marks[layer * width + expert]:
                marks[layer * width + expert] = True
                rows.append(layer)
                columns.append(expert)
        if not rows:
            return
        self._uses += len(rows)
        known = len(self._places)  # places are taken from the first on
        self._products[:known] += self._matrices[:known, rows, columns].sum(axis=1)
        for layer in {*rows} - self._layers:
            self._layers.add(layer)
            self._sizes[:known] += self._squares[:known, layer]

    def similarities(self) -> np.ndarray:
        """The cosine between the step so far and every matrix, over the layers that have run."""  # [capacity]
        found: np.ndarray = self._products / np.sqrt(np.maximum(self._sizes * self._uses, 1e-30))
        return found

    def expected(self, start: int = 0) -> np.ndarray:
        """How likely this step is to use each expert, by the nearest matrices, weighed by how near they are.

        Before the first layer it is what the request itself has used so far or, if that is nothing, what all have.
        """
        # [layers from start, experts]
        known = self._steps.nonzero()[0]
        near = self.similarities()[known]
        if np.count_nonzero(near):
            best = (-near).argsort(kind="stable")[: self._neighbours]
            known, weights = known[best], near[best]
        elif self._here is not None and self._steps[self._here]:
            known, weights = np.array([self._here]), np.ones(1)
        else:
            weights = np.ones(len(known))
        found: np.ndarray | None = None
        for place, weight in zip(known.tolist(), (weights / weights.sum()).tolist(), strict=True):
            part = weight * self._matrices[place, start:]
            found = part.astype(float) if found is None else found + part
        return np.zeros(self._step[start:].shape) if found is None else found

    def _make_room(self) -> int:
        """A free place, else that of the older of the two requests that are most alike."""
        if len(self._places) < len(self._steps):
            return len(self._places)
        flat = self._matrices.reshape(len(self._steps), -1)
        unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
        alike = unit @ unit.T
        np.fill_diagonal(alike, -np.inf)
        pair = divmod(int(alike.argmax()), len(alike))
        sequence_id, place = next((sequence_id, place) for sequence_id, place in self._places.items() if place in pair)
        del self._places[sequence_id]
        self._matrices[place], self._squares[place], self._steps[place] = 0.0, 0.0, 0
        return place
