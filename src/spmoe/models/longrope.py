"""Where LongRoPE exchanges a whole sequence's rotary embeddings, and how to read as transformers does around there.

A forward has the embeddings of its last position: the long ones when that lies beyond the change. So a prompt is read
with those of its end, however it is cut, and no forward that continues a sequence may have rows on both sides.
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
    """The positions from which on other embeddings hold."""

    at: tuple[int, ...] = ()  # in order
    read_again: bool = False  # whether a sequence that grows past one is read anew, with the new embeddings

    @classmethod
    def of(cls, model: Any) -> LongRope:
        """Those of a causal language model."""
        again = _LENGTH in names_in(type(model).prepare_inputs_for_generation) and hasattr(model.config, _LENGTH)
        return cls(changes_in(model.config.get_text_config(decoder=True)), again)

    def between(self, start: int, end: int) -> bool:
        """Whether a text that begins and ends there has positions on both sides of one."""
        return any(start < change < end for change in self.at)

    def invalidate(self, held: int, needed: int) -> bool:
        """Whether so many positions of a state are worth nothing to a sequence that has become so long."""
        return self.read_again and any(held <= change < needed for change in self.at)

    def until(self, start: int) -> int | None:
        """Positions from there to the next one."""
        return next((change - start for change in self.at if change > start), None)


def changes_in(config: Any) -> tuple[int, ...]:
    """The positions that a configuration names."""
    given = getattr(config, "rope_parameters", None) or {}
    sets = [given, *(one for one in given.values() if isinstance(one, Mapping))]  # one, or one per type of layer
    return tuple(sorted({one[_LENGTH] for one in sets if one.get("rope_type") == "longrope"}))


def rotary_modules(model: nn.Module) -> list[Any]:
    """The modules that make rotary embeddings from positions."""
    return [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding") and hasattr(m, "rope_type")]


def names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """The attributes and globals that a function names, whatever it is wrapped in."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_names if code is not None else ()


@contextmanager
def as_if_up_to(model: nn.Module, end: int) -> Iterator[None]:
    """Inside, rotary embeddings are those of a text that ends there."""
    with ExitStack() as stack:
        for module in rotary_modules(model):
            before = vars(module).get("forward")
            module.forward = _with_end(module.forward, end)
            stack.callback(_put_back, module, before)
        yield


def _with_end(own: Callable[..., Any], end: int) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        last = torch.full_like(position_ids[..., :1], end - 1)
        found = own(x, torch.cat((position_ids, last), dim=-1), *args, **kwargs)
        return found[:, :-1] if isinstance(found, Tensor) else tuple(t[:, :-1] for t in found)

    return forward


def _put_back(module: Any, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward
