"""The CPU backend: plain PyTorch, and the reference that faster backends are tested against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from spmoe.backends.base import ExpertsForward, HostExperts
from spmoe.experts.access import ExpertBatch
from spmoe.experts.experts import Experts
from spmoe.formats.expert import WHOLE, ExpertFormat


class CpuBackend:
    """Runs one expert after the other, with the arithmetic and the order of addition of transformers' eager experts.

    Contributions are kept apart until all experts have arrived and are then added in order of expert number, so the
    result does not depend, in any bit, on which experts were resident.

    `format` is that of the experts in slots; without it, they are dense. Packed experts are dequantized one at a time,
    unless PyTorch has an operator for their format and the run's dtype.
    """

    def __init__(self, format: ExpertFormat | None = None) -> None:
        self._format = format

    def experts_forward(self, layer: int, experts: Experts) -> ExpertsForward:
        return HostExperts(layer, experts.access, self)

    def synchronize(self) -> None:
        pass

    def run_experts(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, batches: Iterable[ExpertBatch]
    ) -> Tensor:
        total = ExpertSum(self, experts, hidden, index, weights)
        for batch in batches:
            total.add(batch)
        return total.finish()

    def compute_expert(self, experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return one expert's feed-forward, given the fields of its slot."""  # x: [rows, hidden] -> [rows, hidden]
        if self._format is not None:
            if WHOLE in tensors:
                tensors = self._format.views(tensors, expert_shapes(experts))
            if self._format.weight.has_operator(x):
                format, views = self._format, tensors
                return run_projections(
                    experts, views, x, lambda name, x: format.weight.linear(format.parts(views, name), x)
                )
            if self._format.is_packed:
                tensors = self._format.dequantize(tensors)
        return run_expert(experts, tensors, x)


class ExpertSum:
    """Weighted sum of each row's routed experts, which arrive in any order and are added by expert number."""

    def __init__(
        self, arithmetic: CpuBackend, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> None:
        # hidden: [rows, hidden], index and weights: [rows, top_k]
        self._arithmetic = arithmetic
        self._experts = experts
        self._hidden = hidden
        self._index = index
        self._weights = weights
        self._rank = index.argsort(dim=-1).argsort(dim=-1)  # [rows, top_k], place of each choice by expert number
        self._contributions = hidden.new_zeros(index.shape[-1], *hidden.shape)  # [top_k, rows, hidden]

    def add(self, batch: ExpertBatch) -> None:
        """Compute the experts of a batch for the rows that are routed to them."""
        if (done := batch.computed) is not None:
            device = self._hidden.device
            self._place(done.rows.to(device), done.positions.to(device), done.values.to(device))
            return
        for expert, tensors in zip(batch.experts, batch.weights, strict=True):
            choice, rows = torch.where((self._index == expert).T)  # rows in eager's order: a product may depend on it
            if len(rows):
                out = self._arithmetic.compute_expert(self._experts, tensors, self._hidden[rows])
                self._place(rows, choice, out * self._weights[rows, choice, None])

    def finish(self) -> Tensor:
        """Return the sum."""  # [rows, hidden]
        total = torch.zeros_like(self._hidden)
        for contribution in self._contributions:
            total += contribution
        return total

    def _place(self, rows: Tensor, choice: Tensor, values: Tensor) -> None:
        self._contributions[self._rank[rows, choice], rows] = values.to(self._contributions.dtype)


def expert_shapes(experts: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one expert's tensors, as its module holds them."""
    return {name: shape[1:] for name, shape in experts.spmoe_shapes.items()}


def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return one expert's feed-forward, as its module declares it."""  # x: [rows, hidden] -> [rows, hidden]
    return _feed_forward(experts, x, lambda name, x: _project(experts, tensors, name, x))


def run_projections(
    experts: Any, views: Mapping[str, Tensor], x: Tensor, multiply: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """Return one expert's feed-forward, given the products with its projections, and biases in the fields of a blob."""

    def project(name: str, x: Tensor) -> Tensor:
        product = multiply(name, x)
        return product + views[f"{name}_bias"] if experts.has_bias else product

    return _feed_forward(experts, x, project)


def _feed_forward(experts: Any, x: Tensor, project: Callable[[str, Tensor], Tensor]) -> Tensor:
    gated = experts.has_gate
    inner = experts._apply_gate(project("gate_up_proj", x)) if gated else experts.act_fn(project("up_proj", x))
    return project("down_proj", inner)


def _project(experts: Any, tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = tensors[name].T if experts.is_transposed else tensors[name]
    return linear(x, weight, tensors[f"{name}_bias"] if experts.has_bias else None)
