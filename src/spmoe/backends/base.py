"""The contract of a backend: the arithmetic of a layer's experts, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spmoe.experts.batches import ExpertBatch
from spmoe.experts.source import ExpertSource
from spmoe.types import PROMPT_ROWS

MOST_ROWS = 64  # that a kernel runs an expert for at once
_MOST_PARTS = 8  # of so many rows, run one after the other
_WORTH_READING = 200 * 10**6  # bytes that a device of 1 TB/s reads while the host submits a product, which takes 200 us

_KERNELS_CALL_IT = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
}


def kernel_name(activation: Any) -> str | None:
    """The kernels' name for an activation; None if they do not know it."""
    return _KERNELS_CALL_IT.get(type(activation).__name__)


def kernel_rows(expert_bytes: int) -> int:
    """The most rows that experts of this size are run for by kernels, which read them again for every `MOST_ROWS`.

    A product for each expert reads it once, but costs the host longer than that takes, unless it is large.
    """
    return MOST_ROWS * min(_MOST_PARTS, max(1, _WORTH_READING // expert_bytes))


def gate_activation(experts: Any) -> str | None:
    """The kernels' name for what gated experts without biases do between their products; None if that is another thing.

    Which is act(gate) * up, the halves side by side and never bounded, as an example shows.
    """
    if not experts.has_gate or experts.has_bias or experts.is_transposed:
        return None
    few = torch.tensor([-1e4, -20.0, -2.0, -0.3, 0.4, 3.0, 30.0, 1e4])
    gate, up = few, few.roll(3)
    try:
        plain = torch.allclose(experts._apply_gate(torch.cat((gate, up))[None])[0], experts.act_fn(gate) * up)
    except (RuntimeError, TypeError, AttributeError):
        return None
    return kernel_name(experts.act_fn) if plain else None


def kernel_failures() -> tuple[type[Exception], ...]:
    """What running a kernel may raise that says no more than that it does not run here, or not on such tensors."""
    found: list[type[Exception]] = [ImportError, RuntimeError, ValueError]
    with suppress(ImportError):
        from triton.errors import TritonError  # a compiler that refuses it, a device with too little for it

        found.append(TritonError)
    return tuple(found)


class ExpertsForward(Protocol):
    """What an experts module calls in place of its own forward."""

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each row's experts."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        ...


class Backend(Protocol):
    """Runs experts on one kind of device."""

    def port(self, layer: int, source: ExpertSource) -> ExpertsForward:
        """What one layer's experts module is to call."""
        ...

    def synchronize(self) -> None:
        """Wait for everything submitted so far; for measurements."""
        ...


class ExpertArithmetic(Protocol):
    """Runs experts as they come."""

    def run_experts(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, batches: Iterable[ExpertBatch]
    ) -> Tensor:
        """The weighted sum of each row's experts, whatever the order in which they arrive."""
        # hidden: [rows, hidden], index and weights: [rows, top_k] -> [rows, hidden]
        ...


class HostExperts:
    """Takes a layer's experts from an `ExpertSource`; the router's choice is read by the host first."""

    def __init__(self, layer: int, source: ExpertSource, arithmetic: ExpertArithmetic) -> None:
        self._layer = layer
        self._source = source
        self._arithmetic = arithmetic

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        needed, shares = routed_experts(index)
        batches = self._source.use(self._layer, needed, shares=shares)
        return self._arithmetic.run_experts(experts, hidden, index, weights, batches)


def routed_experts(index: Tensor) -> tuple[list[int], list[float]]:
    """The experts that some rows chose; of many rows also which share chose each. Waits for the device."""
    # index: [rows, top_k]
    if len(index) < PROMPT_ROWS:
        return torch.unique(index).tolist(), []
    needed, counts = torch.stack(torch.unique(index, return_counts=True)).tolist()
    return needed, [count / len(index) for count in counts]
