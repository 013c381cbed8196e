"""Fused kernels for norms, linear layers, gated MLPs, routers and rotary positions of a model.

Each module is replaced only after the kernel reproduced its output on random inputs, on this device and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional

from spmoe.backends.base import kernel_activation, rows_by_sequence
from spmoe.models.fused_qkv import FusedProjections, parallel_linears
from spmoe.models.rotary import RotaryKernels

_ROWS = 16  # rows of the random inputs
_MAX_ROWS = 64  # that fused linear layers and routers take
_SCALES = (1.0, 100.0, 0.01, 1.0, 10.0, 0.001, 1.0, 0.1)  # of the random inputs

Forward = Callable[[Tensor], Any]


def fuse(model: nn.Module) -> Callable[[], None]:
    """Replace the forward of every module that a kernel reproduces; return a function to undo it.

    Nothing is replaced on devices without kernels. Weights are looked up at each call, as the modules do.
    """
    fused: list[Any] = []
    rotary = RotaryKernels()
    with torch.inference_mode():
        for module in model.modules():
            for layer, forward in _fused_projections(module):
                layer.forward = forward
                fused.append(layer)
            if (fused_forward := _fused_forward(module, rotary)) is not None:
                module.forward = fused_forward
                fused.append(module)

    def undo() -> None:
        while fused:
            del fused.pop().forward

    return undo


def split_sequences(model: nn.Module) -> Callable[[], None]:
    """Let layers that `fuse` has not replaced compute the rows of several sequences one sequence after the other.

    These are linear layers, and routers with a matrix of their own. Return a function to undo it.
    """
    split: list[Any] = []
    for module in model.modules():
        others = [p for child in module.children() for p in child.parameters() if p.ndim > 1 and 1 not in p.shape]
        has_matrix = any(p.ndim == 2 for p in module.parameters(recurse=False)) and not others
        if has_matrix and not isinstance(module, nn.Embedding) and "forward" not in vars(module):
            cast(Any, module).forward = _split_forward(module.forward)
            split.append(module)

    def undo() -> None:
        while split:
            del split.pop().forward

    return undo


def _split_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        others = any(isinstance(one, Tensor) and one.ndim > 1 for one in (*args, *kwargs.values()))
        parts = _by_sequence(x) if isinstance(x, Tensor) and not others else [x]
        if len(parts) == 1:
            return own(x, *args, **kwargs)
        return _joined([own(part, *args, **kwargs) for part in parts])

    return forward


def _fused_forward(module: Any, rotary: RotaryKernels) -> Callable[..., Any] | None:
    """Return a verified forward with fused kernels, or None."""
    weight: Any = getattr(module, "weight", next(module.parameters(), None))
    if not _is_plain(weight) or "forward" in vars(module):
        return None
    try:
        if any(True for _ in module.children()):
            return _gated(module) or rotary.fused_forward(module, weight.device, weight.dtype)
        if type(module) is nn.Linear:
            return _linear(module)
        if len(list(module.parameters())) > 1:
            return None
        if weight.ndim == 1:
            return _norm(module)
        if weight.ndim == 2 and isinstance(getattr(module, "top_k", None), int):
            return _router(module)
    except Exception:  # the module rejects random inputs, or the kernel does not run on this device
        return None
    return None


def _fused_projections(module: nn.Module) -> list[tuple[Any, Callable[..., Any]]]:
    """Return a module's parallel linear layers with verified forwards that compute all of them in one kernel."""
    layers = parallel_linears(module)
    if not layers or not all(_is_plain(layer.weight) for layer in layers):
        return []
    try:
        group, states = FusedProjections(layers), _states(layers[0].weight)
        found, first = group.all_results(states), group.all_results(states[:1])
        for number, layer in enumerate(layers):
            if not torch.equal(group.single(number, states[:1]), first[number]):
                return []
            if not _linear_matches(layer, states, found[number], first[number]):
                return []
    except Exception:  # the kernel does not run on this device
        return []
    return [
        (layer, _with_fallback(layer, _MAX_ROWS, group.forward_of(number), one_sequence=partial(group.single, number)))
        for number, layer in enumerate(layers)
    ]


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
    """Fuse an RMS norm."""
    from spmoe.backends.kernels.dense import MAX_NORM_SIZE, rms_norm

    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or len(module.weight) > MAX_NORM_SIZE:
        return None
    states, precision = _states(module.weight), torch.finfo(module.weight.dtype).eps
    found, expected = rms_norm(states, module.weight, eps), module.forward(states)
    # two roundings may differ: of the normalized value, and of its product with the weight
    if not _close(found, expected, max(2 * precision, 1e-6) * expected.float().abs() + 1e-6):
        return None
    return _with_fallback(module, math.inf, lambda x: rms_norm(x, module.weight, eps))


