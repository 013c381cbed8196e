"""Rotary embeddings in CUDA graphs: one kernel that applies them, and tables for modules that need the host.

`RotaryKernels` replaces the function that rotates queries and keys. `use_tables` replaces modules whose computation of
the embeddings cannot be captured, because it computes frequencies on the host or branches on the largest position. The
tables hold what the module returns for each position when that position is the last. Both are used only if the result
is equal in every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from spmoe.models.attention import current_ranges
from spmoe.models.longrope import names_used_by, rotary_modules, switch_positions

_FUNCTION = "apply_rotary_pos_emb"  # its name in transformers, where kernels may replace it
_BLOCK = 4096  # positions computed at once; bounds temporary memory
_SAMPLES = 8  # random positions to check a table at, besides the first, the last and those around LongRoPE switches


class RotaryKernels:
    """Rotary functions of one model's modules as a kernel, verified once per function, device and dtype."""

    def __init__(self) -> None:
        self._verified: dict[tuple[Callable[..., Any], torch.device, torch.dtype], bool] = {}

    def fused_forward(self, module: Any, device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
        """Return the module's own forward with its rotary function replaced by the kernel; None if results differ.

        The copy of the forward runs the same code with other globals, so the module's other steps stay its own.
        """
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            return None
        if _FUNCTION not in forward.__code__.co_names:
            return None
        own = forward.__globals__.get(_FUNCTION)
        if not callable(own) or not self._matches(own, device, dtype):
            return None
        names = {**forward.__globals__, _FUNCTION: _with_kernel(own)}
        copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        copy.__kwdefaults__ = forward.__kwdefaults__
        return MethodType(copy, module)

    def _matches(self, own: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
        key = (own, device, dtype)
        if key not in self._verified:
            self._verified[key] = False  # stays so if the check raises
            self._verified[key] = kernel_matches(own, device, dtype)
        return self._verified[key]


def _with_kernel(own: Callable[..., Any]) -> Callable[..., Any]:
    from spmoe.backends.kernels.rotary import apply_rotary

    @wraps(own)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 4 and _kernel_accepts(*args):
            return apply_rotary(*args)
        return own(*args, **kwargs)

    return apply


def _kernel_accepts(query: Any, key: Any, cos: Any, sin: Any) -> bool:
    """Return whether the arguments have the types and layouts that the kernel was verified with."""
    given = (query, key, cos, sin)
    if not all(isinstance(t, Tensor) and not is_functorch_wrapped_tensor(t) for t in given):
        return False
    if len({(t.dtype, t.device) for t in given}) > 1 or query.ndim != 4 or key.ndim != 4 or cos.ndim != 3:
        return False
    batch, _, rows, dim = query.shape
    same_rows = (key.shape[0], key.shape[2], key.shape[3]) == (batch, rows, dim) and query.numel() > 0
    angles = cos.shape == sin.shape and cos.shape[0] in (1, batch) and cos.shape[1:] == (rows, dim)
    return same_rows and angles and dim % 2 == 0 and query.stride(3) == key.stride(3) == 1


def kernel_matches(own: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel rotates random queries and keys to the same bits as a model's own function."""
    from spmoe.backends.kernels.rotary import apply_rotary

    rng = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device).to(dtype)

    for dim in (16, 12):
        query, key = random(1, 5, 4, dim).transpose(1, 2), random(1, 5, 2, dim).transpose(1, 2)
        angles = random(1, 5, dim), random(1, 5, dim)
        for found, expected in zip(apply_rotary(query, key, *angles), own(query, key, *angles), strict=True):
            if found.dtype != expected.dtype or not torch.equal(found, expected):
                return False
    return True


class RotaryTable(tuple[Tensor, ...]):
    """A rotary module's outputs (cosine and sine, or one tensor), one row per position."""  # each: [positions, width]

    def rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Look positions up; those beyond the table get its last row."""  # [1, rows] -> each: [1, rows, width]
        return tuple(values[positions.clamp(max=len(values) - 1)] for values in self)


def use_tables(model: Any, positions: int) -> Callable[[], None]:
    """Give captured forwards tables of `positions` rows where the model needs them; return a function to undo it."""
    replaced: list[Any] = []
    probe = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
    for module in rotary_modules(model):
        if "forward" in vars(module) or not (layer_types := _layer_types_on_host(module)):
            continue
        try:
            made = {layer_type: make_table(module, layer_type, probe, positions) for layer_type in layer_types}
        except Exception:  # a module that cannot be called on its own
            continue
        if tables := {layer_type: table for layer_type, table in made.items() if table is not None}:
            module.forward = _table_forward(module, tables, probe)
            replaced.append(module)

    def undo() -> None:
        while replaced:
            del replaced.pop().forward

    return undo


def table_bytes(model: nn.Module, positions: int, dtype: torch.dtype) -> int:
    """Return the memory of a model's tables, in bytes; the model may be on the meta device."""
    frequencies = 0
    for module in rotary_modules(model):
        for layer_type in _layer_types_on_host(module):
            frequencies += len(getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq", ()))
    return positions * 4 * frequencies * dtype.itemsize  # cosine and sine, of two halves each


def make_table(module: Any, layer_type: str | None, probe: Tensor, positions: int) -> RotaryTable | None:
    """Compute a module's outputs for every position; None if they differ from those of single positions.

    `probe` is any tensor with the dtype and device that the outputs shall have.
    """
    switches = [switch for switch in switch_positions(module.config) if switch < positions]
    edges = [0, *switches, positions]
    rng = torch.Generator().manual_seed(0)
    samples = {0, positions - 1, *torch.randint(positions, (_SAMPLES,), generator=rng).tolist()}
    samples |= {position for switch in switches for position in (switch - 1, switch)}
    with torch.inference_mode():
        table = _fill(deepcopy(module), layer_type, probe, edges)
        for position in sorted(samples):
            # a fresh copy each time: some modules remember the largest position so far
            alone = _embeddings(deepcopy(module), layer_type, probe, range(position, position + 1))
            row = table.rows(torch.tensor([[position]], device=probe.device))
            if not all(torch.equal(a, b) for a, b in zip(row, alone, strict=True)):
                return None
    return table


def _fill(module: Any, layer_type: str | None, probe: Tensor, edges: list[int]) -> RotaryTable:
    """Fill a table in blocks that do not cross an edge."""
    table: RotaryTable | None = None
    for lower, upper in pairwise(edges):
        for start in range(lower, upper, _BLOCK):
            block = range(start, min(start + _BLOCK, upper))
            outputs = _embeddings(module, layer_type, probe, block)
            if table is None:
                table = RotaryTable(values.new_empty(edges[-1], *values.shape[2:]) for values in outputs)
            for into, values in zip(table, outputs, strict=True):
                into[block.start : block.stop] = values[0]
    assert table is not None, "there is at least one position"
    return table


def _embeddings(module: Any, layer_type: str | None, probe: Tensor, positions: range) -> tuple[Tensor, ...]:
    """Call a rotary module for these positions only."""  # -> each: [1, positions, width]
    ids = torch.arange(positions.start, positions.stop, device=probe.device)[None]
    output = module.forward(probe, ids, **({} if layer_type is None else {"layer_type": layer_type}))
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _layer_types_on_host(module: Any) -> list[str | None]:
    """Return the layer types whose embeddings need the host in every forward; None stands for all layers."""
    computes_frequencies = "rope_init_fn" in names_used_by(type(module).forward)
    types = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    return [kind for kind, name in types.items() if computes_frequencies or "dynamic" in name or name == "longrope"]


def _table_forward(module: Any, tables: dict[str | None, RotaryTable], probe: Tensor) -> Callable[..., Any]:
    """Return a forward that reads the tables while a forward is captured, else calls the module's own."""
    own = module.forward

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        table = tables.get(layer_type)
        same_kind = x.dtype == probe.dtype and position_ids.ndim == 2
        if current_ranges() is None or table is None or not same_kind:
            return own(x, position_ids, **({} if layer_type is None else {"layer_type": layer_type}))
        rows = table.rows(position_ids)
        return rows if len(rows) > 1 else rows[0]

    return forward
