"""The Muon optimizer (momentum with orthogonalized steps) for the matrices of a decoder, and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


@torch.compile(dynamic=False, disable=not torch.cuda.is_available())
def orthogonalise(matrices: Tensor) -> Tensor:
    """Set all singular values to about one, with a fifth-order Newton-Schulz iteration."""  # [n, a, b]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Muon for stacks of matrices; parameters of equal shape are orthogonalized in one batch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                updates = []
                for parameter in parameters:
                    buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    buffer.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(buffer, group["momentum"]))
                stacked = torch.stack(updates).view(-1, *shape[-2:])
                scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
                steps = orthogonalise(stacked).view(len(parameters), *shape).unbind()
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(parameters, steps, alpha=-group["lr"] * scale)


def optimizers(model: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for attention and feed-forward matrices, and AdamW for embeddings, routers, norms and biases."""
    inner, outer = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim >= 2 and not name.startswith("embed") and not name.endswith(("router", "shared_weight"))
        (inner if matrix else outer).append(parameter)
    fused = next(model.parameters()).is_cuda
    return [
        Muon(inner, lr=matrix_lr, decay=0.1),
        torch.optim.AdamW(outer, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]
