"""The target: a model runner whose experts come from slots, and whose gates can be called on any hidden state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.base import Backend
from spmoe.backends.graphs import CaptureContext
from spmoe.experts.experts import Experts
from spmoe.models.experts_seam import attach
from spmoe.models.gates import FusedGates, StackedGates
from spmoe.models.inspection import MoeLayer
from spmoe.models.runner import ModelRunner
from spmoe.types import Routing


class Target(ModelRunner):
    """The MoE model whose output counts. Its experts return zeros until `connect`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.moe: tuple[MoeLayer, ...] = self.inspection.moe
        self.layer_depths: Sequence[int] = [moe_layer.depth for moe_layer in self.moe]
        self.top_k = max(moe_layer.top_k for moe_layer in self.moe)
        gated = [layer for layer, found in enumerate(self.moe) if found.norm is not None and found.router is not None]
        self._places = {layer: place for place, layer in enumerate(gated)}  # among the stacked gates
        self._gated = [self.moe[layer] for layer in gated]
        self._stacked: StackedGates | FusedGates | None = StackedGates.of(self._gated)

    @property
    def gated(self) -> Collection[int]:
        """The MoE layers whose norm and router can be called alone, in order."""
        return self._places.keys()

    @property
    def gates_found(self) -> bool:
        """Whether the norm and router of every MoE layer can be called alone."""
        return len(self._gated) == len(self.moe)

    def capture_forwards(self, capture: CaptureContext, rows: int) -> str | None:
        reason = super().capture_forwards(capture, rows)
        if reason is None:  # kernels run here, and predictions are captured too
            self._stacked = FusedGates.of(self._gated) or self._stacked
        return reason

    def connect(self, experts: Experts, backend: Backend) -> None:
        """Take the experts' weights from these slots from now on."""
        for layer, moe_layer in enumerate(self.moe):
            attach(moe_layer.experts, backend.experts_forward(layer, experts))

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        """Return the routing that the layers' own norms and routers give for hidden states of any origin."""
        # residual: [layers, rows, hidden]
        places = [self._places.get(layer, -1) for layer in layers]
        whole = range(places[0], places[-1] + 1)
        consecutive = places == list(whole) and places[0] >= 0
        if isinstance(self._stacked, FusedGates) and consecutive:
            return Routing(*self._stacked(whole, residual))
        if self._stacked is not None and len(layers) > 1 and consecutive:
            experts, weights = self._stacked(whole, residual)
        else:
            answers = [self._call_gate(layer, states) for layer, states in zip(layers, residual, strict=True)]
            experts, weights = torch.stack([a[0] for a in answers]), torch.stack([a[1] for a in answers])
        weights = weights.float()
        return Routing(experts, weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20))

    def rank(self, layer: int, states: Tensor) -> Tensor:
        """Return all experts of a layer, the routed ones first, the others by logit."""
        # states: [rows, hidden] -> [rows, experts]
        routed, weights, logits = self._call_gate(layer, states)
        first = logits.float().scatter(1, routed, float("inf"))
        rest = first.argsort(dim=-1, descending=True)[:, routed.shape[1] :]
        order = weights.argsort(dim=-1, descending=True, stable=True)
        return torch.cat((routed.gather(1, order), rest), dim=1)

    def _call_gate(self, layer: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moe_layer = self.moe[layer]
        if moe_layer.norm is None or moe_layer.router is None:
            raise ValueError(f"layer {layer} has no gate that can be called alone")
        with torch.inference_mode():
            return moe_layer.router(moe_layer.norm(states))
