"""Gates of many layers in one kernel, where they are RMS norms and softmax routers. They are asked for guesses only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from spmoe.models.anatomy import MoeSite

_PROBE_ROWS = 16


class FusedGates:
    """Norms and routers of all MoE layers with their weights stacked, run by one kernel."""

    def __init__(self, norms: Sequence[Any], routers: Sequence[Any]) -> None:
        self._norms = torch.stack([norm.weight.detach() for norm in norms])  # [layers, hidden]
        self._routers = torch.stack([router.weight.detach() for router in routers])  # [layers, experts, hidden]
        self._eps = float(getattr(norms[0], "variance_epsilon", getattr(norms[0], "eps", 0.0)))
        self._top_k = int(routers[0].top_k)

    @classmethod
    def of(cls, sites: Sequence[MoeSite]) -> Self | None:
        """The gates; None where a kernel cannot run, or does not pick what each pair of norm and router does."""
        norms = [site.norm for site in sites if site.norm is not None]
        calls = [site.router for site in sites if site.router is not None]
        if not len(norms) == len(calls) == len(sites) > 1:
            return None
        try:
            gates = cls(norms, [call.router for call in calls])
            rng = torch.Generator(gates._norms.device).manual_seed(0)
            shape = (len(sites), _PROBE_ROWS, gates._norms.shape[1])
            probe = torch.randn(shape, generator=rng, device=gates._norms.device).to(gates._norms.dtype)
            experts, scores = gates(range(len(sites)), probe)
            with torch.inference_mode():
                alone = [call(norm(states)) for norm, call, states in zip(norms, calls, probe, strict=True)]
            own, weights = torch.stack([a[0] for a in alone]), torch.stack([a[1] for a in alone]).float()
        except Exception:  # a gate of another kind, or a device without kernels
            return None
        if own.shape != experts.shape:
            return None
        agree = (own.sort(dim=-1).values == experts.sort(dim=-1).values).float().mean()
        weights = weights.sort(dim=-1, descending=True).values
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        # rounding may swap two nearly equal experts, no more
        alike = float((weights - scores).abs().mean()) < 0.01 and float(agree) > 0.95
        return gates if alike else None

    def __call__(self, layers: range, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts, best first, and their shares."""  # residual: [layers, rows, hidden] -> 2 x [.., top_k]
        from spmoe.backends.kernels.gates import route_layers

        own = slice(layers.start, layers.stop)
        return route_layers(residual, self._norms[own], self._eps, self._routers[own], self._top_k)
