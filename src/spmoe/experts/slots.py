"""Slots: one allocation, made at start, divided into slots of one blob each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from spmoe.errors import BudgetError
from spmoe.formats.layout import BlobLayout


class Slots(Protocol):
    """Fixed memory for experts, one expert per slot."""

    count: int

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        """Return the tensors of the expert in the slot, as views."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


class MemorySlots:
    """Slots in host memory."""

    def __init__(self, count: int, layout: BlobLayout) -> None:
        self.count = count
        try:
            self._arena = torch.empty(count, layout.nbytes, dtype=torch.uint8)  # [slots, blob bytes]
        except RuntimeError as error:
            raise BudgetError(
                f"cannot allocate {count} expert slots of {layout.nbytes} bytes; lower --expert-memory"
            ) from error
        self._weights = [layout.views(self._arena[slot]) for slot in range(count)]
        self._bytes = [memoryview(self._arena[slot].numpy()) for slot in range(count)]  # type: ignore[arg-type]

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        return self._weights[slot]

    def close(self) -> None:
        self._weights.clear()
        self._bytes.clear()
        self._arena = torch.empty(0, 0, dtype=torch.uint8)

    def buffer(self, slot: int) -> memoryview:
        """Return the slot's bytes, writable."""
        return self._bytes[slot]
