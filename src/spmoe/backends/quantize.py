"""Experts as small integers, group by group, and all of them resident. For drafting, where an error only costs speed.

A weight matrix is cut along its input dimension into groups, each of which is spread evenly over all the levels there
are. Codes and scales lie group by group, outputs side by side, as a kernel reads them. The file that keeps them is an
expert file like any other, with codes and scales for tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    from spmoe.backends.kernels.quantized import CodedGeometry

_PLAIN = ("gate_up_proj", "down_proj")
_FEW = 16  # rows up to which kernels are used
_TOGETHER = 32  # choices up to which a device makes all chosen experts' weights at once
_ROUNDING = 2.0**-8  # twice what becoming a bfloat16 changes at most


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights become codes, and codes weights."""

    bits: int  # 8 or 4
    group: int = 32  # weights that share a scale

    @classmethod
    def named(cls, name: str) -> Scheme:
        """The one of `int8` or `int4`."""
        return cls(int(name.removeprefix("int")))

    @property
    def largest(self) -> int:
        """The largest code; the smallest is zero."""
        return (1 << self.bits) - 1

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of a matrix, packed, and each group's step and lowest value.

        A group of one output is `group * bits / 32` words of four bytes. Their first codes come first: code
        i * words + w of the group is the i-th, from the lowest bits, of word w.
        """
        # weight: [out, in] -> [groups, out, group * bits / 8] uint8, [groups, out, 2] bfloat16
        out, width = weight.shape
        groups = pad(weight.float(), (0, -width % self.group)).view(out, -1, self.group).transpose(0, 1)
        low = groups.amin(dim=-1)
        low = (low - low.abs() * _ROUNDING).bfloat16().float()  # rounded outwards, so that nothing is cut off
        step = ((groups.amax(dim=-1) - low) / self.largest * (1 + _ROUNDING)).bfloat16().float()
        codes = ((groups - low[..., None]) / step.clamp_min(1e-38)[..., None]).round().clamp_(0, self.largest)
        codes = codes.to(torch.uint8).unflatten(-1, (4, 8 // self.bits, -1))  # [groups, out, byte, code of it, word]
        packed = codes[..., 0, :] | codes[..., 1, :] << 4 if self.bits == 4 else codes[..., 0, :]
        return packed.mT.flatten(-2), torch.stack((step, low), dim=-1).bfloat16()

    def dequantize(self, codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The matrix, or matrices, that codes and scales stand for."""  # -> [..., out, width]
        packed = codes.unflatten(-1, (-1, 4)).mT  # [..., groups, out, byte, word]
        if self.bits == 4:
            packed = torch.stack((packed & 15, packed >> 4), dim=-2)
        levels = packed.flatten(scales.ndim - 1).to(dtype)  # [..., groups, out, group]
        step, low = scales.to(dtype)[..., None].unbind(dim=-2)  # [..., groups, out, 1]
        return torch.addcmul(low, levels, step).transpose(-3, -2).flatten(-2)[..., :width]


