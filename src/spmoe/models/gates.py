"""Gates of many layers asked in one batched call, where a family's norms and routers allow it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from spmoe.models.inspection import MoeLayer


class StackedGates:
    """Norms and routers of all MoE layers with their weights stacked, run as one through `torch.func`."""

    def __init__(self, norms: Sequence[nn.Module], routers: Sequence[nn.Module]) -> None:
        self._norms = stack_module_state(list(norms))
        self._routers = stack_module_state(list(routers))
        norm, router = deepcopy(norms[0]), routers[0]  # a copy: the original may be fused later, with its own weights

        def ask(norm_state: Any, router_state: Any, hidden: Tensor) -> tuple[Tensor, ...]:
            return functional_call(router, router_state, (functional_call(norm, norm_state, (hidden,)),))  # type: ignore[no-any-return]

        self._ask = vmap(ask)

    @classmethod
    def of(cls, moe_layers: Sequence[MoeLayer]) -> Self | None:
        """The stacked gates; None where they are not all of one kind, or do not answer as each does alone."""
        norms = [moe_layer.norm for moe_layer in moe_layers if moe_layer.norm is not None]
        calls = [moe_layer.router for moe_layer in moe_layers if moe_layer.router is not None]
        if len(norms) < len(moe_layers) or len(calls) < len(moe_layers) or len(moe_layers) < 2:
            return None
        if any(call.args or call.kwargs or not call.flat or call.order != (0, 1, 2) for call in calls):
            return None
        weight = next(norms[0].parameters(), None)
        if weight is None or weight.is_meta:
            return None
        try:
            gates = cls(norms, [call.router for call in calls])
            rng = torch.Generator(weight.device).manual_seed(0)
            probe = torch.randn(
                len(moe_layers), 3, weight.shape[0], generator=rng, device=weight.device, dtype=weight.dtype
            )
            together, _ = gates(range(len(moe_layers)), probe)
            with torch.inference_mode():
                alone = [call(norm(states))[0] for norm, call, states in zip(norms, calls, probe, strict=True)]
        except (RuntimeError, ValueError, TypeError):  # an operation that cannot be batched, or modules that differ
            return None
        agree = (together == torch.stack(alone)).float().mean()
        return gates if float(agree) > 0.95 else None  # rounding may swap two nearly equal experts, no more

    def __call__(self, layers: range, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts and their weights."""  # residual: [layers, rows, hidden] -> 2 x [layers, rows, top_k]
        norms, routers = (
            tuple({name: tensor[layers.start : layers.stop] for name, tensor in kind.items()} for kind in state)
            for state in (self._norms, self._routers)
        )
        with torch.inference_mode():
            _, weights, experts = self._ask(norms, routers, residual)
        shape = (len(layers), residual.shape[1], -1)
        return experts.reshape(shape), weights.reshape(shape)
