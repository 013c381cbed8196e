"""The contract of a backend: the arithmetic of a layer's experts, one expert batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from spmoe.experts.access import ExpertAccess, ExpertBatch
from spmoe.experts.experts import Experts
from spmoe.types import PROMPT_ROWS

MAX_KERNEL_ROWS = 64  # rows that a grouped kernel takes at once
INVARIANT_ROWS = 16  # up to which a row's result in a grouped kernel does not depend on the other rows

_sequence_rows: ContextVar[Sequence[int]] = ContextVar("sequence_rows", default=())


@contextmanager
def rows_of_sequences(rows: Sequence[int]) -> Iterator[None]:
    """State that a forward inside has so many rows of each of several sequences, one after the other."""
    token = _sequence_rows.set(rows)
    try:
        yield
    finally:
        _sequence_rows.reset(token)


def rows_by_sequence(rows: int) -> list[int]:
    """Return the rows of each sequence in an input of the forward that runs, if it has the rows of all of them.

    Products of many rows round by their number. Computed sequence by sequence, they give each one the result that it
    has alone.
    """
    return [*found] if sum(found := _sequence_rows.get()) == rows and len(found) > 1 else [rows]


_MAX_KERNEL_PASSES = 8  # of MAX_KERNEL_ROWS rows each
_PASS_BYTES = 200 * 10**6  # read at 1 TB/s in the 200 us that the host needs to launch one expert's products

_KERNEL_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
}


def kernel_activation(activation: Any) -> str | None:
    """Return the kernels' name of an activation module; None if they do not implement it."""
    return _KERNEL_ACTIVATIONS.get(type(activation).__name__)


def kernel_row_limit(expert_bytes: int) -> int:
    """Return the most rows for which grouped kernels run experts of this size.

    Kernels read an expert again for every `MAX_KERNEL_ROWS` rows. A product per expert reads it once, but costs the
    host more time than that, unless the expert is large.
    """
    return MAX_KERNEL_ROWS * min(_MAX_KERNEL_PASSES, max(1, _PASS_BYTES // expert_bytes))


class Gate(NamedTuple):
    """How gated experts combine their projections: act(gate) * (up + up_offset), both clamped to `limit` before."""

    activation: str  # the kernels' name
    limit: float = 0.0  # upper bound of gate, and bound of up's magnitude; 0: no clamping
    alpha: float = 1.0  # factor inside the sigmoid of silu
    up_offset: float = 0.0
    interleaved: bool = False  # rows of gate and up alternate; otherwise those of gate come first

    def apply(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """Combine the output of the gate-up projection, in PyTorch."""  # gate_up: [..., 2 * ffn] -> [..., ffn]
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        gate = activation(gate) if self.alpha == 1 else gate * torch.sigmoid(gate * self.alpha)
        return gate * (up + self.up_offset)


def kernel_gate(experts: Any) -> Gate | None:
    """Return the gate of an experts module; None if kernels do not implement it.

    The module's own code must give the gate's result on an example, which reaches beyond every limit.
    """
    activation = kernel_activation(experts.act_fn) if hasattr(experts, "act_fn") else "silu"
    if not experts.has_gate or activation is None:
        return None
    limit = float(getattr(experts, "limit", None) or getattr(experts, "swiglu_limit", None) or 0)
    alpha = float(getattr(experts, "alpha", None) or getattr(experts, "swiglu_alpha", None) or 1)
    candidates = [Gate(activation)]
    if limit > 0:
        candidates += [Gate(activation, limit), Gate("silu", limit, alpha, 1.0)]
    few = torch.tensor([-1e4, -20.0, -2.0, -0.3, 0.4, 3.0, 30.0, 1e4])
    example = torch.cat((few, few.roll(3)))[None]
    for candidate in [gate._replace(interleaved=order) for order in (False, True) for gate in candidates]:
        try:
            expected = candidate.apply(example, getattr(experts, "act_fn", silu))
            if torch.allclose(experts._apply_gate(example), expected):
                return candidate
        except (RuntimeError, TypeError, AttributeError):
            return None
    return None


def kernel_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that a kernel raises if it cannot run on this machine or on these tensors."""
    found: list[type[Exception]] = [ImportError, RuntimeError, ValueError]
    with suppress(ImportError):
        from triton.errors import TritonError  # compilation failed, or the device lacks resources

        found.append(TritonError)
    return tuple(found)


class ExpertsForward(Protocol):
    """Replaces the forward of one experts module."""

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each row's routed experts."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        ...


class Backend(Protocol):
    """Runs experts on one kind of device."""

    def experts_forward(self, layer: int, experts: Experts) -> ExpertsForward:
        """Return the forward of one layer's experts module."""
        ...

    def synchronize(self) -> None:
        """Wait for everything launched so far; for measurements."""
        ...


class ExpertArithmetic(Protocol):
    """Computes experts batch by batch."""

    def run_experts(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, batches: Iterable[ExpertBatch]
    ) -> Tensor:
        """Return the weighted sum of each row's routed experts, which arrive in any order."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        ...


class HostExperts:
    """Forward of one layer whose routed experts the host reads before it computes."""

    def __init__(self, layer: int, access: ExpertAccess, arithmetic: ExpertArithmetic) -> None:
        self._layer = layer
        self._access = access
        self._arithmetic = arithmetic

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        needed, shares = routed_experts(index)
        with closing(self._access.use(self._layer, needed, shares=shares)) as batches:
            return self._arithmetic.run_experts(experts, hidden, index, weights, batches)


def routed_experts(index: Tensor) -> tuple[list[int], list[float]]:
    """Return the experts that rows are routed to and, for a prompt, the share of rows of each. Waits for the device."""
    # index: [rows, top_k]
    if len(index) < PROMPT_ROWS:
        return torch.unique(index).tolist(), []
    needed, counts = torch.stack(torch.unique(index, return_counts=True)).tolist()
    return needed, [count / len(index) for count in counts]
