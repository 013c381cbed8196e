"""Quantized experts, all resident: the weights of a self-drafting model, where an error costs speed only.

They have one of the formats of `spmoe.formats`, in a file of their own, and run in the kernels of the target's experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spmoe.backends.base import MAX_KERNEL_ROWS, Gate, kernel_gate
from spmoe.backends.cpu import CpuBackend, run_expert
from spmoe.experts.access import ExpertBatch
from spmoe.experts.store import StoreSpec
from spmoe.experts.transfer import BlobReader
from spmoe.formats.base import weight_format
from spmoe.formats.expert import ExpertFormat, Shapes

if TYPE_CHECKING:
    from spmoe.backends.kernels.experts import ScratchBuffer, SlotExperts

_FORMATS = {"int8": "int8-g32", "int4": "int4-asym-g32"}  # small groups: the draft must agree with the target
_MAX_DEQUANTIZED_PAIRS = 32  # (row, top-k position) pairs that run one by one, without reading the routed experts


class QuantizedExperts:
    """All experts of a target, quantized and resident."""

    def __init__(self, spec: StoreSpec, format: ExpertFormat, layers: Sequence[Shapes]) -> None:
        # spec: that of the target's own experts; layers: shapes of one expert's tensors, by layer
        self.format = format
        self._shapes = list(layers)
        layout = format.shared_layout(layers)
        self.spec = replace(spec, fingerprint=f"{spec.fingerprint}-{format.name}", layout=layout)
        self._blobs: list[Tensor] = []  # per layer [experts, blob bytes] uint8
        self._table = torch.empty(0, dtype=torch.int32)  # an expert's blob is that of its number
        self._plain = CpuBackend(format)
        self._kernels: dict[int, tuple[SlotExperts, Gate] | None] = {}  # by layer; None: kernels cannot run its experts
        self._scratches: dict[tuple[int, int, int], ScratchBuffer] = {}  # by top-k and sizes; layers share them
        self._use_kernels = False

    @classmethod
    def of(
        cls, spec: StoreSpec, scheme: str, dtype: torch.dtype, transposed: bool, layers: Sequence[Shapes]
    ) -> QuantizedExperts:
        """Describe experts quantized by a scheme, `int8` or `int4`; nothing is read."""
        return cls(spec, ExpertFormat(weight_format(_FORMATS[scheme]), dtype, transposed), layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all quantized experts."""
        return self.spec.nbytes

    def load(self, store: BlobReader, device: torch.device) -> None:
        """Read all experts from a store to the device."""
        size = self.spec.layout.nbytes
        blobs = torch.empty(self.spec.count, size, dtype=torch.uint8, device=device)
        blob = torch.empty(size, dtype=torch.uint8)  # staging buffer in host memory for one expert
        view = memoryview(blob.numpy())  # type: ignore[arg-type]
        for ordinal, key in enumerate(self.spec.keys()):
            store.read(key, view)
            blobs[ordinal].copy_(blob)
        self._blobs = list(blobs.split(self.spec.experts))
        self._table = torch.arange(max(self.spec.experts), dtype=torch.int32, device=device)
        self._use_kernels = kernels_run_on(device)

    def tensors(self, layer: int, expert: int) -> Mapping[str, Tensor]:
        """Dequantize the weights of one expert."""
        return self._dequantize(layer, self._blobs[layer][expert])

    def run(self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the weighted sum of each row's routed experts."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        if self._use_kernels and len(hidden) <= MAX_KERNEL_ROWS and (found := self._kernel(layer, experts)) is not None:
            return self._run_kernels(*found, hidden, index, weights)
        if self._use_kernels and index.numel() <= _MAX_DEQUANTIZED_PAIRS:
            return self._run_pairs(layer, experts, hidden, index, weights)
        return self._plain.run_experts(experts, hidden, index, weights, self._batches(layer, index))

    def _kernel(self, layer: int, experts: nn.Module) -> tuple[SlotExperts, Gate] | None:
        """Return how kernels find and combine the layer's experts; None if they cannot run them."""
        if layer not in self._kernels:
            from spmoe.backends.kernels.experts import slot_experts, slot_matrices

            shapes = self._shapes[layer]
            found, gate = (
                slot_experts(slot_matrices(self._blobs[layer], self.format, shapes), shapes),
                kernel_gate(experts),
            )
            self._kernels[layer] = None if found is None or gate is None else (found, gate)
        return self._kernels[layer]

    def _run_kernels(self, found: SlotExperts, gate: Gate, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        from spmoe.backends.kernels.experts import ScratchBuffer, reduce_experts, run_expert_batch

        (rows, top_k), shape = index.shape, found.shape
        key = (top_k, shape.hidden, shape.ffn)
        if key not in self._scratches:
            self._scratches[key] = ScratchBuffer(top_k, shape, hidden.device)
        scratch = self._scratches[key].scratch(rows)
        run_expert_batch(hidden, index, weights, self._table, found, gate, scratch)
        return reduce_experts(scratch, torch.empty_like(hidden))

    def _run_pairs(self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute `run` without a host synchronization: one dequantized expert per (row, top-k position) pair."""
        blobs = self._blobs[layer][index.flatten()]  # [pairs, blob bytes]
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for pair, blob in enumerate(blobs):
            row, position = divmod(pair, index.shape[1])
            y = run_expert(experts, self._dequantize(layer, blob), hidden[row, None])[0]
            out[row] += y.float() * weights[row, position].float()
        return out.to(hidden.dtype)

    def _dequantize(self, layer: int, blob: Tensor) -> Mapping[str, Tensor]:
        return self.format.dequantize(self._views(layer, blob))

    def _views(self, layer: int, blob: Tensor) -> Mapping[str, Tensor]:
        """Return the fields of an expert's blob."""
        return self.format.layout(self._shapes[layer]).views(blob)

    def _batches(self, layer: int, index: Tensor) -> Iterator[ExpertBatch]:
        for expert in torch.unique(index).tolist():  # one per batch: only one expert is dequantized at a time
            yield ExpertBatch(layer, (expert,), (), (self._views(layer, self._blobs[layer][expert]),))


def kernels_run_on(device: torch.device) -> bool:
    """Return whether kernels run on the device."""
    return device.type == "cuda"
