"""The port: where a transformers model hands its experts' work to us, through its official seam.

`transformers` looks the experts function up by name; ours finds the port that was attached to the experts module it is
called with. A port adds nothing to the model's own arithmetic; it decides where the weights come from.
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
    """Answers with zeros: for a forward that only looks at how the model is wired."""

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    port: ExpertsForward = experts.spmoe_forward
    return port.run(experts, hidden_states, top_k_index, top_k_weights)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that go through the seam, with their paths."""
    for path, module in model.named_modules():
        if all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "has_bias", "is_transposed")):
            yield path, module


def take_over(model: Any) -> None:
    """Route the model's experts through ports, silent ones to begin with."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    model.set_experts_implementation(IMPLEMENTATION)
    for path, module in experts_modules(model):
        config: Any = module.config
        if config._experts_implementation != IMPLEMENTATION:
            raise CheckpointError(f"transformers does not let the experts at {path} be replaced")
        if getattr(module, "has_post_expert_norm", False):
            raise CheckpointError(f"the experts at {path} are normalised one by one, which spmoe cannot do yet")
        attach(module, ZeroExperts())


def attach(experts: nn.Module, port: ExpertsForward) -> None:
    """Make this port the experts module's."""
    experts.spmoe_forward = port  # type: ignore[assignment]
