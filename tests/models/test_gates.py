"""Gates of several layers in one call: stacked by torch.func, or fused into one kernel."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from checkpoints import HIDDEN, LAYERS, Pair
from spmoe.backends.base import kernel_failures
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.gates import FusedGates, StackedGates
from spmoe.models.inspection import MoeLayer, inspect_model
from spmoe.models.load import load_without_experts
from spmoe.models.target import Target

# ---- stacked gates


@pytest.fixture
def target(pair: Pair) -> Target:
    return Target(load_without_experts(Checkpoint.find(str(pair.target)), torch.float32))


@pytest.mark.parametrize("layers", [range(LAYERS), range(1, LAYERS), range(2)])
def test_stacked_gates_match_single_gates(target: Target, layers: range) -> None:
    assert target._stacked is not None, "the gates of both families can be stacked"
    states = torch.randn(len(layers), 7, HIDDEN, generator=torch.Generator().manual_seed(1))
    stacked = target.route(layers, states)
    for row, layer in enumerate(layers):
        single = target.route([layer], states[row : row + 1])
        assert torch.equal(stacked.experts[row], single.experts[0])
        torch.testing.assert_close(stacked.scores[row], single.scores[0])


def test_rank_lists_routed_experts_first_and_every_expert_once(target: Target) -> None:
    states = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(2))
    ranking = target.rank(1, states[0])
    routed = target.route([1], states).experts[0]
    assert torch.equal(ranking[:, : target.top_k].sort().values, routed.sort().values)
    experts = target.model.get_submodule(target.moe[1].path).spmoe_shapes["down_proj"][0]
    assert all(row == list(range(experts)) for row in ranking.sort().values.tolist())


def test_gates_that_cannot_be_stacked_give_none(target: Target) -> None:
    first, *others = target.moe
    assert first.router is not None
    assert StackedGates.of(target.moe[:1]) is None, "a single layer needs no stack"
    assert StackedGates.of([replace(first, norm=None), *others]) is None
    biased = replace(first, router=replace(first.router, args=(torch.zeros(1),)))
    assert StackedGates.of([biased, *others]) is None, "a router with further arguments"
    other_norm = replace(first, norm=torch.nn.LayerNorm(HIDDEN))
    assert StackedGates.of([other_norm, *others]) is None, "two kinds of norms"


# ---- fused gates

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
Kernel = Callable[..., tuple[Tensor, Tensor]]
SetKernel = Callable[[Kernel | None], None]


@pytest.fixture
def moe_layers() -> Sequence[MoeLayer]:
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**SHAPE))
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
    return inspect_model(model.eval()).moe


@pytest.fixture
def set_kernel(monkeypatch: pytest.MonkeyPatch) -> SetKernel:
    """Replace the kernel by a function; None stands for its definition in plain PyTorch."""
    gates = pytest.importorskip("spmoe.backends.kernels.dense")

    def put(function: Kernel | None) -> None:
        monkeypatch.setattr(gates, "norm_and_route_layers", function or gates.norm_and_route_layers_plain)

    put(None)
    return put


def raising(error: BaseException) -> Kernel:
    def kernel(*ignored: object) -> tuple[Tensor, Tensor]:
        raise error

    return kernel


@pytest.fixture
def debug_messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the messages logged so far; all of them must be at debug level."""
    caplog.set_level(logging.DEBUG, logger="spmoe")

    def found() -> list[str]:
        records = [record for record in caplog.records if record.name.startswith("spmoe")]
        assert {record.levelno for record in records} <= {logging.DEBUG}
        return [record.getMessage() for record in records]

    return found


def test_correct_kernel_is_used(
    moe_layers: Sequence[MoeLayer], set_kernel: SetKernel, debug_messages: Callable[[], list[str]]
) -> None:
    assert isinstance(FusedGates.of(moe_layers), FusedGates)
    assert debug_messages() == []


@pytest.mark.parametrize("error", [RuntimeError("no image for this device"), ValueError("600 experts")], ids=str)
def test_kernel_that_does_not_run_is_logged(
    error: Exception, moe_layers: Sequence[MoeLayer], set_kernel: SetKernel, debug_messages: Callable[[], list[str]]
) -> None:
    set_kernel(raising(error))
    assert FusedGates.of(moe_layers) is None
    (message,) = debug_messages()
    assert f"the kernel does not run ({error})" in message


def test_triton_compile_error_is_logged(
    moe_layers: Sequence[MoeLayer], set_kernel: SetKernel, debug_messages: Callable[[], list[str]]
) -> None:
    errors = pytest.importorskip("triton.errors")
    set_kernel(raising(errors.TritonError("out of shared memory")))
    assert FusedGates.of(moe_layers) is None
    assert "out of shared memory" in debug_messages()[0]


@pytest.mark.parametrize("error", [AssertionError("a mistake"), KeyError("a"), AttributeError("b"), MemoryError()])
def test_unexpected_kernel_error_is_raised(
    error: BaseException, moe_layers: Sequence[MoeLayer], set_kernel: SetKernel
) -> None:
    set_kernel(raising(error))
    with pytest.raises(type(error)):
        FusedGates.of(moe_layers)


def test_unsupported_gates_are_logged(
    moe_layers: Sequence[MoeLayer], set_kernel: SetKernel, debug_messages: Callable[[], list[str]]
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
    assert [("unsupported kind" in message) for message in debug_messages()] == [True, True]


def test_wrong_kernel_is_not_used_and_logged(
    moe_layers: Sequence[MoeLayer], set_kernel: SetKernel, debug_messages: Callable[[], list[str]]
) -> None:
    from spmoe.backends.kernels.dense import norm_and_route_layers_plain

    def off_by_one(*args: Any) -> tuple[Tensor, Tensor]:
        experts, scores = norm_and_route_layers_plain(*args)
        return (experts + 1) % 8, scores

    def too_few(*args: Any) -> tuple[Tensor, Tensor]:
        experts, scores = norm_and_route_layers_plain(*args)
        return experts[..., :1], scores[..., :1]

    for wrong in (off_by_one, too_few):
        set_kernel(wrong)
        assert FusedGates.of(moe_layers) is None
    other_experts, other_number = debug_messages()
    assert "selects other experts" in other_experts
    assert "another number of experts" in other_number


def test_kernel_failures_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    assert kernel_failures() == (ImportError, RuntimeError, ValueError)
