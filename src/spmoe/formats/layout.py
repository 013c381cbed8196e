"""The arrangement of one expert's tensors in its blob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes; start of blobs in a file
_FIELD_ALIGNMENT = 256  # bytes; start of tensors in a blob


class Part(NamedTuple):
    """Dtype and shape of one tensor of a packed matrix."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class BlobField:
    """Name, dtype, shape and position in the blob of one tensor."""

    name: str
    dtype: str  # a torch dtype's name
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the blob
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return torch_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Arrangement of an expert's tensors in its blob, and the format that they are in."""

    format: str  # of the weights, such as int4-g128
    version: int  # of the format
    dtype: str  # a torch dtype's name; of the weights after `dequantize`
    widest: int  # largest dimension of a tensor after `dequantize`
    fields: tuple[BlobField, ...]
    nbytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Self:
        """Arrange tensors of one dtype and these shapes one after the other."""
        name = dtype_name(dtype)
        widest = max(max(shape) for shape in shapes.values())
        return cls.arrange({key: Part(dtype, tuple(shape)) for key, shape in shapes.items()}, name, 1, name, widest)

    @classmethod
    def arrange(cls, parts: Mapping[str, Part], format: str, version: int, dtype: str, widest: int) -> Self:
        """Arrange tensors one after the other, each aligned to 256 bytes."""
        fields, offset = [], 0
        for name, part in parts.items():
            fields.append(BlobField(name, dtype_name(part.dtype), part.shape, offset, part.nbytes))
            offset = round_up(offset + part.nbytes, _FIELD_ALIGNMENT)
        return cls(format, version, dtype, widest, tuple(fields), round_up(offset, ALIGNMENT))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Parse the result of `asdict`."""
        fields = tuple(
            BlobField(f["name"], f["dtype"], tuple(f["shape"]), f["offset"], f["nbytes"]) for f in data["fields"]
        )
        return cls(data["format"], data["version"], data["dtype"], data["widest"], fields, data["nbytes"])

    def views(self, blob: Tensor) -> dict[str, Tensor]:
        """Return the expert's tensors as views of its blob."""  # blob: [nbytes] uint8
        return {f.name: blob[f.offset : f.offset + f.nbytes].view(f.torch_dtype).view(f.shape) for f in self.fields}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; raise ValueError if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name}")
    return found


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below the number."""
    return -(-number // multiple) * multiple
