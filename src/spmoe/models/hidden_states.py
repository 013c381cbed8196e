"""Hidden states of a running model, shown to an observer layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spmoe.types import Routing

OnChunk = Callable[[range, Tensor, Routing | None], None]  # decoder layers, [layers, rows, hidden], their routing
OnHiddenStates = Callable[[int, Tensor], None]  # decoder layer, residual stream after attention [rows, hidden]


@dataclass(frozen=True)
class LayerObserver:
    """Observer of the residual streams of a forward, a chunk of layers at a time.

    `predict` computes routing from the hidden states, on the device; `show` gets the result on the host.
    """

    chunks: int  # number of chunks that the layers are divided into
    predict: Callable[[range, Tensor], Routing | None]
    show: OnChunk
    key: str = ""  # distinguishes captured graphs whose observers predict differently from the same layers
    immediate: bool = False  # call `show` while the forward runs, before the layers that are predicted

    def collect(self, depth_count: int, on_chunk: Callable[[range, Tensor], None]) -> OnHiddenStates:
        """Return a listener that gathers layers into chunks of shape [layers, rows, hidden]."""
        size = -(-depth_count // self.chunks)
        states: list[Tensor] = []

        def listener(depth: int, residual: Tensor) -> None:
            states.append(residual)
            if len(states) == size or depth == depth_count - 1:
                on_chunk(range(depth + 1 - len(states), depth + 1), torch.stack(states))
                states.clear()

        return listener


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
                self._listener = None  # the listener may call this very norm on other states
                try:
                    listener(depth, args[0].reshape(-1, args[0].shape[-1]))
                finally:
                    self._listener = listener

        return hook
