"""The contract of a backend: the arithmetic of a layer's experts, wave by wave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from spmoe.experts.source import Wave


class Backend(Protocol):
    """Runs experts on one kind of device."""

    def run_experts(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, waves: Iterable[Wave]
    ) -> Tensor:
        """The weighted sum of each row's experts, whatever the order in which they arrive."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        ...
