"""The target as its own draft: the same modules with quantized experts, over the target's own KV cache.

Positions that it appends while it drafts are forgotten before the target verifies, so there is no second KV cache. The
experts that its routers select are the prediction: no other gate is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from spmoe import types
from spmoe.backends.graphs import CaptureContext
from spmoe.backends.quantize import QuantizedExperts
from spmoe.config import format_bytes
from spmoe.draft.base import DraftContext, DraftSources, Observers
from spmoe.draft.model import DraftModel
from spmoe.models.experts_seam import attach
from spmoe.models.hidden_states import LayerObserver, OnChunk
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.registry import DRAFTERS


class QuantizedSelfRunner(ModelRunner):
    """A target's modules, which use quantized experts while a forward of this runner runs."""

    def __init__(self, target: Target, experts: QuantizedExperts) -> None:
        super().__init__(target.model)
        self.inspection = replace(self.inspection, kv_bytes_per_token=0)  # the KV cache is the target's
        self.kv_pool = target.kv_pool
        self._target = target
        self._experts = experts
        moe_layers = enumerate(self.inspection.moe)
        self._forwards = [(moe_layer.experts, _QuantizedForward(self, layer)) for layer, moe_layer in moe_layers]
        self._on_chunk: OnChunk | None = None
        self._chunk_layers = 0  # MoE layers per chunk
        self._routed: list[tuple[Tensor, Tensor]] = []  # experts and weights by MoE layer, since the last chunk

    @property
    def resident_bytes(self) -> int:
        """Bytes of the quantized experts; all other weights belong to the target."""
        return self._experts.nbytes

    def capture_forwards(self, capture: CaptureContext, rows: int) -> str | None:
        if not self._target.captures:  # the modules are the target's
            return "the target's are not either"
        return super().capture_forwards(capture, rows)

    def run_experts(self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Show the routed experts to the observer, then compute them."""
        if self._on_chunk is not None:
            self._routed.append((index, weights))
            if len(self._routed) == self._chunk_layers or layer == len(self._forwards) - 1:
                self._show_routing(self._on_chunk, layer)
        return self._experts.run(layer, experts, hidden, index, weights)

    def _show_routing(self, on_chunk: OnChunk, layer: int) -> None:
        moe_layers, count = self.inspection.moe, len(self._routed)
        depths = range(moe_layers[layer + 1 - count].depth, moe_layers[layer].depth + 1)
        scores = torch.stack([weights for _, weights in self._routed]).float()
        scores = scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        routing = types.Routing(torch.stack([index for index, _ in self._routed]), scores)
        self._routed.clear()
        on_chunk(depths, scores.new_empty(0), routing)

    @contextmanager
    def observing(self, observer: LayerObserver | None, on_chunk: OnChunk | None = None) -> Iterator[None]:
        """Use quantized experts inside. The observer gets the routers' own selection; its `predict` is not called."""
        before: list[Any] = [experts.spmoe_forward for experts, _ in self._forwards]
        if observer is not None:
            self._on_chunk = on_chunk or observer.show
            self._chunk_layers = -(-len(self._forwards) // observer.chunks)
        self._routed.clear()
        try:  # from here on: an interrupt must not leave quantized experts in the target
            for experts, forward in self._forwards:
                attach(experts, forward)
            yield
        finally:
            interrupt: KeyboardInterrupt | None = None
            while True:
                try:
                    for (experts, _), other in zip(self._forwards, before, strict=True):
                        attach(experts, other)
                    break
                except KeyboardInterrupt as error:  # restore all modules first
                    interrupt = error
            self._on_chunk = None
            if interrupt is not None:
                raise interrupt


class _QuantizedForward:
    """Forward of one layer's experts module while the quantized runner runs."""

    def __init__(self, runner: QuantizedSelfRunner, layer: int) -> None:
        self._runner = runner
        self._layer = layer

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self._runner.run_experts(self._layer, experts, hidden, index, weights)


@DRAFTERS.register("self")
class SelfDraft(DraftModel):
    """Drafts with the target's quantized self, over the target's own KV caches."""

    routes_experts = True

    @classmethod
    def load_runner(cls, sources: DraftSources) -> ModelRunner | None:
        experts = sources.models.load_quantized(sources.argument, sources.progress)
        return QuantizedSelfRunner(sources.models.target, experts)

    @classmethod
    def notice(cls, sources: DraftSources, runner: ModelRunner | None) -> str | None:
        size = format_bytes(runner.resident_bytes if runner is not None else 0)
        return f"the draft is the target itself with {sources.argument} experts, which occupy {size}"

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        assert context.runner is not None
        # the KV caches are made, rolled back and released by the step
        return cls(
            context.runner, context.runner.vocab_size, context.prefill_chunk, context.run_ahead, context.target_kv
        )

    def kv_cache(self, sequence_id: int) -> None:
        """Return None: the KV caches are the target's."""

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Do nothing: the KV caches are the target's."""

    def release(self, sequence_id: int) -> None:
        """Do nothing: the KV caches are the target's."""

    def read_prompt(self, sequence: types.Sequence) -> bool:
        """Return False: the target reads it."""
        return False

    def _propose_together(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        states = [self._states[sequence.id] for sequence in sequences]
        lengths = [kv.length for kv in states]
        try:
            return super()._propose_together(sequences, k, observers)
        finally:
            for kv, length in zip(states, lengths, strict=True):
                kv.rewind(length)  # the target appends the same positions again

    def _propose(self, sequence: types.Sequence, k: int, observers: Observers) -> types.Draft:
        if k == 0:
            return types.Draft([])
        kv = self._states[sequence.id]
        length = kv.length
        kv.snapshot()
        try:
            return super()._propose(sequence, k, observers)
        finally:
            kv.rewind(length)  # the target appends the same positions again
