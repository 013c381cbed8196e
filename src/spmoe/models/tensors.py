"""Tensors of a checkpoint: read one at a time by name, and dequantized if they are stored in 8 bits with scales.

Files are read, never mapped: where a mapped file is truncated meanwhile, the system ends the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spmoe.errors import CheckpointError, reason
from spmoe.files import read_into
from spmoe.models.checkpoint import DEFAULT_BLOCK, Checkpoint
from spmoe.system.headers import StoredTensor, read_header

_DTYPES = {  # by name in a header
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # appended to a weight's name; despite `_inv`, both are multiplied


class CheckpointTensors:
    """Reads a checkpoint's tensors by name. Its files stay open until the context ends."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, _WeightFile] = {}
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
        tensor = self._checkpoint.tensors[name]
        path = self._checkpoint.files[name]
        try:
            with self._lock:
                if tensor.file not in self._open:
                    self._open[tensor.file] = _WeightFile(self._checkpoint, tensor.file)
                file = self._open[tensor.file]
            return file.read(tensor, expert)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{name} cannot be read from {path} ({getattr(error, 'strerror', None) or reason(error)}); download it "
                "again, and let nothing write to it while it is read"
            ) from error

    def _dequantize(self, name: str, weight: Tensor, scale: Tensor) -> Tensor:
        quantization = self._checkpoint.quantization
        dense = dequantize(weight, scale, quantization.block if quantization is not None else DEFAULT_BLOCK)
        if dense is None:
            raise CheckpointError(
                f"{name} of {self._checkpoint.name} has shape {list(weight.shape)} but its scale {list(scale.shape)}: "
                "expected one scale per tensor, per output or per block; use the config that belongs to the weights"
            )
        return dense


class _WeightFile:
    """An open safetensors file. It closes with its last reference."""

    def __init__(self, checkpoint: Checkpoint, file: str) -> None:
        """Open a file of a checkpoint; raise ValueError if its header has changed since the checkpoint was found."""
        found = read_header(checkpoint.directory, file)
        known = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.file == file}
        if any(_place(tensor) != _place(found.get(name)) for name, tensor in known.items()):
            raise ValueError("it was replaced by another file meanwhile")
        self._fd = os.open(checkpoint.directory / file, os.O_RDONLY)

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            os.close(fd)

    def read(self, stored: StoredTensor, expert: int | None) -> Tensor:
        """Read a tensor, or the slice [1, ...] of one expert."""
        if stored.dtype not in _DTYPES:
            raise ValueError(f"spmoe cannot read the type {stored.dtype}")
        shape, offset, nbytes = stored.shape, stored.offset, stored.nbytes
        if expert is not None:
            if not shape or expert >= shape[0]:
                raise ValueError(f"its shape {list(shape)} has no expert {expert}")
            nbytes //= shape[0]
            shape, offset = (1, *shape[1:]), offset + expert * nbytes
        content = torch.empty(nbytes, dtype=torch.uint8)
        if missing := nbytes - read_into(self._fd, memoryview(content.numpy()), offset):  # type: ignore[arg-type]
            raise ValueError(f"the file ends {missing} bytes early, so it was truncated meanwhile")
        return content.view(_DTYPES[stored.dtype]).view(shape)


def _place(tensor: StoredTensor | None) -> object:
    return tensor and (tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes)


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
