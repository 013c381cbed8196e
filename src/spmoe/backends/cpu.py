"""The CPU backend: plain PyTorch, and the reference that faster backends are tested against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from spmoe.backends.base import ExpertsForward, HostExperts
from spmoe.experts.access import ExpertBatch
from spmoe.experts.experts import Experts


class CpuBackend:
    """Runs one expert after the other, with the arithmetic and the order of addition of transformers' eager experts.

    Contributions are kept apart until all experts have arrived and are then added in order of expert number, so the
    result does not depend, in any bit, on which experts were resident.
    """

    def experts_forward(self, layer: int, experts: Experts) -> ExpertsForward:
        return HostExperts(layer, experts.access, self)

    def synchronize(self) -> None:
        pass

    def run_experts(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, batches: Iterable[ExpertBatch]
    ) -> Tensor:
        rank = index.argsort(dim=-1).argsort(dim=-1)  # [rows, top_k], place of each choice by expert number
        contributions = hidden.new_zeros(index.shape[-1], *hidden.shape)  # [top_k, rows, hidden]
        for batch in batches:
            for expert, tensors in zip(batch.experts, batch.weights, strict=True):
                choice, rows = torch.where((index == expert).T)  # rows in eager's order, should a product depend on it
                out = run_expert(experts, expert_tensors(experts, tensors), hidden[rows])
                out = out * weights[rows, choice, None]
                contributions[rank[rows, choice], rows] = out.to(contributions.dtype)
        total = torch.zeros_like(hidden)
        for contribution in contributions:
            total += contribution
        return total


WHOLE = "whole"  # the only field of a blob in a model whose layers have experts of several sizes


def expert_tensors(experts: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return an expert's own tensors, also where its blob is laid out for experts of any layer."""
    if WHOLE not in tensors:
        return tensors
    whole, found, start = tensors[WHOLE].view(-1), {}, 0
    for name, (_, *shape) in experts.spmoe_shapes.items():
        end = start + math.prod(shape)
        found[name] = whole[start:end].view(shape)
        start = end
    return found


def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return one expert's feed-forward, as its module declares it."""  # x: [rows, hidden] -> [rows, hidden]
    if experts.has_gate:
        x = experts._apply_gate(_project(experts, tensors, "gate_up_proj", x))
    else:
        x = experts.act_fn(_project(experts, tensors, "up_proj", x))
    return _project(experts, tensors, "down_proj", x)


def _project(experts: Any, tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = tensors[name].T if experts.is_transposed else tensors[name]
    return linear(x, weight, tensors[f"{name}_bias"] if experts.has_bias else None)
