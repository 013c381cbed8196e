"""KV caches that roll back: forgetting the last tokens is setting a length.

State of any other kind (recurrent, convolutional, indexed, compressed) is copied in a snapshot; rolling back restores
the snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from spmoe.models.attention import current_length


class RollbackLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, allocated once; the first `length` positions count.

    A sliding-window layer has full length too: the mask applies the window, and a rollback past it stays possible.
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
            from spmoe.backends.kernels.attention import append_kv

            append_kv(self.keys, self.values, key_states, value_states, length)
            return self.keys, self.values
        end = self.length + key_states.shape[-2]
        if end > self.capacity:  # torch would write one row into no space without an error
            raise ValueError(f"a KV cache of {self.capacity} positions cannot hold {end}")
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
    """One sequence's KV cache in one model."""

    def __init__(self, config: Any, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.tokens: list[int] = []  # of the sequence; those before `length` are in the cache
        self.graphs: dict[Any, Any] = {}  # forwards captured over this cache's memory
        self.can_rewind = can_rewind(config)
        self._snapshot: _Snapshot | None = None
        self.cache: Any = _new_cache(config)
        layers = [RollbackLayer(capacity) if type(x) in _POSITIONS_ONLY else x for x in self.cache.layers]
        if self.can_rewind:
            self.cache = Cache(layers=layers)
        else:
            self.cache.layers = layers

    def snapshot(self) -> None:
        """Copy the state as it is, so that `rewind` can restore it; keys and values need no copy."""
        self._snapshot = None if self.can_rewind else _Snapshot(self.cache, self.length)

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on; do nothing if there is none.

        A state that is not keys and values alone goes back to its snapshot, which may be before `length`: the caller
        reads the tokens from `self.length` on again.
        """
        if length >= self.length:
            return
        if not self.can_rewind:
            if self._snapshot is None or self._snapshot.length > length:
                raise ValueError("this model's state cannot be rolled back that far")
            self._snapshot.restore(self.cache)
            self.length, self._snapshot = self._snapshot.length, None
            return
        self.length = length
        for layer in self.cache.layers:
            layer.length = length

    def cut(self, length: int) -> None:
        """Forget every position from `length` on in all layers, also those that only some layers have.

        Unlike `rewind`, it does nothing for a state that is not keys and values alone.
        """
        if not self.can_rewind:
            return
        self.length = min(self.length, length)
        for layer in self.cache.layers:
            layer.length = self.length

    @torch.inference_mode()  # as the forwards that have allocated both
    def copy_prefix(self, source: KvState, length: int) -> None:
        """Copy the first positions of another cache of the same model; both must hold keys and values alone."""
        for layer, other in zip(self.cache.layers, source.cache.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(other.keys, other.values)
            layer.keys[:, :, :length] = other.keys[:, :, :length]
            layer.values[:, :, :length] = other.values[:, :, :length]
            layer.length = length
        self.length = length

    def advance(self, rows: int) -> None:
        """Count rows that kernels have appended; the layers' own `update` did not run."""
        self.length += rows
        for layer in self.cache.layers:
            layer.length = self.length

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more position, in the layers that have run."""
        return sum(t[..., :1, :].nbytes for layer in self.cache.layers for t in _key_values(layer))


def _key_values(layer: Any) -> list[Tensor]:
    found = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


class _Snapshot:
    """A cache as it was: lengths of keys and values, and copies of everything else."""

    def __init__(self, cache: Any, length: int) -> None:
        self.length = length
        self._own = {name: _copy(value) for name, value in vars(cache).items() if name != "layers"}
        self._layers = [_held(layer) for layer in cache.layers]

    def restore(self, cache: Any) -> None:
        vars(cache).update(self._own)
        del cache.layers[len(self._layers) :]  # some caches add layers as they are reached
        for layer, held in zip(cache.layers, self._layers, strict=True):
            vars(layer).update(held)


def _held(layer: Any) -> dict[str, Any]:
    """Return the attributes that restore the layer as it is now."""
    if isinstance(layer, RollbackLayer):
        return {"length": layer.length}
    grown = ("keys", "values", "indexer_keys") if isinstance(layer, DynamicLayer) else ()  # replaced, never written
    return {name: value if name in grown else _copy(value) for name, value in vars(layer).items()}


def _copy(value: Any) -> Any:
    """Copy tensors and containers, which are changed in place; anything else is only replaced."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


_POSITIONS_ONLY = (DynamicLayer, DynamicSlidingWindowLayer)  # and no subclass of theirs


def _new_cache(config: Any) -> Any:
    """Return the cache that the model would make for itself: the family's own class if it defines one."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is not None:
        for found in vars(sys.modules[model_class.__module__]).values():
            own = isinstance(found, type) and issubclass(found, DynamicCache)
            if own and found.__module__ == model_class.__module__:
                return found()
    return DynamicCache(config=config)


def can_rewind(config: Any) -> bool:
    """Return whether every layer's state is keys and values only, so that forgetting tokens is forgetting positions."""
    layers = _new_cache(config).layers
    return bool(layers) and all(type(layer) in _POSITIONS_ONLY for layer in layers)


def position_arguments(model: Any, ids: Tensor, start: int) -> dict[str, Tensor]:
    """Return the positions of a forward of `ids` [1, rows] as an argument; nothing if the model takes none.

    As in `generate`: a cache whose first layer keeps no keys, such as MiniMax's linear attention, does not know them.
    """
    if not _takes_positions(type(model).forward):
        return {}
    return {"position_ids": torch.arange(start, start + ids.shape[1], device=ids.device)[None]}


@cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    return "position_ids" in signature(forward).parameters
