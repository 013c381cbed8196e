"""Copies of packed experts for the CPU: products, fallbacks, and the bound of their memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from spmoe.backends.cpu_copies import CopyLayout, CpuCopies, needs_copies
from spmoe.backends.cpu_experts import CpuExperts
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.store import StoreSpec
from spmoe.formats import int4
from spmoe.formats.base import OPERATOR_ROWS, weight_format
from spmoe.formats.expert import ExpertFormat
from spmoe.types import ExpertKey

INT4 = [f"int4{kind}-g{group}{scale}" for kind in ("", "-asym") for group in (32, 64, 128) for scale in ("", "-f16")]
SHAPES = {"gate_up_proj": (160, 256), "down_proj": (256, 128)}  # of one expert; no multiple of the operator's blocks


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """Check operators anew, before and after each test."""
    int4._operator_works.cache_clear()
    yield
    int4._operator_works.cache_clear()


def blob(format: ExpertFormat, shapes: dict[str, tuple[int, int]] = SHAPES, seed: int = 0) -> dict[str, Tensor]:
    """Return the fields of an expert's blob."""
    layout, generator = format.layout(shapes), torch.Generator().manual_seed(seed)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    format.convert({name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, views)
    return views


@pytest.mark.parametrize("name", INT4)
def test_operator_agrees_with_the_dequantized_matrix(name: str) -> None:
    """Results err about as much as those of dequantized weights, which are rounded to bfloat16 too.

    Scales in float16 are rounded to bfloat16 for the operator, as are the zero points times the scales.
    """
    format = ExpertFormat(weight_format(name), torch.bfloat16)
    layout, copies, views = CopyLayout.of(format, SHAPES), CpuCopies(format, 2**20), blob(format)
    assert layout.repacked == tuple(SHAPES)
    copies.make(ExpertKey(0, 0), views, layout)
    for projection in SHAPES:
        weight = format.weight.dequantize(format.parts(views, projection), torch.float64)
        x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16() + 0.5
        exact = x.double() @ weight.T
        rounded = linear(x, weight.bfloat16())
        found = copies.get(ExpertKey(0, 0)).project(projection, x)
        errors = [(one.double() - exact).pow(2).mean().sqrt() for one in (found, rounded)]
        assert errors[0] <= (1.5 if name.endswith("-f16") else 1.0) * errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["bf16-packed", "fp8-block128", "fp8-channel", "fp8-tensor", "int8-g32", "mxfp4", "nvfp4", "int4-g32"]
)
def test_other_copies_are_the_dequantized_matrices(name: str, dtype: torch.dtype) -> None:
    format = ExpertFormat(weight_format(name), dtype)
    shapes = {"up_proj": (40, 64), "down_proj": (64, 40)}  # 40: no operator for any of them
    if name == "bf16-packed":
        format = ExpertFormat(weight_format(name), torch.bfloat16)
    layout, copies, views = CopyLayout.of(format, shapes), CpuCopies(format, 2**20), blob(format, shapes)
    assert layout.dense == tuple(shapes)
    copies.make(ExpertKey(0, 0), views, layout)
    for projection, weight in format.dequantize(views).items():
        x = torch.randn(3, weight.shape[1]).to(format.dtype)
        assert torch.equal(copies.get(ExpertKey(0, 0)).project(projection, x), linear(x, weight))


def test_only_shapes_and_dtypes_of_the_operator_are_repacked() -> None:
    bfloat16 = ExpertFormat(weight_format("int4-g128"), torch.bfloat16)
    shapes = {"gate_up_proj": (64, 256), "down_proj": (256, 96)}  # 96 is no multiple of the group
    layout = CopyLayout.of(bfloat16, shapes)
    assert (layout.repacked, layout.dense) == (("gate_up_proj",), ("down_proj",))
    assert layout.nbytes == 64 * 256 // 2 + 2 * 64 * 2 * 2 + 256 * 96 * 2
    assert layout.serves(OPERATOR_ROWS)
    assert not layout.serves(OPERATOR_ROWS + 1)
    transposed = ExpertFormat(weight_format("int4-g128"), torch.bfloat16, transposed=True)
    turned = {name: (columns, rows) for name, (rows, columns) in shapes.items()}
    assert CopyLayout.of(transposed, turned) == layout
    for dtype in (torch.float32, torch.float16):
        layout = CopyLayout.of(ExpertFormat(weight_format("int4-g128"), dtype), shapes)
        assert layout.repacked == ()
        assert layout.serves(1000)