class QuantizedExperts:
    """Every expert of a target, quantized and resident."""

    def __init__(self, spec: StoreSpec, scheme: Scheme, transposed: bool) -> None:
        # transposed: whether the target keeps matrices as [in, out]
        self._scheme = scheme
        self._transposed = transposed
        self._plain = spec.layout
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
        self.spec = StoreSpec(fingerprint, BlobLayout.of(shapes, torch.uint8), spec.experts)
        self._blobs: list[Tensor] = []  # of each layer: [experts, blob bytes] uint8
        self._layers: list[dict[str, Tensor]] = []  # of all experts of each: [experts, ...] uint8
        self._kernels = False  # whether they run where the codes are
        self._activations: dict[int, str | None] = {}  # by layer; None: kernels do not know such experts

    @property
    def nbytes(self) -> int:
        """What they occupy."""
        return self.spec.nbytes

    def filler(self, read: FillBlob) -> FillBlob:
        """A function that writes one expert's codes, given one that reads its weights."""
        blob = torch.zeros(self._plain.nbytes, dtype=torch.uint8)
        weights = self._plain.views(blob)

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
        """Read all of them."""
        size = self.spec.layout.nbytes
        blobs = torch.empty(self.spec.count, size, dtype=torch.uint8, device=device)
        blob = torch.empty(size, dtype=torch.uint8)  # one at a time through the host's memory
        view = memoryview(blob.numpy())  # type: ignore[arg-type]
        for place, key in enumerate(self.spec.keys()):
            if read_into(file.fd, view, file.offset(key)) < size:
                raise OSError(f"{file.path} ends early")
            file.check(key, view)
            blobs[place].copy_(blob)
        self._blobs = list(blobs.split(self.spec.experts))
        self._layers = [
            {f.name: some[:, f.offset : f.offset + f.nbytes].unflatten(1, f.shape) for f in self.spec.layout.fields}
            for some in self._blobs
        ]
        self._kernels = kernels_run_on(device)

    def tensors(self, layer: int, expert: int | Tensor) -> Mapping[str, Tensor]:
        """Weights of one expert, or of several together, as close as codes come to them."""
        # expert: a number, or [n], which comes before a tensor's own dimensions
        found, tensors = self._layers[layer], {}
        for field in self._plain.fields:
            if len(field.shape) == 2:
                width = field.shape[0] if self._transposed else field.shape[1]
                scales = found[f"{field.name}.scales"][expert].view(torch.bfloat16)
                matrix = self._scheme.dequantize(found[f"{field.name}.codes"][expert], scales, width, self._dtype)
                tensors[field.name] = matrix.mT if self._transposed else matrix
            else:
                tensors[field.name] = found[field.name][expert].view(self._dtype)
        return tensors

    def run(self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each row's experts."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        if self._kernels and (activation := self._activation(layer, experts)) is not None and len(hidden) <= _FEW:
            from spmoe.backends.kernels.quantized import run_coded

            blobs = self._blobs[layer].view(torch.int32)  # [experts, blob words]
            return run_coded(hidden, index, weights, blobs, self.geometry(), activation)
        if self._kernels and index.numel() <= _TOGETHER:
            return self._run_at_once(layer, experts, hidden, index, weights)
        return CpuBackend().run_experts(experts, hidden, index, weights, self._batches(layer, index))

    def geometry(self) -> CodedGeometry:
        """Where kernels find an expert's codes, if it is a gate and two products."""
        from spmoe.backends.kernels.quantized import CodedGeometry, Codes

        fields = {field.name: field.offset // 4 for field in self.spec.layout.fields}
        plain = {field.name: field.shape for field in self._plain.fields}
        gate_up, down = (
            Codes(plain[name][1], plain[name][0], fields[f"{name}.codes"], fields[f"{name}.scales"]) for name in _PLAIN
        )
        return CodedGeometry(self._scheme.bits, self._scheme.group, gate_up, down)

    def _activation(self, layer: int, experts: nn.Module) -> str | None:
        if layer not in self._activations:
            known = {field.name for field in self._plain.fields} == set(_PLAIN)
            self._activations[layer] = gated_activation(experts) if known else None
        return self._activations[layer]

    def _run_at_once(self, layer: int, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The same, but the host need not know the choice, nor wait for it."""
        x = hidden.repeat_interleave(index.shape[1], dim=0)  # [rows * top_k, hidden]
        out = _run_together(experts, self.tensors(layer, index.flatten()), x)
        return (out.view(*index.shape, -1) * weights[..., None]).sum(dim=1).to(hidden.dtype)

    def _batches(self, layer: int, index: Tensor) -> Iterator[ExpertBatch]:
        for expert in torch.unique(index).tolist():  # one at a time, so that weights of one exist at a time
            yield ExpertBatch(layer, (expert,), (), (self.tensors(layer, expert),))


def _run_together(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What `run_expert` does, each row by an expert of its own."""  # x: [n, hidden] -> [n, hidden]

    def project(name: str, x: Tensor) -> Tensor:
        weight = tensors[name].mT if experts.is_transposed else tensors[name]  # [n, out, in]
        product = torch.bmm(weight, x[..., None])[..., 0]
        return product + tensors[f"{name}_bias"] if experts.has_bias else product

    gated = experts.has_gate
    inner = experts._apply_gate(project("gate_up_proj", x)) if gated else experts.act_fn(project("up_proj", x))
    return project("down_proj", inner)


def kernels_run_on(device: torch.device) -> bool:
    """Whether the grouped kernels do."""
    return device.type == "cuda"
