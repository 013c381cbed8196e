"""HiddenStateHooks: what a network's layers produce, handed on while its forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spmoe.types import Routing

OnChunk = Callable[[range, Tensor, Routing | None], None]  # decoder layers, residual streams, what was asked of them
OnHiddenStates = Callable[[int, Tensor], None]  # decoder layer, residual stream after attention [rows, hidden]


@dataclass(frozen=True)
class LayerObserver:
    """Somebody who looks at the residual streams of a forward, a chunk of layers at a time.

    `ask` is tensor work, done where the states are; `tell` gets its answer, on the host, when that is there.
    """

    chunks: int
    ask: Callable[[range, Tensor], Routing | None]
    tell: OnChunk
    question: str = ""  # who asks otherwise over the same layers, so that recorded forwards are told apart by it
    at_once: bool = False  # whether it is told while the forward is under way, before what it asked about is past

    def tap(self, depth_count: int, on_layers: Callable[[range, Tensor], None]) -> OnHiddenStates:
        """Gathers layers into chunks."""  # a chunk: [depths, rows, hidden]
        size = -(-depth_count // self.chunks)
        taps: list[Tensor] = []

        def on_hidden_states(depth: int, residual: Tensor) -> None:
            taps.append(residual)
            if len(taps) == size or depth == depth_count - 1:
                on_layers(range(depth + 1 - len(taps), depth + 1), torch.stack(taps))
                taps.clear()

        return on_hidden_states


class HiddenStateHooks:
    """Hooks on the inputs of the pre-FFN norms; idle unless somebody listens."""

    def __init__(self, norms: Sequence[nn.Module | None]) -> None:
        self.complete = all(norm is not None for norm in norms)
        self._listener: OnHiddenStates | None = None
        for depth, norm in enumerate(norms):
            if norm is not None:
                norm.register_forward_pre_hook(self._hook(depth))

    @contextmanager
    def listen(self, listener: OnHiddenStates | None) -> Iterator[None]:
        """Call `listener` for every layer that runs inside the block."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _hook(self, depth: int) -> Any:
        def hook(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
            if (listener := self._listener) is not None:
                self._listener = None  # who listens may ask this very norm about other states
                try:
                    listener(depth, args[0].reshape(-1, args[0].shape[-1]))
                finally:
                    self._listener = listener

        return hook
