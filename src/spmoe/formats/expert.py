"""The format of a whole expert: its projections in a weight format, its biases in the run's dtype.

An experts module of transformers holds `gate_up_proj` (or `up_proj`) and `down_proj`, some families transposed, and
some with biases. A dense expert is stored as its module holds it. A packed one has a field per part, such as
`gate_up_proj.codes`, and always describes W[out, in].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from spmoe.formats.base import KernelWeights, Parts, WeightFormat
from spmoe.formats.dense import Dense
from spmoe.formats.layout import BlobLayout, Part, dtype_name

WHOLE = "whole"  # the only field of a blob in a model whose layers have experts of several sizes

Shapes = Mapping[str, tuple[int, ...]]  # of one expert's tensors as its module holds them; two dimensions: a projection


@dataclass(frozen=True)
class KernelMatrix:
    """One projection in a blob, for kernels."""

    outs: int
    ins: int
    offsets: tuple[tuple[str, int], ...]  # of each part, in bytes from the start of the blob
    bias_offset: int | None  # in bytes; None: no bias

    def offset(self, part: str) -> int:
        """Return the position of a part in bytes."""
        return dict(self.offsets)[part]


@dataclass(frozen=True)
class KernelParams:
    """Everything that a kernel needs to read an expert from its slot."""

    weights: KernelWeights
    dtype: str  # that weights are rounded to before the product, and that of biases
    matrices: tuple[tuple[str, KernelMatrix], ...]  # by name, such as gate_up_proj
    transposed: bool = False  # dense matrices are [in, out]; others always are [out, in]

    def matrix(self, name: str) -> KernelMatrix:
        """Return the projection of this name."""
        return dict(self.matrices)[name]


@dataclass(frozen=True)
class ExpertFormat:
    """How the experts of a model are stored. Blobs are the same on every device."""

    weight: WeightFormat
    dtype: torch.dtype  # that the model runs in: of biases, and of weights after `dequantize`
    transposed: bool = False  # the experts module holds matrices as [in, out]
    convert_on: torch.device | None = field(default=None, compare=False)  # None: where the given tensors are

    @property
    def name(self) -> str:
        """Name of the weight format."""
        return self.weight.name

    @property
    def is_dense(self) -> bool:
        """Whether blobs hold the module's own tensors, in any floating dtype."""
        return isinstance(self.weight, Dense)

    @property
    def is_packed(self) -> bool:
        """Whether weights must be dequantized before they can be used as the module's own."""
        return self.weight != Dense(self.dtype)

    def layout(self, shapes: Shapes) -> BlobLayout:
        """Arrange the blob of an expert whose module holds tensors of these shapes."""
        return _layout(self, tuple((name, tuple(shape)) for name, shape in shapes.items()))

    def shared_layout(self, layers: Sequence[Shapes]) -> BlobLayout:
        """Arrange blobs that can hold an expert of any layer; `views` finds its tensors in them."""
        if all(shapes == layers[0] for shapes in layers):
            return self.layout(layers[0])
        layouts = [self.layout(shapes) for shapes in layers]
        widest, nbytes = (max(getattr(layout, name) for layout in layouts) for name in ("widest", "nbytes"))
        dtype = self.dtype if self.is_dense else torch.uint8
        whole = Part(dtype, (-(-nbytes // (widest * dtype.itemsize)), widest))
        return BlobLayout.arrange({WHOLE: whole}, self.name, self.weight.version, dtype_name(self.dtype), widest)

    def views(self, tensors: Mapping[str, Tensor], shapes: Shapes) -> Mapping[str, Tensor]:
        """Return the fields of an expert's own layout, given the views of a blob of `shared_layout`."""
        return self.layout(shapes).views(tensors[WHOLE].view(-1).view(torch.uint8)) if WHOLE in tensors else tensors

    def write(self, tensors: Mapping[str, Tensor | Mapping[str, Tensor]], views: Mapping[str, Tensor]) -> None:
        """Write an expert's tensors into the fields of its blob.

        `tensors`: the parts of each projection, as W[out, in], and biases. Raise ValueError if they do not fit.
        """
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                views[name].copy_(tensor)
            elif self.is_dense:
                views[name].copy_(tensor["weight"].T if self.transposed else tensor["weight"])
            else:
                for part, value in tensor.items():
                    view = views[f"{name}.{part}"]
                    if (value.shape, value.dtype) != (view.shape, view.dtype):
                        raise ValueError(
                            f"{name}.{part} is {dtype_name(value.dtype)} {list(value.shape)}, and its blob has place "
                            f"for {dtype_name(view.dtype)} {list(view.shape)}"
                        )
                    view.copy_(value)

    def convert(self, dense: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
        """Write dense tensors, as the module holds them, into the fields of a blob, quantizing them if necessary.

        They are rounded to the run's dtype first, so that the result is the conversion of the dense model that runs.
        """
        rounded = {name: tensor.to(self.dtype) for name, tensor in dense.items()}
        if self.is_dense:
            for name, tensor in rounded.items():
                views[name].copy_(tensor)
            return
        try:
            self.write({name: self._quantize(tensor, self.convert_on) for name, tensor in rounded.items()}, views)
        except torch.OutOfMemoryError:  # the device is nearly full
            self.write({name: self._quantize(tensor, None) for name, tensor in rounded.items()}, views)

    def round_trip(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that `dequantize` gives for `convert` of these: the weights that the model runs with."""
        layout = self.layout({name: tuple(tensor.shape) for name, tensor in dense.items()})
        device = next(iter(dense.values())).device
        views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8, device=device))
        self.convert(dense, views)
        return self.dequantize(views)

    def parts(self, views: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """Return the parts of one projection, as W[out, in]."""
        if self.is_dense:
            return {"weight": views[name].T if self.transposed else views[name]}
        prefix = f"{name}."
        return {key.removeprefix(prefix): view for key, view in views.items() if key.startswith(prefix)}

    def dequantize(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that the experts module would hold, in the run's dtype, given the fields of a blob."""
        tensors = {}
        for name in dict.fromkeys(key.partition(".")[0] for key in views):
            if name in views and (self.is_dense or views[name].ndim == 1):
                tensors[name] = views[name].to(self.dtype)
            else:
                parts = self.parts(views, name)
                by_rows = next(iter(parts.values())).is_cpu
                dequantize = self.weight.dequantize_by_rows if by_rows else self.weight.dequantize
                weight = dequantize(parts, self.dtype)
                tensors[name] = weight.T if self.transposed else weight
        return tensors

    def repacked_parts(self, shapes: Shapes) -> dict[str, dict[str, Part] | None]:
        """Return the parts of each projection after `WeightFormat.repack`; None: the format has no such operator."""
        return {
            name: self.weight.repacked_parts(*self._sides(shape), self.dtype)
            for name, shape in shapes.items()
            if len(shape) == 2
        }

    def check(self, views: Mapping[str, Tensor], shapes: Shapes) -> None:
        """Raise ValueError, with a sentence, if a blob's fields cannot be an expert of these shapes."""
        for name, shape in shapes.items():
            if len(shape) == 2:
                self.weight.check(self.parts(views, name), *self._sides(shape))

    def lossless_from(self, stored: torch.dtype) -> bool:
        """Return whether weights that a checkpoint has in the dtype `stored` are those of the dense model that runs."""
        # the dense model has them in the run's dtype, or in a narrower one that the run's dtype holds exactly
        exact = stored if torch.promote_types(stored, self.dtype) == self.dtype else self.dtype
        if isinstance(self.weight, Dense):
            return torch.promote_types(exact, self.weight.dtype) == self.weight.dtype
        return self.weight.lossless and exact == torch.bfloat16

    def kernel(self, shapes: Shapes) -> KernelParams:
        """Return where kernels find the parts of an expert of these shapes."""
        offsets = {field.name: field.offset for field in self.layout(shapes).fields}
        matrices = {}
        for name, shape in shapes.items():
            if len(shape) == 2:
                outs, ins = self._sides(shape)
                found = {"weight": name} if self.is_dense else {p: f"{name}.{p}" for p in self.weight.parts(outs, ins)}
                places = tuple((part, offsets[field]) for part, field in found.items())
                matrices[name] = KernelMatrix(outs, ins, places, offsets.get(f"{name}_bias"))
        transposed = self.is_dense and self.transposed
        return KernelParams(self.weight.kernel, dtype_name(self.dtype), tuple(matrices.items()), transposed)

    def _quantize(self, tensor: Tensor, device: torch.device | None) -> Tensor | Parts:
        """Return the parts of a matrix of the module, computed on a device; a bias is returned as it is."""
        if tensor.ndim != 2:
            return tensor
        weight = tensor.T if self.transposed else tensor
        return self.weight.quantize_by_rows(weight.to(device or weight.device))

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return outputs and inputs of a matrix of this shape in the module."""
        rows, columns = shape
        return (columns, rows) if self.transposed else (rows, columns)


@cache
def _layout(format: ExpertFormat, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> BlobLayout:
    fields: dict[str, Part] = {}
    for name, shape in shapes:
        if len(shape) != 2:
            fields[name] = Part(format.dtype, shape)
        elif isinstance(format.weight, Dense):
            fields[name] = Part(format.weight.dtype, shape)
        else:
            parts = format.weight.parts(*format._sides(shape))
            fields |= {f"{name}.{part}": found for part, found in parts.items()}
    widest = max(max(shape) for _, shape in shapes)
    return BlobLayout.arrange(fields, format.name, format.weight.version, dtype_name(format.dtype), widest)
