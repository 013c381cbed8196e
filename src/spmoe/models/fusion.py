"""Norms, linear layers, gated MLPs, routers and rotary positions by kernels, wherever that is proved to be the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional

from spmoe.backends.base import kernel_name
from spmoe.models.fused_qkv import FusedProjections, parallel_linears
from spmoe.models.rotary import RotaryKernels

_ROWS = 16  # of random states that forms are proved on, and the most that linear layers and routers are fused for
_SCALES = (1.0, 100.0, 0.01, 1.0, 10.0, 0.001, 1.0, 0.1)

Form = Callable[[Tensor], Any]


def fuse(model: nn.Module) -> Callable[[], None]:
    """Replace the forward of every module that a kernel reproduces; returns how to undo it.

    Where kernels cannot run, nothing is replaced. Weights are looked up at each call, as the module itself does.
    """
    fused: list[Any] = []
    rotary = RotaryKernels()
    with torch.inference_mode():
        for module in model.modules():
            for layer, form in _proved_siblings(module):
                layer.forward = form
                fused.append(layer)
            if (forward := _proved_form(module, rotary)) is not None:
                module.forward = forward
                fused.append(module)

    def undo() -> None:
        while fused:
            del fused.pop().forward

    return undo


def _proved_form(module: Any, rotary: RotaryKernels) -> Callable[..., Any] | None:
    """A forward that is as good as the module's own, and faster for few rows."""
    weight: Any = getattr(module, "weight", next(module.parameters(), None))
    if not _is_plain(weight) or "forward" in vars(module):
        return None
    try:
        if any(True for _ in module.children()):
            return _gated(module) or rotary.form(module, weight.device, weight.dtype)
        if type(module) is nn.Linear:
            return _linear(module)
        if len(list(module.parameters())) > 1:
            return None
        if weight.ndim == 1:
            return _norm(module)
        if weight.ndim == 2 and isinstance(getattr(module, "top_k", None), int):
            return _router(module)
    except Exception:  # whatever a module cannot do with random states, or a device with a kernel
        return None
    return None


def _proved_siblings(module: nn.Module) -> list[tuple[Any, Callable[..., Any]]]:
    """Linear layers that are fed alike, with forwards of which the first that is called computes all of them."""
    layers = parallel_linears(module)
    if not layers or not all(_is_plain(layer.weight) for layer in layers):
        return []
    try:
        group, states = FusedProjections(layers), _states(layers[0].weight)
        found, first = group.merge_prefetches(states), group.merge_prefetches(states[:1])
        for number, layer in enumerate(layers):
            if not torch.equal(group.alone(number, states[:1]), first[number]):
                return []
            if not _linear_is_same(layer, states, found[number], first[number]):
                return []
    except Exception:  # whatever a device cannot do with a kernel
        return []
    return [(layer, _with_own(layer, _ROWS, group.form(number))) for number, layer in enumerate(layers)]


def _is_plain(weight: Any) -> bool:
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_contiguous():
        return False
    return _kernels_run_on(weight)


def _kernels_run_on(weight: Tensor) -> bool:
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    try:
        from spmoe.backends.kernels.dense import supports_device
    except ImportError:
        return False
    return supports_device(weight.device)


def _norm(module: Any) -> Callable[..., Any] | None:
    from spmoe.backends.kernels.dense import MAX_NORM_SIZE, rms_norm

    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or len(module.weight) > MAX_NORM_SIZE:
        return None
    states, precision = _states(module.weight), torch.finfo(module.weight.dtype).eps
    found, expected = rms_norm(states, module.weight, eps), module.forward(states)
    # the last bit of what is multiplied with the weight, and that of the product
    if not _close(found, expected, max(2 * precision, 1e-6) * expected.float().abs() + 1e-6):
        return None
    return _with_own(module, math.inf, lambda x: rms_norm(x, module.weight, eps))


def _linear(module: nn.Linear) -> Callable[..., Any] | None:
    from spmoe.backends.kernels.dense import small_batch_linear

    def form(x: Tensor) -> Tensor:
        width = module.weight.shape[1]
        return small_batch_linear(x.reshape(-1, width), module.weight, module.bias).view(*x.shape[:-1], -1)

    states = _states(module.weight)
    if not _linear_is_same(module, states, form(states), form(states[:1])):
        return None
    return _with_own(module, _ROWS, form)


def _linear_is_same(module: nn.Linear, states: Tensor, found: Tensor, alone: Tensor) -> bool:
    """Whether these are the module's results, and the first row's does not depend on the others."""
    expected = module.forward(states)
    return _close(found, expected, _rounding(states, module.weight, expected)) and torch.equal(alone, found[:1])


def _gated(module: Any) -> Callable[..., Any] | None:
    """An MLP whose gate, activation and product are one kernel."""
    from spmoe.backends.kernels.dense import gated_linear

    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = kernel_name(getattr(module, "act_fn", None))
    if activation is None or any(type(part) is not nn.Linear or part.bias is not None for part in (gate, up, down)):
        return None
    gate, up, down = cast(nn.Linear, gate), cast(nn.Linear, up), cast(nn.Linear, down)
    if gate.weight.shape != up.weight.shape or not (gate.weight.is_contiguous() and up.weight.is_contiguous()):
        return None

    def form(x: Tensor) -> Tensor:
        y = gated_linear(x.reshape(-1, x.shape[-1]), gate.weight, up.weight, activation)
        return cast(Tensor, down(y.view(*x.shape[:-1], -1)))

    states = _states(gate.weight)
    between = gated_linear(states, gate.weight, up.weight, activation)
    own = module.act_fn(gate.forward(states)) * up.forward(states)
    if not torch.equal(gated_linear(states[:1], gate.weight, up.weight, activation), between[:1]):
        return None
    if not _as_exact(between, own, _gated_exactly(states, gate.weight, up.weight, module.act_fn)):
        return None
    # the whole in one piece, so that a module that does more than this is left alone
    if not torch.equal(module.forward(states), down.forward(own)):
        return None
    return _with_own(module, _ROWS, form, lambda: gate.weight)