def _linear(module: nn.Linear) -> Callable[..., Any] | None:
    """Fuse a linear layer for few rows."""
    from spmoe.backends.kernels.dense import small_batch_linear

    def forward(x: Tensor) -> Tensor:
        width = module.weight.shape[1]
        return small_batch_linear(x.reshape(-1, width), module.weight, module.bias).view(*x.shape[:-1], -1)

    states = _states(module.weight)
    if not _linear_matches(module, states, forward(states), forward(states[:1])):
        return None
    return _with_fallback(module, _MAX_ROWS, forward)


def _linear_matches(module: nn.Linear, states: Tensor, found: Tensor, first_alone: Tensor) -> bool:
    """Return whether the results equal the module's up to rounding, and the first row does not depend on the others."""
    expected = module.forward(states)
    return _close(found, expected, _rounding(states, module.weight, expected)) and torch.equal(first_alone, found[:1])


def _gated(module: Any) -> Callable[..., Any] | None:
    """Fuse gate, activation and up projection of a gated MLP into one kernel."""
    from spmoe.backends.kernels.dense import gated_linear

    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = kernel_activation(getattr(module, "act_fn", None))
    if activation is None or any(type(layer) is not nn.Linear or layer.bias is not None for layer in (gate, up, down)):
        return None
    gate, up, down = cast(nn.Linear, gate), cast(nn.Linear, up), cast(nn.Linear, down)
    if gate.weight.shape != up.weight.shape or not (gate.weight.is_contiguous() and up.weight.is_contiguous()):
        return None

    def forward(x: Tensor) -> Tensor:
        y = gated_linear(x.reshape(-1, x.shape[-1]), gate.weight, up.weight, activation)
        return cast(Tensor, down(y.view(*x.shape[:-1], -1)))

    states = _states(gate.weight)
    found = gated_linear(states, gate.weight, up.weight, activation)
    own = module.act_fn(gate.forward(states)) * up.forward(states)
    if not torch.equal(gated_linear(states[:1], gate.weight, up.weight, activation), found[:1]):
        return None
    if not _as_accurate(found, own, _gated_float64(states, gate.weight, up.weight, module.act_fn)):
        return None
    # the whole module must be exactly these steps, so that an MLP that does more keeps its own forward
    if not torch.equal(module.forward(states), down.forward(own)):
        return None
    return _with_fallback(module, _MAX_ROWS, forward, lambda: gate.weight)


def _gated_float64(x: Tensor, gate: Tensor, up: Tensor, activation: Forward) -> Tensor:
    """Compute a gated layer in float64, 1024 outputs at a time to bound memory."""
    # x: [rows, k], gate and up: [n, k] -> [rows, n]
    wide = x.double()
    slices = zip(torch.split(gate, 1024), torch.split(up, 1024), strict=True)
    return torch.cat([activation(wide @ g.double().T) * (wide @ u.double().T) for g, u in slices], dim=-1)


def _as_accurate(found: Tensor, own: Tensor, exact: Tensor) -> bool:
    """Return whether no row's error exceeds twice the error of the module's own result."""
    if found.shape != own.shape or found.dtype != own.dtype:
        return False
    errors = [(t.double() - exact).abs().amax(dim=-1) for t in (found, own)]
    slack = max(torch.finfo(found.dtype).eps, 2.0**-20) * exact.abs().amax(dim=-1)
    return bool((errors[0] <= 2 * errors[1] + slack).all())


def _router(module: Any) -> Callable[..., Any] | None:
    """Fuse a router: linear layer, softmax and top-k, with or without renormalized weights."""
    states = torch.cat([_states(module.weight, seed) for seed in range(4)])
    expected = module.forward(states)
    if not isinstance(expected, tuple) or len(expected) != 3 or not all(isinstance(t, Tensor) for t in expected):
        return None
    variants = _router_variants(module, expected)
    forward = next((variant for variant in variants if _same_routing(variant, states, expected, module.weight)), None)
    return forward and _with_fallback(module, _MAX_ROWS, forward, flat=True)


def _router_variants(module: Any, expected: tuple[Tensor, ...]) -> Iterator[Forward]:
    """Yield the kernel's variants: with and without renormalization and scaling of the weights."""
    from spmoe.backends.kernels.dense import RouterOutputFormat, route

    scales = dict.fromkeys((1.0, float(getattr(module, "routed_scaling_factor", 1.0))))
    for renormalise, scale in product((True, False), scales):
        answer = RouterOutputFormat(expected[0].dtype, expected[1].dtype, renormalise, scale)
        yield lambda x, answer=answer: route(x, module.weight, module.top_k, answer)  # type: ignore[misc]


