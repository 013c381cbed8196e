"""Copies of packed experts that the CPU computes without dequantizing them, in a bounded part of host memory.

A projection is copied in the layout of PyTorch's operator for its format or, if there is none, as the dense matrix
that the format defines. A copy is made when the CPU first computes an expert; the least recently used ones are dropped.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from spmoe.formats.base import OPERATOR_ROWS, Parts
from spmoe.formats.expert import ExpertFormat, Shapes
from spmoe.types import ExpertKey


@dataclass(frozen=True)
class CopyLayout:
    """Layout of the copy of an expert."""

    repacked: tuple[str, ...]  # projections in the layout of PyTorch's operator
    dense: tuple[str, ...]  # the other projections
    nbytes: int

    @classmethod
    def of(cls, format: ExpertFormat, shapes: Shapes) -> Self:
        """Choose how to copy an expert whose module holds tensors of these shapes."""
        parts = format.repacked_parts(shapes)
        repacked = tuple(name for name, found in parts.items() if found is not None)
        dense = tuple(name for name, found in parts.items() if found is None)
        nbytes = sum(part.nbytes for found in parts.values() if found is not None for part in found.values())
        nbytes += sum(format.dtype.itemsize * math.prod(shapes[name]) for name in dense)
        return cls(repacked, dense, nbytes)

    def serves(self, rows: int) -> bool:
        """Return whether a copy is faster than dequantizing for an expert of so many rows."""
        return not self.repacked or rows <= OPERATOR_ROWS


@dataclass(frozen=True)
class ExpertCopy:
    """One expert as the CPU computes it. Projections are W[out, in]."""

    format: ExpertFormat
    repacked: dict[str, Parts]  # by projection, for PyTorch's operator
    dense: dict[str, Tensor]  # by projection: the others
    nbytes: int

    def project(self, name: str, x: Tensor) -> Tensor:
        """Multiply rows with a projection, without its bias."""  # x: [rows, in] -> [rows, out]
        if name in self.repacked:
            return self.format.weight.repacked_linear(self.repacked[name], x)
        return linear(x, self.dense[name])


class CpuCopies:
    """Copies of the experts that the CPU has computed last; `budget`: most bytes of all of them.

    Only the thread of the CPU path adds and drops copies.
    """

    def __init__(self, format: ExpertFormat, budget: int) -> None:
        self._format = format
        self._budget = budget if needs_copies(format) else 0
        self._copies: OrderedDict[ExpertKey, ExpertCopy] = OrderedDict()  # the least recently used one first
        self.nbytes = 0

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._copies

    def can_hold(self, layout: CopyLayout) -> bool:
        """Return whether the budget is large enough for such a copy."""
        return 0 < layout.nbytes <= self._budget

    def has_place(self, layout: CopyLayout) -> bool:
        """Return whether such a copy fits beside the others."""
        return self.nbytes + layout.nbytes <= self._budget

    def get(self, key: ExpertKey) -> ExpertCopy:
        """Return a copy, which becomes the most recently used one; raise KeyError if there is none."""
        self._copies.move_to_end(key)
        return self._copies[key]

    def make(self, key: ExpertKey, views: Mapping[str, Tensor], layout: CopyLayout) -> None:
        """Copy an expert, given the fields of its blob; drop the least recently used copies if there is no place."""
        while self._copies and not self.has_place(layout):
            _, dropped = self._copies.popitem(last=False)
            self.nbytes -= dropped.nbytes
        format = self._format
        parts = {name: format.parts(views, name) for name in (*layout.repacked, *layout.dense)}
        repacked = {name: format.weight.repack(parts[name], format.dtype) for name in layout.repacked}
        dense = {name: format.weight.dequantize_by_rows(parts[name], format.dtype) for name in layout.dense}
        self._copies[key] = ExpertCopy(format, repacked, dense, layout.nbytes)
        self.nbytes += layout.nbytes


def needs_copies(format: ExpertFormat) -> bool:
    """Return whether the CPU has to dequantize an expert of one row unless it has a copy."""
    row = torch.empty(1, 128, dtype=format.dtype)  # as wide as some operators need it to be
    return format.is_packed and not format.weight.has_operator(row)
