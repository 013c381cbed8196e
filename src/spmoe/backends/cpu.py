"""The CPU backend: plain PyTorch, and the definition that faster backends are proved against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from spmoe.backends.base import ExpertsForward, HostExperts
from spmoe.experts.batches import ExpertBatch
from spmoe.experts.source import ExpertSource


class CpuBackend:
    """One expert after the other, with the arithmetic and the order of addition of transformers' eager experts.

    Contributions are kept apart until all have arrived and then added in order of expert number, so the result does
    not depend, in any bit, on which experts were resident.
    """

    def port(self, layer: int, source: ExpertSource) -> ExpertsForward:
        return HostExperts(layer, source, self)

    def synchronize(self) -> None:
        pass

    def run_experts(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, batches: Iterable[ExpertBatch]
    ) -> Tensor:
        rank = index.argsort(dim=-1).argsort(dim=-1)  # [rows, top_k], place of each choice by expert number
        shares = hidden.new_zeros(index.shape[-1], *hidden.shape)  # [top_k, rows, hidden]
        for batch in batches:
            for expert, tensors in zip(batch.experts, batch.weights, strict=True):
                choice, rows = torch.where((index == expert).T)  # rows in eager's order, should a product care
                out = run_expert(experts, parts(experts, tensors), hidden[rows]) * weights[rows, choice, None]
                shares[rank[rows, choice], rows] = out.to(shares.dtype)
        total = torch.zeros_like(hidden)
        for share in shares:
            total += share
        return total


WHOLE = "whole"  # the one field of a blob in a model whose layers have experts of several sizes


def parts(experts: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """An expert's own tensors, where its blob is laid out for experts of any layer."""
    if WHOLE not in tensors:
        return tensors
    whole, found, start = tensors[WHOLE].view(-1), {}, 0
    for name, (_, *shape) in experts.spmoe_shapes.items():
        end = start + math.prod(shape)
        found[name] = whole[start:end].view(shape)
        start = end
    return found


def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """One expert's feed-forward, as its module declares it."""  # x: [rows, hidden] -> [rows, hidden]
    if experts.has_gate:
        x = experts._apply_gate(_project(experts, tensors, "gate_up_proj", x))
    else:
        x = experts.act_fn(_project(experts, tensors, "up_proj", x))
    return _project(experts, tensors, "down_proj", x)


def _project(experts: Any, tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = tensors[name].T if experts.is_transposed else tensors[name]
    return linear(x, weight, tensors[f"{name}_bias"] if experts.has_bias else None)
