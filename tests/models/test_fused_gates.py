"""Gates by one kernel: what keeps a model from having them is logged, and what nobody expects is not hidden."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from spmoe.backends.base import kernel_failures
from spmoe.models.fused_gates import FusedGates
from spmoe.models.inspection import MoeLayer, inspect_model

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
Kernel = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def moe_layers() -> Sequence[MoeLayer]:
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**SHAPE))
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
    return inspect_model(model.eval()).moe


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel | None], None]:
    """Put a function in the kernel's place; none: its definition in plain PyTorch."""
    gates = pytest.importorskip("spmoe.backends.kernels.dense")

    def put(function: Kernel | None) -> None:
        monkeypatch.setattr(gates, "norm_and_route_layers", function or gates.norm_and_route_layers_plain)

    put(None)
    return put


def fails_with(error: BaseException) -> Kernel:
    def kernel(*ignored: object) -> tuple[Tensor, Tensor]:
        raise error

    return kernel


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said at debug level, and nothing louder."""
    caplog.set_level(logging.DEBUG, logger="spmoe")

    def found() -> list[str]:
        records = [record for record in caplog.records if record.name.startswith("spmoe")]
        assert {record.levelno for record in records} <= {logging.DEBUG}
        return [record.getMessage() for record in records]

    return found


def test_a_kernel_that_is_right_is_used(
    moe_layers: Sequence[MoeLayer], kernel: Callable[[Kernel | None], None], logged: Callable[[], list[str]]
) -> None:
    assert isinstance(FusedGates.of(moe_layers), FusedGates)
    assert logged() == []


@pytest.mark.parametrize("error", [RuntimeError("no image for this device"), ValueError("600 experts")], ids=str)
def test_a_kernel_that_does_not_run_is_logged(
    error: Exception,
    moe_layers: Sequence[MoeLayer],
    kernel: Callable[[Kernel | None], None],
    logged: Callable[[], list[str]],
) -> None:
    kernel(fails_with(error))
    assert FusedGates.of(moe_layers) is None
    (said,) = logged()
    assert f"the kernel does not run ({error})" in said


def test_a_compiler_that_refuses_it_is_expected(
    moe_layers: Sequence[MoeLayer], kernel: Callable[[Kernel | None], None], logged: Callable[[], list[str]]
) -> None:
    errors = pytest.importorskip("triton.errors")
    kernel(fails_with(errors.TritonError("out of shared memory")))
    assert FusedGates.of(moe_layers) is None
    assert "out of shared memory" in logged()[0]


@pytest.mark.parametrize("error", [AssertionError("a mistake"), KeyError("a"), AttributeError("b"), MemoryError()])
def test_what_nobody_expects_is_not_hidden(
    error: BaseException, moe_layers: Sequence[MoeLayer], kernel: Callable[[Kernel | None], None]
) -> None:
    kernel(fails_with(error))
    with pytest.raises(type(error)):
        FusedGates.of(moe_layers)


def test_gates_of_another_kind_are_logged(
    moe_layers: Sequence[MoeLayer], kernel: Callable[[Kernel | None], None], logged: Callable[[], list[str]]
) -> None:
    router, norm = moe_layers[1].router, moe_layers[2].norm
    assert router is not None
    assert isinstance(norm, nn.Module)
    top_k = router.router.top_k
    first = moe_layers[0].router
    assert first is not None
    del first.router.top_k
    assert FusedGates.of(moe_layers) is None
    first.router.top_k = top_k
    norm.weight.data = norm.weight.data[:4]  # type: ignore[union-attr]
    assert FusedGates.of(moe_layers) is None
    assert [("another kind" in said) for said in logged()] == [True, True]


def test_a_kernel_that_is_wrong_is_logged(
    moe_layers: Sequence[MoeLayer], kernel: Callable[[Kernel | None], None], logged: Callable[[], list[str]]
) -> None:
    from spmoe.backends.kernels.dense import norm_and_route_layers_plain

    def off_by_one(*args: Any) -> tuple[Tensor, Tensor]:
        experts, scores = norm_and_route_layers_plain(*args)
        return (experts + 1) % 8, scores

    def too_few(*args: Any) -> tuple[Tensor, Tensor]:
        experts, scores = norm_and_route_layers_plain(*args)
        return experts[..., :1], scores[..., :1]

    for wrong in (off_by_one, too_few):
        kernel(wrong)
        assert FusedGates.of(moe_layers) is None
    others, number = logged()
    assert "picks other experts" in others
    assert "another number of experts" in number


def test_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    assert kernel_failures() == (ImportError, RuntimeError, ValueError)
