"""Rotary embeddings by table, where the module that makes them asks the host and so cannot be recorded.

Some compute frequencies on the host in every forward, others look how far positions go. A recorded forward has a row of
the table for each of its positions instead: what the module gives when that position is the last.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from spmoe.models.attention import current_length
from spmoe.models.longrope import changes_in, names_in, rotary_modules

_BLOCK = 4096  # positions computed at once: what they take on the way is small beside the table
_SAMPLES = 8  # random positions that a table is proved on, beside first, last and those around changes


class Table(tuple[Tensor, ...]):
    """What a module gives, one row per position."""  # each: [positions, width]

    def rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Those of positions; what is beyond the table has its last."""  # [1, rows] -> each: [1, rows, width]
        return tuple(values[positions.clamp(max=len(values) - 1)] for values in self)


def use_tables(model: Any, positions: int) -> Callable[[], None]:
    """Give recorded forwards tables of so many positions, where the model needs them; returns how to undo it."""
    exchanged: list[Any] = []
    probe = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
    for module in rotary_modules(model):
        if "forward" in vars(module) or not (kinds := _hosted(module)):
            continue
        try:
            made = {kind: make_table(module, kind, probe, positions) for kind in kinds}
        except Exception:  # whatever a module cannot do when it is called alone
            continue
        if tables := {kind: table for kind, table in made.items() if table is not None}:
            module.forward = _looked_up(module, tables, probe)
            exchanged.append(module)

    def undo() -> None:
        while exchanged:
            del exchanged.pop().forward

    return undo


def table_bytes(model: nn.Module, positions: int, dtype: torch.dtype) -> int:
    """What the tables of a model occupy; it may be without weights."""
    frequencies = 0
    for module in rotary_modules(model):
        for kind in _hosted(module):
            frequencies += len(getattr(module, "inv_freq" if kind is None else f"{kind}_inv_freq", ()))
    return positions * 4 * frequencies * dtype.itemsize  # cosine and sine, each of two halves


def make_table(module: Any, kind: str | None, probe: Tensor, positions: int) -> Table | None:
    """A module's answers for every position, in as few calls as give each what it gets alone; None if that fails."""
    # kind: of layers; probe: any tensor of the dtype and device that answers shall have
    changes = [change for change in changes_in(module.config) if change < positions]
    edges = [0, *changes, positions]
    rng = torch.Generator().manual_seed(0)
    samples = {0, positions - 1, *torch.randint(positions, (_SAMPLES,), generator=rng).tolist()}
    samples |= {place for change in changes for place in (change - 1, change)}
    with torch.inference_mode():
        table = _fill(deepcopy(module), kind, probe, edges)
        for position in sorted(samples):
            alone = _ask(deepcopy(module), kind, probe, range(position, position + 1))  # some remember what they saw
            here = torch.tensor([[position]], device=probe.device)
            if not all(torch.equal(a, b) for a, b in zip(table.rows(here), alone, strict=True)):
                return None
    return table


def _fill(module: Any, kind: str | None, probe: Tensor, edges: list[int]) -> Table:
    table: Table | None = None
    for lower, upper in pairwise(edges):
        for start in range(lower, upper, _BLOCK):
            block = range(start, min(start + _BLOCK, upper))
            answer = _ask(module, kind, probe, block)
            if table is None:
                table = Table(values.new_empty(edges[-1], *values.shape[2:]) for values in answer)
            for into, values in zip(table, answer, strict=True):
                into[block.start : block.stop] = values[0]
    assert table is not None, "there are positions"
    return table


def _ask(module: Any, kind: str | None, probe: Tensor, positions: range) -> tuple[Tensor, ...]:
    """What a module answers when it is asked for these alone."""  # -> each: [1, positions, width]
    ids = torch.arange(positions.start, positions.stop, device=probe.device)[None]
    answer = module.forward(probe, ids, **({} if kind is None else {"layer_type": kind}))
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def _hosted(module: Any) -> list[str | None]:
    """The kinds of layers whose embeddings a module makes with the host's help; None is all of them."""
    anew = "rope_init_fn" in names_in(type(module).forward)  # on the host, in every forward
    types = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    return [kind for kind, name in types.items() if anew or "dynamic" in name or name == "longrope"]


def _looked_up(module: Any, tables: dict[str | None, Table], probe: Tensor) -> Callable[..., Any]:
    """The module's forward, which looks answers up while a forward is recorded."""
    own = module.forward

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        table = tables.get(layer_type)
        alike = x.dtype == probe.dtype and position_ids.ndim == 2
        if current_length() is None or table is None or not alike:
            return own(x, position_ids, **({} if layer_type is None else {"layer_type": layer_type}))
        rows = table.rows(position_ids)
        return rows if len(rows) > 1 else rows[0]

    return forward
