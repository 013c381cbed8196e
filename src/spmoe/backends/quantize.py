"""Quantized experts, all resident: the weights of a self-drafting model, where an error costs speed only.

Each weight matrix is divided along its inputs into groups, and each group is quantized linearly between its minimum and
its maximum. Codes and scales are stored group by group with outputs side by side, as the kernels read them. The file on
disk is an expert file with codes and scales as its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from spmoe.backends.base import gated_activation
from spmoe.backends.cpu import CpuBackend
from spmoe.experts.access import ExpertBatch
from spmoe.experts.store import BlobLayout, ExpertFile, FillBlob, StoreSpec
from spmoe.files import read_into
from spmoe.types import ExpertKey

if TYPE_CHECKING:
    from spmoe.backends.kernels.quantized import QuantizedLayout

_KERNEL_FIELDS = ("gate_up_proj", "down_proj")  # the tensors of experts that kernels can run
_MAX_KERNEL_ROWS = 16
_MAX_DEQUANTIZED_PAIRS = 32  # (row, top-k position) pairs for which all experts are dequantized together
_ROUNDING = 2.0**-8  # twice the largest relative error of rounding to bfloat16


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """Linear quantization of groups of weights to unsigned codes."""

    bits: int  # 8 or 4
    group: int = 32  # weights that share a scale

    @classmethod
    def from_name(cls, name: str) -> QuantizationScheme:
        """Return the scheme named `int8` or `int4`."""
        return cls(int(name.removeprefix("int")))

    @property
    def max_code(self) -> int:
        """Largest code; the smallest is zero."""
        return (1 << self.bits) - 1

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the packed codes of a matrix, and the step and lowest value of each group.

        A group of one output takes `words = group * bits / 32` words of 32 bits. Code i * words + w of the group is the
        i-th code, counted from the lowest bits, of word w.
        """
        # weight: [out, in] -> [groups, out, group * bits / 8] uint8, [groups, out, 2] bfloat16
        out, width = weight.shape
        groups = pad(weight.float(), (0, -width % self.group)).view(out, -1, self.group).transpose(0, 1)
        low = groups.amin(dim=-1)
        low = (low - low.abs() * _ROUNDING).bfloat16().float()  # rounded down, so that no weight is clipped
        step = ((groups.amax(dim=-1) - low) / self.max_code * (1 + _ROUNDING)).bfloat16().float()
        codes = ((groups - low[..., None]) / step.clamp_min(1e-38)[..., None]).round().clamp_(0, self.max_code)
        codes = codes.to(torch.uint8).unflatten(
            -1, (4, 8 // self.bits, -1)
        )  # [groups, out, byte, code in the byte, word]
        packed = codes[..., 0, :] | codes[..., 1, :] << 4 if self.bits == 4 else codes[..., 0, :]
        return packed.mT.flatten(-2), torch.stack((step, low), dim=-1).bfloat16()

    def dequantize(self, codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of packed codes and scales."""  # -> [..., out, width]
        packed = codes.unflatten(-1, (-1, 4)).mT  # [..., groups, out, byte, word]
        if self.bits == 4:
            packed = torch.stack((packed & 15, packed >> 4), dim=-2)
        levels = packed.flatten(scales.ndim - 1).to(dtype)  # [..., groups, out, group]
        step, low = scales.to(dtype)[..., None].unbind(dim=-2)  # [..., groups, out, 1]
        return torch.addcmul(low, levels, step).transpose(-3, -2).flatten(-2)[..., :width]


class QuantizedExperts:
    """All experts of a target, quantized and resident."""

    def __init__(self, spec: StoreSpec, scheme: QuantizationScheme, transposed: bool) -> None:
        # transposed: the target stores matrices as [in, out]
        self._scheme = scheme
        self._transposed = transposed
        self._unquantized = spec.layout
        self._dtype: torch.dtype = getattr(torch, spec.layout.dtype)
        shapes: dict[str, tuple[int, ...]] = {}
        for field in spec.layout.fields:
            if len(field.shape) == 2:
                out, width = reversed(field.shape) if transposed else field.shape
                groups = -(-width // scheme.group)
                shapes[f"{field.name}.codes"] = (groups, out, scheme.group * scheme.bits // 8)
                shapes[f"{field.name}.scales"] = (groups, out, 2 * torch.bfloat16.itemsize)
            else:
                shapes[field.name] = (field.nbytes,)
        fingerprint = f"{spec.fingerprint}-int{scheme.bits}-{scheme.group}-by-group"
        self.spec = replace(spec, fingerprint=fingerprint, layout=BlobLayout.of(shapes, torch.uint8))
        self._blobs: list[Tensor] = []  # per layer [experts, blob bytes] uint8
        self._layers: list[dict[str, Tensor]] = []  # per layer, views of the blobs' fields: [experts, ...] uint8
        self._use_kernels = False
        self._activations: dict[int, str | None] = {}  # by layer; None: kernels cannot run its experts

    @property
    def nbytes(self) -> int:
        """Bytes of all quantized experts."""
        return self.spec.nbytes

    def filler(self, read: FillBlob) -> FillBlob:
        """Return a function that writes one expert's codes, given one that reads its weights."""
        blob = torch.zeros(self._unquantized.nbytes, dtype=torch.uint8)
        weights = self._unquantized.views(blob)

        def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
            read(key, weights)
            for name, weight in weights.items():
                if weight.ndim == 2:
                    codes, scales = self._scheme.quantize(weight.T if self._transposed else weight)
                    views[f"{name}.codes"].copy_(codes)
                    views[f"{name}.scales"].copy_(scales.contiguous().view(torch.uint8))
                else:
                    views[name].copy_(weight.contiguous().view(torch.uint8).view(-1))

        return fill

    def load(self, file: ExpertFile, device: torch.device) -> None:
        """Read all experts from the file to the device."""
        size = self.spec.layout.nbytes
        blobs = torch.empty(self.spec.count, size, dtype=torch.uint8, device=device)
        blob = torch.empty(size, dtype=torch.uint8)  # staging buffer in host memory for one expert
        view = memoryview(blob.numpy())  # type: ignore[arg-type]
        for ordinal, key in enumerate(self.spec.keys()):
            if read_into(file.fd, view, file.offset(key)) < size:
                raise OSError(
                    f"{file.path} ends before expert {key.expert} of layer {key.layer}; delete it to have it rebuilt"
                )
            file.check(key, view)
            blobs[ordinal].copy_(blob)
        self._blobs = list(blobs.split(self.spec.experts))
        self._layers = [
            {f.name: layer[:, f.offset : f.offset + f.nbytes].unflatten(1, f.shape) for f in self.spec.layout.fields}
            for layer in self._blobs
        ]
        self._use_kernels = kernels_run_on(device)

    def tensors(self, layer: int, expert: int | Tensor) -> Mapping[str, Tensor]:
        """Dequantize the weights of one expert, or of several with a leading dimension."""  # expert: id, or [n] ids
        quantized, tensors = self._layers[layer], {}
        for field in self._unquantized.fields:
            if len(field.shape) == 2:
                width = field.shape[0] if self._transposed else field.shape[1]
                scales = quantized[f"{field.name}.scales"][expert].view(torch.bfloat16)
                matrix = self._scheme.dequantize(quantized[f"{field.name}.codes"][expert], scales, width, self._dtype)
                tensors[field.name] = matrix.mT if self._transposed else matrix
            else:
                tensors[field.name] = quantized[field.name][expert].view(self._dtype)
        return tensors

    def run(self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the weighted sum of each row's routed experts."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        if self._use_kernels and len(hidden) <= _MAX_KERNEL_ROWS and (activation := self._activation(layer, experts)):
            from spmoe.backends.kernels.quantized import run_quantized_experts

            blobs = self._blobs[layer].view(torch.int32)  # [experts, blob words]
            return run_quantized_experts(hidden, index, weights, blobs, self.kernel_layout(), activation)
        if self._use_kernels and index.numel() <= _MAX_DEQUANTIZED_PAIRS:
            return self._run_dequantized(layer, experts, hidden, index, weights)
        return CpuBackend().run_experts(experts, hidden, index, weights, self._batches(layer, index))

    def kernel_layout(self) -> QuantizedLayout:
        """Return where kernels find an expert's codes; requires experts with exactly the tensors `_KERNEL_FIELDS`."""
        from spmoe.backends.kernels.quantized import QuantizedLayout, QuantizedMatrix

        offsets = {field.name: field.offset // 4 for field in self.spec.layout.fields}  # in 32-bit words
        shapes = {field.name: field.shape for field in self._unquantized.fields}
        gate_up, down = (
            QuantizedMatrix(shapes[name][1], shapes[name][0], offsets[f"{name}.codes"], offsets[f"{name}.scales"])
            for name in _KERNEL_FIELDS
        )
        return QuantizedLayout(self._scheme.bits, self._scheme.group, gate_up, down)

    def _activation(self, layer: int, experts: nn.Module) -> str | None:
        """Return the kernels' name of the layer's activation, or None if kernels cannot run these experts."""
        if layer not in self._activations:
            supported = {field.name for field in self._unquantized.fields} == set(_KERNEL_FIELDS)
            self._activations[layer] = gated_activation(experts) if supported else None
        return self._activations[layer]

    def _run_dequantized(
        self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Compute `run` without a host synchronization: dequantize one expert per pair, and use batched products."""
        x = hidden.repeat_interleave(index.shape[1], dim=0)  # [rows * top_k, hidden]
        out = _run_one_expert_per_row(experts, self.tensors(layer, index.flatten()), x)
        return (out.view(*index.shape, -1) * weights[..., None]).sum(dim=1).to(hidden.dtype)

    def _batches(self, layer: int, index: Tensor) -> Iterator[ExpertBatch]:
        for expert in torch.unique(index).tolist():  # one per batch: only one expert is dequantized at a time
            yield ExpertBatch(layer, (expert,), (), (self.tensors(layer, expert),))


def _run_one_expert_per_row(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Apply the i-th expert of `tensors` to the i-th row."""  # x: [n, hidden] -> [n, hidden]

    def project(name: str, x: Tensor) -> Tensor:
        weight = tensors[name].mT if experts.is_transposed else tensors[name]  # [n, out, in]
        product = torch.bmm(weight, x[..., None])[..., 0]
        return product + tensors[f"{name}_bias"] if experts.has_bias else product

    gated = experts.has_gate
    inner = experts._apply_gate(project("gate_up_proj", x)) if gated else experts.act_fn(project("up_proj", x))
    return project("down_proj", inner)


def kernels_run_on(device: torch.device) -> bool:
    """Return whether the kernels for quantized experts run on the device."""
    return device.type == "cuda"
