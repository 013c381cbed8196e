"""Gates (norm and router) of many MoE layers evaluated in one call, to predict experts from any hidden states.

`StackedGates` batches the model's own modules with `torch.func.vmap`; `FusedGates` is one CUDA kernel for RMS norms and
softmax routers. Both are checked against the model's own gates before use. They only predict, so rounding may swap
experts whose scores are nearly equal.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from spmoe.backends.base import kernel_failures
from spmoe.errors import reason
from spmoe.models.inspection import MoeLayer, RouterCall

_STACKED_PROBE_ROWS = 3
_FUSED_PROBE_ROWS = 16
_MIN_AGREEMENT = 0.95  # share of equal expert choices; rounding may swap experts with nearly equal scores
_log = logging.getLogger(__name__)


class StackedGates:
    """Norms and routers of all MoE layers with stacked weights, run as one batch by `torch.func`."""

    def __init__(self, norms: Sequence[nn.Module], routers: Sequence[nn.Module]) -> None:
        self._norms = stack_module_state(list(norms))
        self._routers = stack_module_state(list(routers))
        norm, router = deepcopy(norms[0]), routers[0]  # a copy: `fuse` may later replace the original's forward

        def gate(norm_state: Any, router_state: Any, hidden: Tensor) -> tuple[Tensor, ...]:
            return functional_call(router, router_state, (functional_call(norm, norm_state, (hidden,)),))  # type: ignore[no-any-return]

        self._gate = vmap(gate)

    @classmethod
    def of(cls, moe_layers: Sequence[MoeLayer]) -> Self | None:
        """Stack the layers' gates; None if they differ in kind or the batched result differs from the single ones."""
        norms, calls = _gates_of(moe_layers)
        if not len(norms) == len(calls) == len(moe_layers) > 1:
            return None
        if any(call.args or call.kwargs or not call.flat or call.order != (0, 1, 2) for call in calls):
            return None
        weight = next(norms[0].parameters(), None)
        if weight is None or weight.is_meta:
            return None
        try:
            gates = cls(norms, [call.router for call in calls])
            probe = _probe(len(moe_layers), _STACKED_PROBE_ROWS, weight.shape[0], weight.device, weight.dtype)
            batched, _ = gates(range(len(moe_layers)), probe)
            with torch.inference_mode():
                single = [call(norm(states))[0] for norm, call, states in zip(norms, calls, probe, strict=True)]
        except (RuntimeError, ValueError, TypeError):  # an operation that vmap cannot batch, or modules that differ
            return None
        agreement = (batched == torch.stack(single)).float().mean()
        return gates if float(agreement) > _MIN_AGREEMENT else None

    def __call__(self, layers: range, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return routed experts and their weights."""  # residual: [layers, rows, hidden] -> 2 x [layers, rows, top_k]
        norms, routers = (
            tuple({name: tensor[layers.start : layers.stop] for name, tensor in part.items()} for part in state)
            for state in (self._norms, self._routers)
        )
        with torch.inference_mode():
            _, weights, experts = self._gate(norms, routers, residual)
        shape = (len(layers), residual.shape[1], -1)
        return experts.reshape(shape), weights.reshape(shape)


class _CannotFuse(Exception):
    """Reason why the kernel cannot replace these gates."""


class FusedGates:
    """Norms and routers of all MoE layers with stacked weights, run by one kernel."""

    def __init__(self, norms: Sequence[Any], routers: Sequence[Any]) -> None:
        self._norms = torch.stack([norm.weight.detach() for norm in norms])  # [layers, hidden]
        self._routers = torch.stack([router.weight.detach() for router in routers])  # [layers, experts, hidden]
        self._eps = float(getattr(norms[0], "variance_epsilon", getattr(norms[0], "eps", 0.0)))
        self._top_k = int(routers[0].top_k)

    @classmethod
    def of(cls, moe_layers: Sequence[MoeLayer]) -> Self | None:
        """Fuse the layers' gates; None if the kernel cannot run or selects other experts than the model's gates."""
        norms, calls = _gates_of(moe_layers)
        if not len(norms) == len(calls) == len(moe_layers) > 1:
            return None
        try:
            return cls._checked(norms, calls)
        except _CannotFuse as why:
            _log.debug("gates are not fused into one kernel: %s", why)
            return None

    @classmethod
    def _checked(cls, norms: Sequence[Any], calls: Sequence[RouterCall]) -> Self:
        try:
            gates = cls(norms, [call.router for call in calls])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # missing weights, or unequal shapes
            raise _CannotFuse(f"unsupported kind of norm or router ({reason(error)})") from error
        hidden = gates._norms.shape[-1]
        if gates._norms.ndim != 2 or gates._routers.ndim != 3 or gates._routers.shape[-1] != hidden:
            raise _CannotFuse("unsupported kind of norm or router (weights are not vectors and matrices of one width)")
        probe = _probe(len(norms), _FUSED_PROBE_ROWS, hidden, gates._norms.device, gates._norms.dtype)
        try:
            experts, scores = gates(range(len(norms)), probe)
        except kernel_failures() as error:
            raise _CannotFuse(f"the kernel does not run ({reason(error)})") from error
        try:
            with torch.inference_mode():
                single = [call(norm(states)) for norm, call, states in zip(norms, calls, probe, strict=True)]
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise _CannotFuse(f"the gates cannot be called on their own ({reason(error)})") from error
        if any(one[0].shape != experts.shape[1:] for one in single):
            raise _CannotFuse("the kernel selects another number of experts")
        own, weights = torch.stack([one[0] for one in single]), torch.stack([one[1] for one in single]).float()
        if not _same_selection(own, weights, experts, scores):
            raise _CannotFuse("the kernel selects other experts")
        return gates

    def __call__(self, layers: range, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return routed experts, best first, and their normalized scores."""
        # residual: [layers, rows, hidden] -> 2 x [layers, rows, top_k]
        from spmoe.backends.kernels.dense import norm_and_route_layers

        own = slice(layers.start, layers.stop)
        return norm_and_route_layers(residual, self._norms[own], self._eps, self._routers[own], self._top_k)


def _gates_of(moe_layers: Sequence[MoeLayer]) -> tuple[list[nn.Module], list[RouterCall]]:
    """Return the norms and the routers that inspection found; fewer than layers if some are missing."""
    norms = [moe_layer.norm for moe_layer in moe_layers if moe_layer.norm is not None]
    return norms, [moe_layer.router for moe_layer in moe_layers if moe_layer.router is not None]


def _probe(layers: int, rows: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw the same random hidden states at every call."""  # [layers, rows, hidden]
    rng = torch.Generator(device).manual_seed(0)
    return torch.randn(layers, rows, hidden, generator=rng, device=device).to(dtype)


def _same_selection(own: Tensor, weights: Tensor, experts: Tensor, scores: Tensor) -> bool:
    """Check that experts and scores agree, except where rounding swaps nearly equal experts."""
    # all: [layers, rows, top_k]; weights and scores: those of `own` and of `experts`
    agreement = (own.sort(dim=-1).values == experts.sort(dim=-1).values).float().mean()
    weights = weights.sort(dim=-1, descending=True).values
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return float((weights - scores).abs().mean()) < 0.01 and float(agreement) > _MIN_AGREEMENT