def _gated_exactly(x: Tensor, gate: Tensor, up: Tensor, activation: Form) -> Tensor:
    """By float64, a slice of the weights at a time."""  # x: [rows, k], gate and up: [n, k] -> [rows, n]
    wide = x.double()
    slices = zip(torch.split(gate, 1024), torch.split(up, 1024), strict=True)
    return torch.cat([activation(wide @ g.double().T) * (wide @ u.double().T) for g, u in slices], dim=-1)


def _as_exact(found: Tensor, own: Tensor, exact: Tensor) -> bool:
    """Whether no row is further from the truth than twice what the module's own is."""
    if found.shape != own.shape or found.dtype != own.dtype:
        return False
    errors = [(t.double() - exact).abs().amax(dim=-1) for t in (found, own)]
    slack = max(torch.finfo(found.dtype).eps, 2.0**-20) * exact.abs().amax(dim=-1)
    return bool((errors[0] <= 2 * errors[1] + slack).all())


def _router(module: Any) -> Callable[..., Any] | None:
    """Softmax over a linear layer, of which the best are kept; with their weights adding up to something, or not."""
    states = torch.cat([_states(module.weight, seed) for seed in range(4)])
    expected = module.forward(states)
    if not isinstance(expected, tuple) or len(expected) != 3 or not all(isinstance(t, Tensor) for t in expected):
        return None
    forms = _router_forms(module, expected)
    form = next((form for form in forms if _same_routes(form, states, expected, module.weight)), None)
    return form and _with_own(module, _ROWS, form, flat=True)


def _router_forms(module: Any, expected: tuple[Tensor, ...]) -> Iterator[Form]:
    from spmoe.backends.kernels.dense import RouterOutputFormat, route

    scales = dict.fromkeys((1.0, float(getattr(module, "routed_scaling_factor", 1.0))))
    for renormalise, scale in product((True, False), scales):
        answer = RouterOutputFormat(expected[0].dtype, expected[1].dtype, renormalise, scale)
        yield lambda x, answer=answer: route(x, module.weight, module.top_k, answer)  # type: ignore[misc]


def _same_routes(form: Form, states: Tensor, expected: tuple[Tensor, ...], weight: Tensor) -> bool:
    """Whether logits, weights and numbers agree; the latter where the difference of the logits cannot change them."""
    batches = [form(x) for x in states.view(-1, _ROWS, states.shape[-1])]
    found = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(found, expected, strict=True)):
        return False
    if not _close(found[0], expected[0], _rounding(states, weight, expected[0])):
        return False
    logits, top_k = expected[0].float(), expected[1].shape[-1]
    moved = 2 * (found[0].float() - logits).abs().amax(dim=-1)
    order = functional.pad(logits, (0, 1), value=-math.inf).sort(dim=-1, descending=True).values
    clear = (order[:, top_k - 1] - order[:, top_k] > moved + 1e-5) & (order[:, 0] - order[:, top_k - 1] < 50)
    by_number = [(index.sort(dim=-1), weights.float()) for _, weights, index in (found, expected)]
    numbers = [index.values[clear] for index, _ in by_number]
    ours, own = (weights.gather(1, index.indices)[clear] for index, weights in by_number)
    # no weight changes by a larger share than twice what the logits do
    share = moved[clear, None].expm1() + 4 * torch.finfo(found[1].dtype).eps + 1e-5
    return float(clear.float().mean()) > 0.25 and torch.equal(*numbers) and _close(ours, own, share * own + 1e-7)


def _states(weight: Tensor, seed: int = 0) -> Tensor:
    """Random inputs of several scales, some of them far from a mean of zero, some with one that outshines the rest."""
    rng = torch.Generator(weight.device).manual_seed(seed)
    states = torch.randn(_ROWS, weight.shape[-1], generator=rng, device=weight.device)
    states[3::4] += 2.0
    states[2::4, -1] *= 30.0
    scales = torch.tensor(_SCALES * 2, device=weight.device)
    return (states * scales[:, None]).to(weight.dtype)


def _rounding(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """What sums of products may differ by when they are added in another order, or rounded before they are added."""
    length = weight.shape[-1]
    lengths = (torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32) for t in (x, weight))
    typical = torch.outer(*lengths) / math.sqrt(length)  # of sums of so many terms of random signs
    precision = torch.finfo(y.dtype).eps
    return (8 * precision + 2.0**-21 * math.sqrt(length)) * typical + 2 * precision * y.float().abs()


def _close(found: Tensor, expected: Tensor, allowed: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool(((found.float() - expected.float()).abs() <= allowed).all())  # what is not a number is not close


def _with_own(
    module: Any, most_rows: float, form: Form, weight_of: Callable[[], Tensor] | None = None, flat: bool = False
) -> Callable[..., Any]:
    """The form for what it was proved on: plain tensors of the weight's kind and few rows; else the module's own."""
    own, weight_of = module.forward, weight_of or (lambda: cast(Tensor, module.weight))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            (x,), weight = args, weight_of()
            alike = x.dtype == weight.dtype and x.device == weight.device and x.shape[-1] == weight.shape[-1]
            few = 0 < x.numel() <= most_rows * x.shape[-1] and (x.ndim == 2 or not flat)
            if alike and few and not is_functorch_wrapped_tensor(x):
                return form(x)
        return own(*args, **kwargs)

    return forward
