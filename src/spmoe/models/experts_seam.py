"""The experts seam: where a transformers model calls us instead of its own experts, through its official interface.

`transformers` looks the experts function up by name; ours calls the `ExpertsForward` that was attached to the experts
module. It adds nothing to the model's own arithmetic; it decides where the weights come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from spmoe.backends.base import ExpertsForward
from spmoe.errors import CheckpointError

IMPLEMENTATION = "spmoe"


class ZeroExperts:
    """Returns zeros: for a forward that only inspects how the model is connected."""

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    forward: ExpertsForward = experts.spmoe_forward
    return forward.run(experts, hidden_states, top_k_index, top_k_weights)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the experts modules that use transformers' experts interface, with their paths."""
    for path, module in model.named_modules():
        if all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "has_bias", "is_transposed")):
            yield path, module


def take_over(model: Any) -> None:
    """Route the model's experts through our function; they return zeros until another forward is attached."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    model.set_experts_implementation(IMPLEMENTATION)
    for path, module in experts_modules(model):
        config: Any = module.config
        if config._experts_implementation != IMPLEMENTATION:
            raise CheckpointError(
                f"transformers does not allow the experts at {path} to be replaced; choose another model"
            )
        if getattr(module, "has_post_expert_norm", False):
            raise CheckpointError(
                f"the experts at {path} have a norm after each expert, which spmoe cannot run yet; choose another model"
            )
        attach(module, ZeroExperts())


def attach(experts: nn.Module, forward: ExpertsForward) -> None:
    """Make `forward` the forward of an experts module."""
    experts.spmoe_forward = forward  # type: ignore[assignment]
