"""The target: a network whose experts come from a source, and whose gates can be asked about any hidden state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.base import Backend
from spmoe.backends.graphs import GraphRecorder
from spmoe.experts.source import ExpertSource
from spmoe.models.experts_seam import attach
from spmoe.models.gates import FusedGates, StackedGates
from spmoe.models.inspection import MoeLayer
from spmoe.models.runner import ModelRunner
from spmoe.types import Routing


class Target(ModelRunner):
    """The MoE model whose output counts. Its experts are silent until `connect`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.moe: tuple[MoeLayer, ...] = self.inspection.moe
        self.layer_depths: Sequence[int] = [moe_layer.depth for moe_layer in self.moe]
        self.top_k = max(moe_layer.top_k for moe_layer in self.moe)
        gated = [
            layer
            for layer, moe_layer in enumerate(self.moe)
            if moe_layer.norm is not None and moe_layer.router is not None
        ]
        self._places = {layer: place for place, layer in enumerate(gated)}  # among the stacked gates
        self._gated = [self.moe[layer] for layer in gated]
        self._stacked: StackedGates | FusedGates | None = StackedGates.of(self._gated)

    @property
    def gated(self) -> Collection[int]:
        """The MoE layers whose norm and router can be called alone, in order."""
        return self._places.keys()

    @property
    def gates_found(self) -> bool:
        """Whether that is all of them."""
        return len(self._gated) == len(self.moe)

    def capture_forwards(self, recorder: GraphRecorder, rows: int, positions: int) -> str | None:
        reason = super().capture_forwards(recorder, rows, positions)
        if reason is None:  # kernels run here, and predictions will be recorded too
            self._stacked = FusedGates.of(self._gated) or self._stacked
        return reason

    def connect(self, source: ExpertSource, backend: Backend) -> None:
        """From now on experts come from this source."""
        for layer, moe_layer in enumerate(self.moe):
            attach(moe_layer.experts, backend.port(layer, source))

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        """The layers' own norms and routers on hidden states of any origin."""
        # residual: [layers, rows, hidden]
        places = [self._places.get(layer, -1) for layer in layers]
        whole = range(places[0], places[-1] + 1)
        in_a_row = places == list(whole) and places[0] >= 0
        if isinstance(self._stacked, FusedGates) and in_a_row:
            return Routing(*self._stacked(whole, residual))
        if self._stacked is not None and len(layers) > 1 and in_a_row:
            experts, weights = self._stacked(whole, residual)
        else:
            answers = [self._ask_gate(layer, states) for layer, states in zip(layers, residual, strict=True)]
            experts, weights = torch.stack([a[0] for a in answers]), torch.stack([a[1] for a in answers])
        weights = weights.float()
        return Routing(experts, weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20))

    def rank(self, layer: int, states: Tensor) -> Tensor:
        """Every expert of a layer, those its gate picks first, the others by logit."""
        # states: [rows, hidden] -> [rows, experts]
        chosen, weights, logits = self._ask_gate(layer, states)
        picked = logits.float().scatter(1, chosen, float("inf"))
        rest = picked.argsort(dim=-1, descending=True)[:, chosen.shape[1] :]
        order = weights.argsort(dim=-1, descending=True, stable=True)
        return torch.cat((chosen.gather(1, order), rest), dim=1)

    def _ask_gate(self, layer: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moe_layer = self.moe[layer]
        if moe_layer.norm is None or moe_layer.router is None:
            raise ValueError(f"layer {layer} has no gate that can be called alone")
        with torch.inference_mode():
            return moe_layer.router(moe_layer.norm(states))
