"""LongRoPE: the positions where it switches its factors, and how to get the same embeddings as transformers there.

transformers chooses the short or long factors of a whole forward by its last position. So a prompt that crosses a
switch must use the factors of its end in every chunk, and a forward that continues a sequence must not cross a switch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class LongRope:
    """The positions from which LongRoPE uses other factors; empty for models without LongRoPE."""

    switches: tuple[int, ...] = ()  # in ascending order
    recomputes: bool = False  # whether `generate` recomputes the KV cache of a sequence that grows past a switch

    @classmethod
    def of(cls, model: Any) -> LongRope:
        """Read the positions from a causal language model's configuration."""
        prepare = type(model).prepare_inputs_for_generation
        recomputes = _LENGTH in names_used_by(prepare) and hasattr(model.config, _LENGTH)
        return cls(switch_positions(model.config.get_text_config(decoder=True)), recomputes)

    def crosses(self, start: int, end: int) -> bool:
        """Return whether positions [start, end) lie on both sides of a switch."""
        return any(start < switch < end for switch in self.switches)

    def invalidates(self, cached: int, length: int) -> bool:
        """Return whether `cached` KV positions must be recomputed for a sequence that has grown to `length` tokens."""
        return self.recomputes and any(cached <= switch < length for switch in self.switches)

    def distance(self, start: int) -> int | None:
        """Return the number of positions from `start` to the next switch; None if there is none."""
        return next((switch - start for switch in self.switches if switch > start), None)


def switch_positions(config: Any) -> tuple[int, ...]:
    """Return the positions where LongRoPE switches, from a model's configuration."""
    given = getattr(config, "rope_parameters", None) or {}
    sets = [given, *(one for one in given.values() if isinstance(one, Mapping))]  # one set, or one per layer type
    return tuple(sorted({one[_LENGTH] for one in sets if one.get("rope_type") == "longrope"}))


def rotary_modules(model: nn.Module) -> list[Any]:
    """Return the modules that compute rotary embeddings from positions."""
    return [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding") and hasattr(m, "rope_type")]


def names_used_by(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the attributes and globals that a function's code names, looking through decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_names if code is not None else ()


@contextmanager
def rope_for_length(model: nn.Module, length: int) -> Iterator[None]:
    """Make rotary modules use the factors of a text of `length` tokens, whatever positions a forward has."""
    with ExitStack() as stack:
        for module in rotary_modules(model):
            before = vars(module).get("forward")
            module.forward = _for_length(module.forward, length)
            stack.callback(_restore, module, before)
        yield


def _for_length(own: Callable[..., Any], length: int) -> Callable[..., Any]:
    """Append the last position, which selects the factors, and drop its row of the result."""

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        last = torch.full_like(position_ids[..., :1], length - 1)
        found = own(x, torch.cat((position_ids, last), dim=-1), *args, **kwargs)
        return found[:, :-1] if isinstance(found, Tensor) else tuple(t[:, :-1] for t in found)

    return forward


def _restore(module: Any, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward
