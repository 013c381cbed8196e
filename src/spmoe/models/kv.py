"""KV caches that roll back: forgetting the last tokens is setting a number."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from spmoe.models.attention import current_length


class RollbackLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, allocated once; `length` says how much of them counts.

    A sliding-window layer is kept at full length too: the mask does the windowing, and a rollback past the window
    stays possible.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # key_states, value_states: [batch, heads, tokens, head size]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (length := current_length()) is not None:
            from spmoe.backends.kernels.attention import append

            append(self.keys, self.values, key_states, value_states, length)
            return self.keys, self.values
        end = self.length + key_states.shape[-2]
        if end > self.capacity:  # writing one row into none would pass unnoticed
            raise ValueError(f"a state of {self.capacity} positions cannot hold {end}")
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class KvState:
    """One sequence's attention state in one model."""

    def __init__(self, config: Any, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.programs: dict[Any, Any] = {}  # forwards recorded over this state's memory
        self.can_rewind = can_rewind(config)
        if self.can_rewind:
            count = len(DynamicCache(config=config).layers)
            self.cache = Cache(layers=[RollbackLayer(capacity) for _ in range(count)])
        else:
            self.cache = DynamicCache(config=config)

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on; a longer length than is held changes nothing."""
        if length >= self.length:
            return
        if not self.can_rewind:
            raise ValueError("this model's state cannot be rolled back")
        self.length = length
        for layer in self.cache.layers:
            layer.length = length

    def advance(self, rows: int) -> None:
        """Count rows that were appended on the device, behind the layers' back."""
        self.length += rows
        for layer in self.cache.layers:
            layer.length = self.length

    @property
    def bytes_per_token(self) -> int:
        """What one more position costs, as the layers that have run show it."""
        return sum(t[..., :1, :].nbytes for layer in self.cache.layers for t in _key_values(layer))


def _key_values(layer: Any) -> list[Tensor]:
    found = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def can_rewind(config: Any) -> bool:
    """Whether every layer's state is keys and values only, so that forgetting tokens is forgetting positions."""
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
