"""KV caches that roll back: forgetting the last tokens is setting a length.

State of any other kind (recurrent, convolutional, indexed, compressed) is copied in a snapshot; rolling back restores
the snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from itertools import accumulate
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

from spmoe.models.attention import current_ranges


class KvArena:
    """Keys and values of all sequences of one model: one tensor per layer, in which each sequence has a range.

    Captured graphs read the range of a sequence from device memory, so one graph serves every sequence. All copies run
    on the compute stream, behind the kernels that were launched before.
    """

    def __init__(self, on_move: Callable[[], None] = lambda: None) -> None:
        # on_move: called before sequences get other places
        self.positions = 0
        self.generation = 0  # counts allocations of the tensors; graphs captured over older ones are invalid
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by layer; keys, values: [1, heads, positions, dim]
        self._ranges: list[KvState] = []  # in order of their starts
        self._on_move = on_move

    def plan(self, positions: int) -> None:
        """Allocate at least so many positions from now on."""
        self._lay({kv: kv.start for kv in self._ranges}, max(positions, self.positions))

    @property
    def layers(self) -> int:
        """Number of layers that have run."""
        return len(self._tensors)

    @property
    def used(self) -> int:
        """Positions of all ranges."""
        return sum(kv.capacity for kv in self._ranges)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of a layer; None if it has not run yet."""
        return self._tensors.get(layer)

    @torch.inference_mode()  # as the forwards that write them
    def allocate(self, layer: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the keys and values of a layer, with the shapes of some that it has computed."""
        if (found := self._tensors.get(layer)) is None:
            found = self._tensors[layer] = (
                _positions(key_states, self.positions),
                _positions(value_states, self.positions),
            )
            self.generation += 1
        return found

    def place(self, kv: KvState, capacity: int) -> None:
        """Give a sequence a range of so many positions, or change the size of the one it has; contents are kept."""
        is_placed = kv in self._ranges
        others = [one for one in self._ranges if one is not kv]
        gaps = _gaps(others, self.positions)
        starts = [start for start, end in gaps if capacity <= end - start]
        if is_placed and any(start <= kv.start and kv.start + capacity <= end for start, end in gaps):
            kv.capacity = capacity
        elif starts:
            self._lay({one: one.start for one in others} | {kv: starts[0]}, self.positions)
            kv.capacity = capacity
        else:
            ranges = self._ranges if is_placed else [*self._ranges, kv]
            sizes = [capacity if one is kv else one.capacity for one in ranges]
            *packed, needed = accumulate(sizes, initial=0)
            positions = self.positions if needed <= self.positions else max(needed, 2 * self.positions)
            self._lay(dict(zip(ranges, packed, strict=True)), positions)
            kv.capacity = capacity

    def remove(self, kv: KvState) -> None:
        """Free the range of a sequence; idempotent."""
        self._ranges = [one for one in self._ranges if one is not kv]

    @torch.inference_mode()
    def _lay(self, starts: Mapping[KvState, int], positions: int) -> None:
        """Move ranges to these starts, in tensors of so many positions; an error changes nothing, or is remembered."""
        grows = positions != self.positions
        moved = [(kv, start) for kv, start in starts.items() if kv.length and (grows or kv.start != start)]
        moved = [(kv, start) for kv, start in moved if kv in self._ranges]
        if moved:
            self._on_move()
        new = self._tensors
        if grows:
            new = {
                layer: (_positions(keys, positions), _positions(values, positions))
                for layer, (keys, values) in new.items()
            }
        try:
            for layer, tensors in self._tensors.items():
                for source, target in zip(tensors, new[layer], strict=True):
                    parts = [source[:, :, kv.start : kv.start + kv.length] for kv, _ in moved]
                    parts = parts if grows else [part.clone() for part in parts]  # ranges may overlap
                    for (kv, start), part in zip(moved, parts, strict=True):
                        target[:, :, start : start + kv.length] = part
        except BaseException:
            if not grows:  # some layers have moved
                for kv, _ in moved:
                    kv.is_lost = True
            raise
        self._tensors, self.positions = new, positions
        self.generation += grows
        for kv, start in starts.items():
            kv.start = start
        self._ranges = sorted(starts, key=lambda kv: kv.start)


def _positions(states: Tensor, count: int) -> Tensor:
    """Allocate keys or values of so many positions, of the shape and kind of others."""
    return states.new_empty(*states.shape[:2], count, states.shape[-1])  # [1, heads, positions, dim]


def _gaps(ranges: Sequence[KvState], positions: int) -> list[tuple[int, int]]:
    """Return the unused parts between ranges, which are in order, and after the last."""
    ends = [0, *(kv.start + kv.capacity for kv in ranges)]
    return list(zip(ends, [*(kv.start for kv in ranges), positions], strict=True))


class RollbackLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one sequence in one layer, a range of the arena; the first `length` positions count.

    A sliding-window layer has full length too: the mask applies the window, and a rollback past it stays possible.
    """

    is_sliding = False

    def __init__(self, arena: KvArena, index: int, kv: KvState) -> None:
        # without the base class's constructor: keys and values are those of the arena
        self.length = 0
        self._arena = arena
        self._index = index
        self._kv = kv

    @property
    def is_initialized(self) -> bool:
        return self._arena.tensors(self._index) is not None

    @property
    def keys(self) -> Tensor | None:
        """All positions of the sequence's range."""
        return self._own(0)

    @property
    def values(self) -> Tensor | None:
        """All positions of the sequence's range."""
        return self._own(1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # key_states, value_states: [1, heads, tokens, head size]
        self._arena.allocate(self._index, key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, _, capacity = self._kv.range
        end = self.length + key_states.shape[-2]
        if end > capacity:  # it would write into another sequence's range
            raise ValueError(f"a KV cache of {capacity} positions cannot hold {end}")
        keys, values = self._arena.allocate(self._index, key_states, value_states)
        keys[:, :, start + self.length : start + end] = key_states
        values[:, :, start + self.length : start + end] = value_states
        self.length = end
        return keys[:, :, start : start + end], values[:, :, start : start + end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self._kv.capacity

    def _own(self, which: int) -> Tensor | None:
        tensors, kv = self._arena.tensors(self._index), self._kv
        return None if tensors is None else tensors[which][:, :, kv.start : kv.start + kv.capacity]


class _KernelLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the arena, for forwards that find the ranges of their sequences in device memory."""

    is_sliding = False
    is_initialized = True

    def __init__(self, arena: KvArena, index: int) -> None:
        self._arena = arena
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the arena is allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        from spmoe.backends.kernels.attention import append_kv

        ranges = current_ranges()
        assert ranges is not None, "inside `device_ranges`"
        keys, values = self._arena.allocate(self._index, key_states, value_states)
        append_kv(keys, values, key_states, value_states, ranges)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # no masks are made

    def get_seq_length(self) -> int:
        return 0  # positions are given

    def get_max_length(self) -> int:
        return self._arena.positions


def kernel_cache(arena: KvArena) -> Any:
    """Return a cache for forwards inside `device_ranges`: each row is appended to the range of its sequence."""
    return Cache(layers=[_KernelLayer(arena, index) for index in range(arena.layers)])


class KvState:
    """One sequence's KV cache in one model."""

    def __init__(self, config: Any, capacity: int, arena: KvArena | None = None) -> None:
        # arena: of the model's other sequences; None: one of its own
        self.arena = KvArena() if arena is None else arena
        self.start = 0  # of its range in the arena
        self.capacity = 0
        self.length = 0
        self.tokens: list[int] = []  # of the sequence; those before `length` are in the cache
        self.can_rewind = can_rewind(config)
        self.is_lost = False  # whether its contents were lost, since memory ran out while they were moved
        self._swapped: list[tuple[Tensor, ...]] | None = None  # keys and values by layer, in host memory
        self._snapshot: _Snapshot | None = None
        self.cache: Any = _new_cache(config)
        layers = [
            RollbackLayer(self.arena, number, self) if type(layer) in _POSITIONS_ONLY else layer
            for number, layer in enumerate(self.cache.layers)
        ]
        if self.can_rewind:
            self.cache = Cache(layers=layers)
        else:
            self.cache.layers = layers
        self.arena.place(self, capacity)

    @property
    def range(self) -> tuple[int, int, int]:
        """Start in the arena, length and capacity."""
        if self.is_lost:
            raise RuntimeError("keys and values of the sequence were lost when memory ran out; send the request again")
        return self.start, self.length, self.capacity

    @property
    def is_swapped_out(self) -> bool:
        """Whether its contents are in host memory, and it has no range in the arena."""
        return self._swapped is not None

    @torch.inference_mode()
    def swap_out(self) -> None:
        """Copy keys and values to host memory and free their range; other state stays where it is."""
        own = [layer for layer in self.cache.layers if isinstance(layer, RollbackLayer)]
        self._swapped = [
            tuple(tensor[:, :, : self.length].to("cpu", copy=True) for tensor in _key_values(layer)) for layer in own
        ]
        self.arena.remove(self)

    @torch.inference_mode()
    def swap_in(self, capacity: int) -> None:
        """Take a range of so many positions, and copy keys and values back into it."""
        swapped, self._swapped = self._swapped or [], None
        self.arena.place(self, capacity)
        own = [layer for layer in self.cache.layers if isinstance(layer, RollbackLayer)]
        for layer, tensors in zip(own, swapped, strict=True):
            for into, tensor in zip(_key_values(layer), tensors, strict=False):
                into[:, :, : self.length] = tensor

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