def _missing(*arguments: Any) -> Tensor:
    raise RuntimeError("not compiled for this processor")


@pytest.mark.parametrize("broken", [_missing, lambda codes, tiles: codes.to(torch.uint8)[:, ::2]], ids=["no", "wrong"])
def test_operator_that_is_missing_or_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", broken)
    layout = CopyLayout.of(ExpertFormat(weight_format("int4-g32"), torch.bfloat16), SHAPES)
    assert (layout.repacked, layout.dense) == ((), tuple(SHAPES))


def test_least_recently_used_copies_are_dropped() -> None:
    format = ExpertFormat(weight_format("int4-g32"), torch.bfloat16)
    layout, keys = CopyLayout.of(format, SHAPES), [ExpertKey(0, expert) for expert in range(3)]
    copies = CpuCopies(format, 2 * layout.nbytes + 1)
    copies.make(keys[0], blob(format), layout)
    assert copies.has_place(layout)
    copies.make(keys[1], blob(format), layout)
    assert not copies.has_place(layout)
    copies.get(keys[0])
    copies.make(keys[2], blob(format), layout)
    assert [key in copies for key in keys] == [True, False, True]
    assert copies.nbytes == 2 * layout.nbytes


def test_sizes_are_those_of_the_tensors() -> None:
    for name in ("int4-asym-g32", "mxfp4"):
        format = ExpertFormat(weight_format(name), torch.bfloat16)
        layout, copies = CopyLayout.of(format, SHAPES), CpuCopies(format, 2**20)
        copies.make(ExpertKey(0, 0), blob(format), layout)
        copy = copies.get(ExpertKey(0, 0))
        tensors = [*copy.dense.values(), *(part for parts in copy.repacked.values() for part in parts.values())]
        assert layout.nbytes == sum(tensor.nbytes for tensor in tensors)


def test_formats_with_an_operator_for_blobs_need_no_copies() -> None:
    for name, dtype, needed in (
        ("bfloat16", torch.bfloat16, False),
        ("bfloat16", torch.float32, True),
        ("int8-channel", torch.bfloat16, False),
        ("int8-channel", torch.float32, True),
        ("int8-g32", torch.bfloat16, True),
        ("int4-g32", torch.bfloat16, True),
    ):
        format = ExpertFormat(weight_format(name), dtype)
        assert needs_copies(format) == needed
        assert CpuCopies(format, 2**20).can_hold(CopyLayout.of(format, SHAPES)) == needed


@pytest.mark.parametrize("name", ["int4-asym-g32", "mxfp4"])
def test_expert_computed_from_its_copy(name: str) -> None:
    """Biases are added, the copy is used for few rows, and more rows than the operator is fast for are dequantized."""
    format = ExpertFormat(weight_format(name), torch.bfloat16)
    shapes = {"up_proj": (64, 32), "up_proj_bias": (64,), "down_proj": (32, 64), "down_proj_bias": (32,)}
    store, key = MemoryStore(StoreSpec("0" * 64, format.layout(shapes), (2,))), ExpertKey(0, 1)
    views = store.spec.layout.views(store.blob(key))
    format.convert({part: torch.randn(shape) for part, shape in shapes.items()}, views)
    held = {part: (2, *shape) for part, shape in shapes.items()}
    module: Any = SimpleNamespace(spmoe_shapes=held, has_gate=False, has_bias=True, is_transposed=False, act_fn=relu)
    cpu = CpuExperts(store, format, stream=None, copy_budget=2**20)  # type: ignore[arg-type]
    dense = {part: tensor.double() for part, tensor in format.dequantize(views).items()}
    assert cpu.needs_copy(module, key, 3)
    assert cpu.needs_copy(module, key, OPERATOR_ROWS + 1) == (name == "mxfp4")
    assert cpu.copy(module, key, 3) > 0.0
    assert cpu.copy(module, key, 3) == 0.0
    for rows in (3, OPERATOR_ROWS + 1):
        x = torch.randn(rows, 32).bfloat16()
        inner = relu(linear(x.double(), dense["up_proj"], dense["up_proj_bias"]))
        exact = linear(inner, dense["down_proj"], dense["down_proj_bias"])
        found = cpu.compute(module, key, x)
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).abs().max() <= 0.02 * exact.abs().max()
