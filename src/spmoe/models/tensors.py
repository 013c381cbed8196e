"""Tensors of a checkpoint: read one at a time by name, and dequantized if they are stored in 8 bits with scales."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spmoe.errors import CheckpointError, panics_as_errors, reason
from spmoe.models.checkpoint import DEFAULT_BLOCK, Checkpoint

_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # appended to a weight's name; despite `_inv`, both are multiplied


class CheckpointTensors:
    """Reads a checkpoint's tensors by name. Its files stay open until the context ends."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[Path, Any] = {}
        self._lock = threading.Lock()  # transformers' loader reads from several threads
        files = checkpoint.files
        self._scales: dict[str, str] = {}
        if checkpoint.quantization is not None and checkpoint.quantization.method != "mxfp4":
            self._scales = {n: n + suffix for n in files for suffix in _SCALE_SUFFIXES if n + suffix in files}
        activation_scales = {f"{name.rpartition('.')[0]}.input_scale" for name in self._scales}
        self.names = [n for n in files if n not in activation_scales and n not in self._scales.values()]

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()  # a file closes with its last reference; after an error a loader thread may still read it

    @property
    def quantized(self) -> bool:
        """Whether some tensors are dequantized when they are read."""
        return bool(self._scales)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Read a tensor, or one expert's slice [1, ...] of a tensor that holds all experts."""
        tensor, scale = self._read_stored(name, expert), self._scales.get(name)
        if not self.quantized or tensor.dtype.itemsize > 1:
            return tensor
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{name} of {self._checkpoint.name} is stored as {str(tensor.dtype)[6:]}, which spmoe cannot "
                "dequantize; use the 16-bit checkpoint"
            )
        if scale is None:
            raise CheckpointError(f"{self._checkpoint.name} lacks the scale of {name}; download it again")
        return self._dequantize(name, tensor, self._read_stored(scale, expert))

    def lazy(self) -> Mapping[str, LazyTensor]:
        """Return every tensor by name, to be read on first access."""
        return {name: LazyTensor(self, name) for name in self.names}

    def _read_stored(self, name: str, expert: int | None) -> Tensor:
        path = self._checkpoint.files[name]
        try:
            with panics_as_errors():
                with self._lock:
                    file: Any = self._open.get(path) or safe_open(path, framework="pt")
                    self._open[path] = file
                tensor: Tensor = file.get_tensor(name) if expert is None else file.get_slice(name)[expert : expert + 1]
                return tensor
        except (SafetensorError, OSError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{name} cannot be read from {path} ({reason(error)}); download it again") from error

    def _dequantize(self, name: str, weight: Tensor, scale: Tensor) -> Tensor:
        quantization = self._checkpoint.quantization
        dense = dequantize(weight, scale, quantization.block if quantization is not None else DEFAULT_BLOCK)
        if dense is None:
            raise CheckpointError(
                f"{name} of {self._checkpoint.name} has shape {list(weight.shape)} but its scale {list(scale.shape)}: "
                "expected one scale per tensor, per output or per block; use the config that belongs to the weights"
            )
        return dense


class LazyTensor:
    """Stands in for a safetensors slice in transformers' loader: indexing reads the tensor."""

    def __init__(self, tensors: CheckpointTensors, name: str) -> None:
        self._tensors = tensors
        self._name = name

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensors.read(self._name)[index]


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor | None:
    """Multiply 8-bit weights by one scale per tensor, output or block, in float32; None if the shapes do not match."""
    # weight: [..., out, in], scale: [], [1], [out], [out, 1] or [..., blocks, blocks] -> [..., out, in] float32
    weight, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return weight * scale.reshape(())
    if scale.ndim == weight.ndim - 1 and scale.shape[-1] == weight.shape[-2]:
        scale = scale[..., None]
    if scale.ndim != weight.ndim or weight.ndim < 2 or scale.shape[:-2] != weight.shape[:-2]:
        return None
    for dim, size in zip((-2, -1), block, strict=True):
        count = weight.shape[dim]
        if scale.shape[dim] not in (1, count):
            if scale.shape[dim] != -(-count // size):
                return None
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, count)
    return weight * scale
