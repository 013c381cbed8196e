"""Tensors of a checkpoint: read one at a time by name; a quantized one as a dense tensor, or as parts of its format.

Files are read, never mapped: where a mapped file is truncated meanwhile, the system ends the process.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from spmoe.errors import CheckpointError, reason
from spmoe.files import read_into
from spmoe.formats.base import Parts
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.quantized_matrices import QuantizedMatrix, is_auxiliary
from spmoe.system.headers import StoredTensor, read_header

T = TypeVar("T")

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


class CheckpointTensors:
    """Reads a checkpoint's tensors by name. Its files stay open until the context ends.

    A quantized matrix has the name of the dense tensor that it stands for.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._matrices = checkpoint.matrices
        self._open: dict[str, _WeightFile] = {}
        self._lock = threading.Lock()  # transformers' loader reads from several threads
        names: dict[str, None] = dict.fromkeys(checkpoint.tensors)
        if self._matrices:
            stored = {source for matrix in self._matrices.values() for source in matrix.sources.values()}
            plain = [name for name in names if name not in stored and not is_auxiliary(name)]
            names = dict.fromkeys([*plain, *self._matrices])
        self.names = list(names)

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()  # a file closes with its last reference; after an error a loader thread may still read it

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Read a dense tensor, or one expert's slice [1, ...] of a tensor that holds all experts.

        Quantized matrices are dequantized, in float32.
        """
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._read_stored(name, expert)
        experts = [None] if matrix.experts is None else range(matrix.experts) if expert is None else [expert]
        dense = [self._decode(matrix, one, matrix.dense) for one in experts]
        tensors = [one.T if matrix.transposed else one for one in dense]
        return tensors[0] if matrix.experts is None else torch.stack(tensors)

    def read_parts(self, name: str, expert: int | None = None) -> Parts:
        """Read the parts of a quantized matrix, or those of one expert, in the format of the matrix."""
        matrix = self._matrices[name]
        return self._decode(matrix, expert, matrix.parts)

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros beside a quantized matrix; some tools add it to every layer."""
        beside = f"{name.removesuffix('bias')}weight" in self._matrices
        return beside and name.endswith(".bias") and not bool(self._read_stored(name, None).any())

    def lazy(self) -> Mapping[str, LazyTensor]:
        """Return every tensor by name, to be read on first access."""
        return {name: LazyTensor(self, name) for name in self.names}

    def _decode(self, matrix: QuantizedMatrix, expert: int | None, decode: Callable[[Mapping[str, Tensor]], T]) -> T:
        raw = {role: self._read_stored(source, expert) for role, source in matrix.sources.items()}
        try:
            return decode(raw if expert is None else {role: tensor[0] for role, tensor in raw.items()})
        except ValueError as error:
            raise CheckpointError(
                f"the quantization of {self._checkpoint.name} is contradictory: {error}; download it again, or use "
                "another upload"
            ) from error

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


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; extremes are found forty times faster than every value is compared."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize < 2:  # of which PyTorch finds no extremes
        return bool(torch.isfinite(tensor).all())
    low, high = torch.aminmax(tensor)  # both are NaN if one value is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def require_finite(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a floating-point tensor holds infinities or NaN."""
    if not is_finite(tensor):
        raise CheckpointError(
            f"{name} of {checkpoint.name} holds values that are not finite in {str(tensor.dtype)[6:]}; the checkpoint "
            "is damaged, or needs --dtype bfloat16 or float32"
        )


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts expert 2 before expert 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
