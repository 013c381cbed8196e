"""The target as its own draft: the same modules with quantized experts, over the target's own attention state.

What it adds to the state while it drafts is forgotten before the target verifies, so there is no second KV cache. And
its routers choose experts by themselves, which is the prediction: no gate is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spmoe import types
from spmoe.backends.quantize import QuantizedExperts
from spmoe.draft.base import ChunkObserver
from spmoe.draft.model import DraftModel
from spmoe.models.experts_seam import attach
from spmoe.models.hidden_states import LayerObserver, OnChunk
from spmoe.models.kv import KvState
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target

if TYPE_CHECKING:
    from spmoe.backends.graphs import GraphRecorder


class QuantizedSelfRunner(ModelRunner):
    """A target's modules, which see quantized experts while a forward of this network runs."""

    def __init__(self, target: Target, experts: QuantizedExperts) -> None:
        super().__init__(target.model)
        self.inspection = replace(self.inspection, kv_bytes_per_token=0)  # there is but the target's own state
        self._target = target
        self._experts = experts
        self._sites = [(moe_layer.experts, _Port(self, layer)) for layer, moe_layer in enumerate(self.inspection.moe)]
        self._capture_chunk: OnChunk | None = None
        self._chunk_size = 0  # layers that are told of together
        self._routed: list[tuple[Tensor, Tensor]] = []  # by MoE layer, since the last chunk

    @property
    def spare_states(self) -> list[KvState]:
        """The target's."""
        return self._target.spare_states

    @property
    def resident_bytes(self) -> int:
        """Of the quantized experts; all else is the target's."""
        return self._experts.nbytes

    def capture_forwards(self, recorder: GraphRecorder, rows: int, positions: int) -> str | None:
        """As any network's; but the modules are the target's, which comes first."""
        if not self._target.records:
            return "those of the target are not"
        return super().capture_forwards(recorder, rows, positions)

    def run(self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """One layer's experts, after telling of the choice."""
        if self._capture_chunk is not None:
            self._routed.append((index, weights))
            if len(self._routed) == self._chunk_size or layer == len(self._sites) - 1:
                self._tell(self._capture_chunk, layer)
        return self._experts.run(layer, experts, hidden, index, weights)

    def _tell(self, on_layers: OnChunk, layer: int) -> None:
        moe_layers, count = self.inspection.moe, len(self._routed)
        depths = range(moe_layers[layer + 1 - count].depth, moe_layers[layer].depth + 1)
        scores = torch.stack([weights for _, weights in self._routed]).float()
        scores = scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        routing = types.Routing(torch.stack([index for index, _ in self._routed]), scores)
        self._routed.clear()
        on_layers(depths, scores.new_empty(0), routing)

    @contextmanager
    def observing(self, observer: LayerObserver | None, on_layers: OnChunk | None = None) -> Iterator[None]:
        """Run with quantized experts inside; nothing is asked of a watch, and states are not shown: routers choose."""
        before: list[Any] = [experts.spmoe_forward for experts, _ in self._sites]
        if observer is not None:
            self._capture_chunk, self._chunk_size = on_layers or observer.tell, -(-len(self._sites) // observer.chunks)
        self._routed.clear()
        try:  # from here on: an interrupt must not leave the target with what is the draft's
            for experts, port in self._sites:
                attach(experts, port)
            yield
        finally:
            interrupt: KeyboardInterrupt | None = None
            while True:
                try:
                    for (experts, _), other in zip(self._sites, before, strict=True):
                        attach(experts, other)
                    break
                except KeyboardInterrupt as error:  # first all of them
                    interrupt = error
            self._capture_chunk = None
            if interrupt is not None:
                raise interrupt


class _Port:
    def __init__(self, runner: QuantizedSelfRunner, layer: int) -> None:
        self._network = runner
        self._layer = layer

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self._network.run(self._layer, experts, hidden, index, weights)


class SelfDraft(DraftModel):
    """Drafts with a target's quantized self, where the target is in the sequence."""

    def __init__(self, runner: QuantizedSelfRunner, prefill_chunk: int, states: MutableMapping[int, KvState]) -> None:
        super().__init__(runner, runner.vocab_size, prefill_chunk)
        self._states = states  # the target's, which the loop makes, rolls back and releases

    def rewind(self, lengths: Mapping[int, int]) -> None:
        pass

    def release(self, sequence_id: int) -> None:
        self._begun = None

    def _propose(self, sequence: types.Sequence, k: int, on_chunk: ChunkObserver | None) -> types.Draft:
        if k == 0:
            return types.Draft([])
        kv = self._states[sequence.id]
        length = kv.length
        kv.mark()
        try:
            return super()._propose(sequence, k, on_chunk)
        finally:
            kv.rewind(length)  # the target writes the same positions again
