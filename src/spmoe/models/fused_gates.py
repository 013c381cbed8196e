"""Gates of many layers in one kernel, where they are RMS norms and softmax routers. They are asked for guesses only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from spmoe.backends.base import kernel_failures
from spmoe.errors import reason
from spmoe.models.inspection import MoeLayer, RouterCall

_PROBE_ROWS = 16
_log = logging.getLogger(__name__)


class _NotFused(Exception):
    """Why these gates are not run by one kernel."""


class FusedGates:
    """Norms and routers of all MoE layers with their weights stacked, run by one kernel."""

    def __init__(self, norms: Sequence[Any], routers: Sequence[Any]) -> None:
        self._norms = torch.stack([norm.weight.detach() for norm in norms])  # [layers, hidden]
        self._routers = torch.stack([router.weight.detach() for router in routers])  # [layers, experts, hidden]
        self._eps = float(getattr(norms[0], "variance_epsilon", getattr(norms[0], "eps", 0.0)))
        self._top_k = int(routers[0].top_k)

    @classmethod
    def of(cls, moe_layers: Sequence[MoeLayer]) -> Self | None:
        """The gates; None where a kernel cannot run, or does not pick what each pair of norm and router does."""
        norms = [moe_layer.norm for moe_layer in moe_layers if moe_layer.norm is not None]
        calls = [moe_layer.router for moe_layer in moe_layers if moe_layer.router is not None]
        if not len(norms) == len(calls) == len(moe_layers) > 1:
            return None
        try:
            return cls._proved(norms, calls)
        except _NotFused as why:
            _log.debug("gates are asked one by one, not by one kernel: %s", why)
            return None

    @classmethod
    def _proved(cls, norms: Sequence[Any], calls: Sequence[RouterCall]) -> Self:
        try:
            gates = cls(norms, [call.router for call in calls])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # no such weights, or not of one shape
            raise _NotFused(f"they are of another kind ({reason(error)})") from error
        width = gates._norms.shape[-1]
        if gates._norms.ndim != 2 or gates._routers.ndim != 3 or gates._routers.shape[-1] != width:
            raise _NotFused("they are of another kind (their weights are no vectors and matrices of one width)")
        rng = torch.Generator(gates._norms.device).manual_seed(0)
        probe = torch.randn(len(norms), _PROBE_ROWS, width, generator=rng, device=gates._norms.device)
        probe = probe.to(gates._norms.dtype)
        try:
            experts, scores = gates(range(len(norms)), probe)
        except kernel_failures() as error:
            raise _NotFused(f"the kernel does not run ({reason(error)})") from error
        try:
            with torch.inference_mode():
                alone = [call(norm(states)) for norm, call, states in zip(norms, calls, probe, strict=True)]
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise _NotFused(f"they cannot be asked on their own ({reason(error)})") from error
        if any(one[0].shape != experts.shape[1:] for one in alone):
            raise _NotFused("the kernel picks another number of experts")
        own, weights = torch.stack([one[0] for one in alone]), torch.stack([one[1] for one in alone]).float()
        if not _alike(own, weights, experts, scores):
            raise _NotFused("the kernel picks other experts")
        return gates

    def __call__(self, layers: range, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts, best first, and their shares."""  # residual: [layers, rows, hidden] -> 2 x [.., top_k]
        from spmoe.backends.kernels.dense import norm_and_route_layers

        own = slice(layers.start, layers.stop)
        return norm_and_route_layers(residual, self._norms[own], self._eps, self._routers[own], self._top_k)


def _alike(own: Tensor, weights: Tensor, experts: Tensor, scores: Tensor) -> bool:
    """Whether both picked the same, but for two nearly equal experts that rounding may swap."""  # all: [.., top_k]
    agree = (own.sort(dim=-1).values == experts.sort(dim=-1).values).float().mean()
    weights = weights.sort(dim=-1, descending=True).values
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return float((weights - scores).abs().mean()) < 0.01 and float(agree) > 0.95