def _same_routing(forward: Forward, states: Tensor, expected: tuple[Tensor, ...], weight: Tensor) -> bool:
    """Return whether logits, weights and experts agree; experts only where rounding cannot change the selection."""
    batches = [forward(x) for x in states.view(-1, _ROWS, states.shape[-1])]
    found = tuple(torch.cat(outputs) for outputs in zip(*batches, strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(found, expected, strict=True)):
        return False
    if not _close(found[0], expected[0], _rounding(states, weight, expected[0])):
        return False
    logits, top_k = expected[0].float(), expected[1].shape[-1]
    error = 2 * (found[0].float() - logits).abs().amax(dim=-1)
    order = functional.pad(logits, (0, 1), value=-math.inf).sort(dim=-1, descending=True).values
    clear = (order[:, top_k - 1] - order[:, top_k] > error + 1e-5) & (order[:, 0] - order[:, top_k - 1] < 50)
    by_expert = [(index.sort(dim=-1), weights.float()) for _, weights, index in (found, expected)]
    experts = [index.values[clear] for index, _ in by_expert]
    ours, own = (weights.gather(1, index.indices)[clear] for index, weights in by_expert)
    # the relative error of a softmax weight is at most the exponential of twice the logits' error, minus 1
    tolerance = error[clear, None].expm1() + 4 * torch.finfo(found[1].dtype).eps + 1e-5
    return float(clear.float().mean()) > 0.25 and torch.equal(*experts) and _close(ours, own, tolerance * own + 1e-7)


def _states(weight: Tensor, seed: int = 0) -> Tensor:
    """Draw random inputs of several scales, some with a mean far from zero, some with one outlier dimension."""
    rng = torch.Generator(weight.device).manual_seed(seed)
    states = torch.randn(_ROWS, weight.shape[-1], generator=rng, device=weight.device)
    states[3::4] += 2.0
    states[2::4, -1] *= 30.0
    scales = torch.tensor(_SCALES * 2, device=weight.device)
    return (states * scales[:, None]).to(weight.dtype)  # [_ROWS, k]


def _rounding(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Bound the difference between two orders of summation of `x @ weight.T`."""  # [rows, n]
    length = weight.shape[-1]
    norms = (torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32) for t in (x, weight))
    typical = torch.outer(*norms) / math.sqrt(length)  # size of a sum of `length` terms with random signs
    precision = torch.finfo(y.dtype).eps
    return (8 * precision + 2.0**-21 * math.sqrt(length)) * typical + 2 * precision * y.float().abs()


def _close(found: Tensor, expected: Tensor, tolerance: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool(((found.float() - expected.float()).abs() <= tolerance).all())  # False for NaN


def _with_fallback(
    module: Any,
    max_rows: float,
    fused: Forward,
    weight_of: Callable[[], Tensor] | None = None,
    flat: bool = False,
    one_sequence: Forward | None = None,
) -> Callable[..., Any]:
    """Return a forward that uses the kernel for plain tensors of few rows, else the module's own forward.

    The kernel was verified only for inputs of the weight's dtype and device; `flat` requires [rows, k]. Many rows of
    several sequences are computed one sequence after the other, with `one_sequence` in place of `fused`.
    """
    own, weight_of = module.forward, weight_of or (lambda: cast(Tensor, module.weight))

    def few(x: Tensor, kernel: Forward) -> Any:
        weight = weight_of()
        same_kind = x.dtype == weight.dtype and x.device == weight.device and x.shape[-1] == weight.shape[-1]
        few_rows = 0 < x.numel() <= max_rows * x.shape[-1] and (x.ndim == 2 or not flat)
        return kernel(x) if same_kind and few_rows and not is_functorch_wrapped_tensor(x) else own(x)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], Tensor) or kwargs:
            return own(*args, **kwargs)
        (x,) = args
        parts = _by_sequence(x) if x.numel() > max_rows * x.shape[-1] else [x]
        return few(x, fused) if len(parts) == 1 else _joined([few(part, one_sequence or fused) for part in parts])

    return forward


def _by_sequence(x: Tensor) -> Sequence[Tensor]:
    """Split the rows of several sequences; return the tensor alone if it does not hold the rows of all of them."""
    if x.ndim < 2:
        return [x]
    rows = rows_by_sequence(x.numel() // x.shape[-1])
    return torch.split(x, rows, dim=-2) if len(rows) > 1 and x.shape[-2] == sum(rows) else [x]


def _joined(results: list[Any]) -> Any:
    """Join the results of a module for the rows of several sequences: tensors, or tuples of tensors."""
    if isinstance(results[0], tuple):
        return tuple(_joined(list(parts)) for parts in zip(*results, strict=True))
    return torch.cat(results, dim=-2)
