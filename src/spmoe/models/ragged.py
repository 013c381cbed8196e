"""One forward over new tokens of several sequences, each with a KV cache of its own.

The tokens lie side by side in one row of input ids. Everything but attention treats them one by one. Attention runs
sequence by sequence, with the implementation and the mask that a forward of that sequence alone would have, so its
result does not depend on the other sequences.

transformers passes masks, keys and values from its mask and cache interfaces to the attention function without looking
into them. Here these objects describe all sequences, and nothing else of a model is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spmoe.backends.base import rows_of_sequences
from spmoe.models.kv import KvState
from spmoe.models.longrope import rotary_modules

BATCH_ROWS = (2, 4, 8, 16, 32, 48, 64)  # of captured forwards of several sequences
_PREFIX = "spmoe-ragged-"  # of attention implementations, before the name of the one that runs each sequence
_SHARED_ARGUMENTS = {"position_ids", "cache_position", "s_aux"}  # tensors that attention may get beside its inputs


def batch_rows_up_to(most: int) -> list[int]:
    """Return the numbers of rows that are captured for steps of several sequences with up to so many rows."""
    return [rows for rows, fewer in zip(BATCH_ROWS, (1, *BATCH_ROWS), strict=False) if fewer < most]


class RaggedPart(NamedTuple):
    """The part of one sequence in a forward."""

    tokens: list[int]
    kv: KvState
    num_logits: int  # of the last tokens


@dataclass(frozen=True)
class _Forward:
    """Sizes of the forward that runs, by sequence."""

    rows: list[int]  # new positions
    positions: list[int]  # all so far
    joins: bool  # caches return one tensor of all sequences, since the model computes with it before attention


_forward: ContextVar[_Forward] = ContextVar("forward")


class _Segments(list[Tensor]):
    """Keys or values of all sequences, which an update of the cache returns and attention gets."""


class _RaggedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the KV caches of all sequences."""

    is_sliding = False

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self._layers = layers
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the sequences' own layers are initialized by their first update."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # key_states, value_states: [1, heads, rows of all sequences, dim]
        forward = _forward.get()
        new = zip(*(torch.split(states, forward.rows, dim=-2) for states in (key_states, value_states)), strict=True)
        updated = [layer.update(*one) for layer, one in zip(self._layers, new, strict=True)]
        keys, values = (_Segments(tensors) for tensors in zip(*updated, strict=True))
        return (torch.cat(keys, dim=-2), torch.cat(values, dim=-2)) if forward.joins else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(int(layer.length) for layer in self._layers)

    def get_max_length(self) -> int:
        return -1


class _RaggedMask:
    """The arguments of a mask, from which attention makes the mask of each sequence."""

    def __init__(self, base: str, **arguments: Any) -> None:
        self._make: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[base]
        self._arguments = arguments
        self._masks: dict[int, Any] = {}  # by number of the sequence; layers share them

    def of(self, number: int, forward: _Forward) -> Any:
        """Return the mask of a sequence."""
        if number not in self._masks:
            rows, positions = forward.rows[number], forward.positions[number]
            sizes = {"q_length": rows, "kv_length": positions, "q_offset": positions - rows, "kv_offset": 0}
            self._masks[number] = self._make(**{**self._arguments, **sizes})
        return self._masks[number]


def _attend(
    base: str,
    module: Any,
    query: Tensor,  # [1, heads, rows, dim]
    key: Any,
    value: Any,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run the attention of each sequence."""  # -> [1, rows, heads, value dim]
    forward = _forward.get()
    unknown = [name for name, one in kwargs.items() if isinstance(one, Tensor) and name not in _SHARED_ARGUMENTS]
    if unknown or not isinstance(attention_mask, _RaggedMask | None):
        raise NotImplementedError(f"its attention needs {', '.join(unknown) or 'a mask'}, which is unsupported")
    queries = torch.split(query, forward.rows, dim=2)
    keys, values = (
        one if isinstance(one, _Segments) else torch.split(one, forward.positions, dim=-2) for one in (key, value)
    )
    attend, found = _function(base, module), []
    for number, inputs in enumerate(zip(queries, keys, values, strict=True)):
        mask = None if attention_mask is None else attention_mask.of(number, forward)
        found.append(attend(module, *inputs, mask, **kwargs)[0])
    return torch.cat(found, dim=1), None


def _function(base: str, module: Any) -> Callable[..., tuple[Tensor, Any]]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)
    return found


@contextmanager
def _ragged_attention(model: Any, forward: _Forward) -> Iterator[None]:
    """Let attention run sequence by sequence inside."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs]
    for base in {base for _, base in before if base is not None}:
        if f"{_PREFIX}{base}" not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(f"{_PREFIX}{base}", partial(_attend, base))
            if base in ALL_MASK_ATTENTION_FUNCTIONS:
                AttentionMaskInterface.register(f"{_PREFIX}{base}", partial(_RaggedMask, base))
    token = _forward.set(forward)
    try:
        for config, base in before:
            config._attn_implementation_internal = None if base is None else f"{_PREFIX}{base}"
        yield
    finally:
        for config, base in before:
            config._attn_implementation_internal = base
        _forward.reset(token)


def run_ragged(model: Any, parts: Sequence[RaggedPart], *, joins: bool) -> list[Tensor]:
    """Append tokens to several sequences; return the logits that each of them asks for.

    `joins`: see `_Forward`; families that cache compressed keys need it.
    """
    device, rows, starts = model.device, [len(part.tokens) for part in parts], [part.kv.length for part in parts]
    ends = list(accumulate(rows))
    ids = [token for part in parts for token in part.tokens]
    position_ids = [start + row for start, count in zip(starts, rows, strict=True) for row in range(count)]
    kept = [row for end, part in zip(ends, parts, strict=True) for row in range(end - part.num_logits, end)]
    positions = [start + count for start, count in zip(starts, rows, strict=True)]
    layers = zip(*(part.kv.cache.layers for part in parts), strict=True)
    split = rows if model.dtype.itemsize <= 2 else []  # float32 is exact enough to compute all rows at once
    with _ragged_attention(model, _Forward(rows, positions, joins)), rows_of_sequences(split):
        output = model(
            input_ids=torch.tensor([ids], device=device),
            past_key_values=Cache(layers=[_RaggedLayer(list(layer)) for layer in layers]),
            use_cache=True,
            position_ids=torch.tensor([position_ids], device=device),
            logits_to_keep=torch.tensor(kept, device=device),
        )
    for part in parts:
        part.kv.length += len(part.tokens)
    return list(torch.split(output.logits[0], [part.num_logits for part in parts]))


def positions_depend_on_others(model: Any) -> bool:
    """Return whether rotary embeddings of a forward depend on its longest sequence, as dynamic and LongRoPE do."""
    return any(
        "dynamic" in str(kind) or kind == "longrope"
        for module in rotary_modules(model)
        for kind in (module.rope_type.values() if isinstance(module.rope_type, dict) else [module.rope_type])
    )
