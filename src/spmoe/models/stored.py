"""Weights as they are stored: read one at a time and, where that is in eight bits with scales, expanded on the way."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spmoe.errors import CheckpointError, reason
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.quantization import USUAL_BLOCK

_SCALES = ("_scale_inv", "_scale")  # what is added to a weight's name; both are multiplied with


class StoredTensors:
    """A checkpoint's tensors, by name. Files stay open until it is closed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[Path, Any] = {}
        self._lock = threading.Lock()  # loaders read on several threads
        files = checkpoint.files
        self._scales: dict[str, str] = {}
        if checkpoint.quantization is not None and checkpoint.quantization.method != "mxfp4":
            self._scales = {n: n + end for n in files for end in _SCALES if n + end in files}
        activations = {f"{name.rpartition('.')[0]}.input_scale" for name in self._scales}
        self.names = [n for n in files if n not in activations and n not in self._scales.values()]

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()  # a file is closed when nobody reads it, which after an error some thread may still do

    @property
    def expands(self) -> bool:
        """Whether what is read is not always what is stored."""
        return bool(self._scales)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A tensor or, of one that holds all experts, a slice [1, ...] of it."""
        tensor, scale = self._stored(name, expert), self._scales.get(name)
        if not self.expands or tensor.dtype.itemsize > 1:
            return tensor
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{name} of {self._checkpoint.name} is stored as {str(tensor.dtype)[6:]}, which spmoe cannot expand; "
                "use the 16-bit checkpoint"
            )
        if scale is None:
            raise CheckpointError(f"{self._checkpoint.name} lacks the scale of {name}; download it again")
        return self._expanded(name, tensor, self._stored(scale, expert))

    def lazily(self) -> Mapping[str, LazyTensor]:
        """All of them, to be read when they are asked for."""
        return {name: LazyTensor(self, name) for name in self.names}

    def _stored(self, name: str, expert: int | None) -> Tensor:
        path = self._checkpoint.files[name]
        try:
            with self._lock:
                file: Any = self._open.get(path) or safe_open(path, framework="pt")
                self._open[path] = file
            tensor: Tensor = file.get_tensor(name) if expert is None else file.get_slice(name)[expert : expert + 1]
            return tensor
        except (SafetensorError, OSError, IndexError) as error:
            raise CheckpointError(f"{name} cannot be read from {path} ({reason(error)}); download it again") from error

    def _expanded(self, name: str, weight: Tensor, scale: Tensor) -> Tensor:
        quantization = self._checkpoint.quantization
        found = expand(weight, scale, quantization.block if quantization is not None else USUAL_BLOCK)
        if found is None:
            raise CheckpointError(
                f"{name} of {self._checkpoint.name} is {list(weight.shape)} but its scale {list(scale.shape)}, which "
                "is neither one number, one for each output, nor one for each block; use the config that belongs to it"
            )
        return found


class LazyTensor:
    """What a loader takes for a slice of a file: `[...]` reads it."""

    def __init__(self, tensors: StoredTensors, name: str) -> None:
        self._tensors = tensors
        self._name = name

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensors.read(self._name)[part]


def expand(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor | None:
    """Weights times their scale: one for all, one for each output or one for each block; None where none fits."""
    # weight: [..., out, in], scale: [], [1], [out], [out, 1] or [..., blocks, blocks] -> as weight, float32
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
