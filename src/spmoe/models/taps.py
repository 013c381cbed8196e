"""Taps: what a network's layers produce, handed on while its forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

OnTap = Callable[[int, Tensor], None]  # decoder layer, residual stream after attention [rows, hidden]


class Taps:
    """Hooks on the inputs of the pre-FFN norms; idle unless somebody listens."""

    def __init__(self, norms: Sequence[nn.Module | None]) -> None:
        self.complete = all(norm is not None for norm in norms)
        self._listener: OnTap | None = None
        for depth, norm in enumerate(norms):
            if norm is not None:
                norm.register_forward_pre_hook(self._hook(depth))

    @contextmanager
    def listen(self, listener: OnTap | None) -> Iterator[None]:
        """Call `listener` for every layer that runs inside the block."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _hook(self, depth: int) -> Any:
        def hook(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
            if self._listener is not None:
                self._listener(depth, args[0].reshape(-1, args[0].shape[-1]))

        return hook
