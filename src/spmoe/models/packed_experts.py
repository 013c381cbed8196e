"""Quantized experts that stay packed: the format that all of them have, and their parts in the module's order.

Gate and up are joined, and the outputs put into the order that transformers' conversion rules give. The order is found
by running the rules on matrices whose weights are the numbers of their outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from spmoe.errors import CheckpointError
from spmoe.formats.base import Parts, WeightFormat
from spmoe.formats.fp8 import Fp8
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_sources import ExpertSources, Source, StoredExpert
from spmoe.models.quantized_matrices import QuantizedMatrix
from spmoe.models.tensors import CheckpointTensors

_EXPANDED = "so experts are expanded to dense weights"


class PackedExperts:
    """Reads the parts of quantized projections. `format` is None, and `notice` says why, if they cannot stay packed."""

    def __init__(self, checkpoint: Checkpoint, model: Any, sources: ExpertSources) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._sources = sources
        self._orders: dict[str, Tensor | None] = {}  # outputs in the module's order, if it is not that of the sources
        self._known_orders: dict[tuple[Any, ...], list[int] | None] = {}
        self.format: WeightFormat | None = None
        self.notice: str | None = None
        matrices = checkpoint.matrices
        if any(name in matrices for name in sources.matrices()):
            self.format, self.notice = self._find_format()

    def read(self, tensors: CheckpointTensors, target: str, expert: int) -> Parts:
        """Read one expert's projection as W[out, in], in `format`."""
        parts = [self._read_matrix(tensors, *source.place(expert)) for source in self._sources.of(target)]
        joined: Parts = reduce(self.format.join, parts)  # type: ignore[union-attr]
        if (order := self._orders[target]) is not None:
            # one-byte floats cannot be indexed everywhere
            joined = {name: part.view(_bits(part.dtype))[order].view(part.dtype) for name, part in joined.items()}
        return joined

    def stored_parts(self, target: str, expert: int) -> dict[str, list[StoredExpert]] | None:
        """Return the stored tensors that make up each part of one expert's projection, one after the other.

        Each has the expert's index if it holds all experts. None: a part is computed, or outputs are reordered.
        """
        if self._orders[target] is not None:
            return None
        found: dict[str, list[StoredExpert]] = {}
        for source in self._sources.of(target):
            name, index = source.place(expert)
            matrix = self._checkpoint.matrices[name]
            roles = matrix.stored_parts() if matrix.format == self.format else None
            if roles is None:
                return None
            for part, role in roles.items():
                found.setdefault(part, []).append((matrix.sources[role], index))
        return found

    def _read_matrix(self, tensors: CheckpointTensors, name: str, expert: int | None) -> Parts:
        parts, stored = tensors.read_parts(name, expert), self._checkpoint.matrices[name].format
        if isinstance(stored, Fp8) and isinstance(self.format, Fp8) and stored != self.format:
            _, parts = stored.with_rows(parts, self.format.rows)
            parts = {**parts, "scale": parts["scale"].to(self.format.scale_dtype)}
        return parts

    def _find_format(self) -> tuple[WeightFormat | None, str | None]:
        """Return the weight format of all experts, or why there is none."""
        found: dict[WeightFormat | None, str] = {}
        for target, (_, *shape) in self._sources.shapes.items():
            if len(shape) != 2:
                continue
            sources = self._sources.of(target)
            matrices = [[self._checkpoint.matrices.get(name) for name in source.names] for source in sources]
            for source, ones in zip(sources, matrices, strict=True):
                for name, matrix in zip(source.names, ones, strict=True):
                    found.setdefault(None if matrix is None else matrix.format, name)
            if None in found:
                continue
            self._check_shapes(target, matrices)  # type: ignore[arg-type]
            order = self._order(target, [ones[0] for ones in matrices])  # type: ignore[misc]
            if order is None:
                return None, f"the outputs of {target} cannot be rearranged while they are packed, {_EXPANDED}"
            moved = order != sorted(order)
            self._orders[target] = torch.tensor(order) if moved else None
            first = matrices[0][0].format  # type: ignore[union-attr]
            if isinstance(first, Fp8) and (moved or len(sources) > 1):  # no block may span two matrices
                outs = [ones[0].outs for ones in matrices]  # type: ignore[union-attr]
                rows = 1 if moved else math.gcd(first.rows, *outs)
                found.setdefault(replace(first, rows=rows), sources[0].names[0])
        return _common_format(found, self._checkpoint.matrices)

    def _check_shapes(self, target: str, matrices: Sequence[Sequence[QuantizedMatrix]]) -> None:
        """Raise CheckpointError if a projection's matrices, by source and expert, have not the configured sizes."""
        count, *shape = self._sources.shapes[target]
        outs, ins = reversed(shape) if self._is_transposed(target) else shape
        name = self._checkpoint.name
        for experts in zip(*matrices, strict=False):  # sources have equally many, or all experts in one tensor
            total = sum(matrix.outs for matrix in experts)
            for matrix, first in zip(experts, (ones[0] for ones in matrices), strict=True):
                if (matrix.ins, total, matrix.outs) != (ins, outs, first.outs):
                    raise CheckpointError(
                        f"config.json and the weights of {name} disagree: an expert of {target} is "
                        f"{[total, matrix.ins]} in the file but {[outs, ins]} by the config; use the config that "
                        "belongs to the weights"
                    )
                if matrix.experts not in (None, count):
                    raise CheckpointError(
                        f"{name} has {matrix.experts} experts in {matrix.name} but config.json says {count}; the "
                        "checkpoint is incomplete or config.json does not belong to it: download it again"
                    )

    def _order(self, target: str, matrices: Sequence[QuantizedMatrix]) -> list[int] | None:
        """Return the outputs of joined matrices in the module's order; None if the rules do not only reorder them."""
        sources, transposed = self._sources.of(target), self._is_transposed(target)
        described = [(s.pattern, m.outs, m.transposed) for s, m in zip(sources, matrices, strict=True)]
        key = (target.rpartition(".")[2], transposed, *described)
        if key not in self._known_orders:
            self._known_orders[key] = self._find_order(target, sources, matrices, transposed)
        return self._known_orders[key]

    def _find_order(
        self, target: str, sources: Sequence[Source], matrices: Sequence[QuantizedMatrix], transposed: bool
    ) -> list[int] | None:
        """Apply the conversion rule to matrices with one input, whose weights are the numbers of their outputs."""
        numbers: dict[str | None, Tensor] = {}
        total = 0
        for source, matrix in zip(sources, matrices, strict=True):
            column = torch.arange(total, total + matrix.outs)[:, None]
            column = column.T if matrix.transposed else column
            numbers[source.pattern] = column[None] if source.fused else column
            total += matrix.outs
        try:
            result = self._sources.convert(target, numbers)
        except (ValueError, RuntimeError, LookupError, AttributeError):
            return None
        order: list[int] = result.flatten().tolist()
        expected = (1, 1, total) if transposed else (1, total, 1)
        return order if tuple(result.shape) == expected and sorted(order) == list(range(total)) else None

    def _is_transposed(self, target: str) -> bool:
        """Return whether the module of a parameter holds matrices as [in, out]."""
        return self._model.get_submodule(target.rpartition(".")[0]).is_transposed  # type: ignore[no-any-return]


def _common_format(
    found: Mapping[WeightFormat | None, str], matrices: Mapping[str, QuantizedMatrix]
) -> tuple[WeightFormat | None, str | None]:
    """Return the format that holds all of several, each with the name of a matrix; or None and why there is none."""
    blocks = [one for one in found if isinstance(one, Fp8)]
    if len(blocks) == len(found) and len({one.columns for one in blocks}) == 1:  # blocks of fewer outputs
        dtypes = {one.scale_dtype for one in blocks}
        scale_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        return replace(blocks[0], rows=math.gcd(*(one.rows for one in blocks)), scale_dtype=scale_dtype), None
    if len(found) == 1:
        ((format, name),) = found.items()
        return format, None if format is not None else f"no packed format has the values of {name}, {_EXPANDED}"
    named = {name: "dense" if one is None else one.name for one, name in found.items()}
    named = {name: kind if name in matrices else "not quantized" for name, kind in named.items()}
    words = ", ".join(f"{name} is {kind}" for name, kind in list(named.items())[:2])
    return None, f"experts are stored in several formats ({words}), {_EXPANDED}"


def _bits(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype of the same size."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
