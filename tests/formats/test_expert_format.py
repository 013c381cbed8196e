"""The format of a whole expert: fields of a blob, transposed modules, biases, and blobs for layers of several sizes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmoe.formats.base import weight_format
from spmoe.formats.bf16_packed import Bf16Packed
from spmoe.formats.dense import Dense
from spmoe.formats.expert import WHOLE, ExpertFormat
from spmoe.formats.layout import ALIGNMENT, BlobLayout
from spmoe.registry import WEIGHT_FORMATS

NAMES = WEIGHT_FORMATS.names()
BF16 = torch.bfloat16


def shapes_of(hidden: int, ffn: int, transposed: bool, biases: bool, gated: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an expert's tensors as a module of transformers holds them."""
    up = ("gate_up_proj", 2 * ffn) if gated else ("up_proj", ffn)
    found: dict[str, tuple[int, ...]] = {}
    for name, outs, ins in ((*up, hidden), ("down_proj", hidden, ffn)):
        found[name] = (ins, outs) if transposed else (outs, ins)
        if biases:
            found[f"{name}_bias"] = (outs,)
    return found


def tensors_of(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16().to(dtype) for name, shape in shapes.items()}


def filled(format: ExpertFormat, tensors: dict[str, Tensor]) -> tuple[BlobLayout, Tensor]:
    layout = format.layout({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    blob = torch.zeros(layout.nbytes, dtype=torch.uint8)
    format.convert(tensors, layout.views(blob))
    return layout, blob


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    hidden=st.integers(1, 40).map(lambda half: 2 * half),
    ffn=st.integers(1, 30).map(lambda half: 2 * half),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, BF16]),
)
def test_expert_comes_back_as_its_module_holds_it(
    name: str, hidden: int, ffn: int, flags: tuple[bool, bool, bool], dtype: torch.dtype
) -> None:
    transposed, biases, gated = flags
    format = ExpertFormat(weight_format(name), dtype, transposed)
    shapes = shapes_of(hidden, ffn, transposed, biases, gated)
    tensors = tensors_of(shapes, hidden + ffn, dtype)
    layout, blob = filled(format, tensors)
    assert layout.nbytes % ALIGNMENT == 0
    assert (layout.format, layout.version, layout.widest) == (name, 1, max(max(shape) for shape in shapes.values()))
    assert BlobLayout.from_json(json.loads(json.dumps(asdict(layout)))) == layout
    views = layout.views(blob.clone())  # from the bytes alone
    format.check(views, shapes)
    found = format.dequantize(views)
    assert list(found) == list(shapes)
    for key, tensor in found.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shapes[key])
        if tensor.ndim == 2 and not format.is_dense:
            weight = tensors[key].T if transposed else tensors[key]
            expected = format.weight.dequantize(format.weight.quantize(weight), dtype)
            assert torch.equal(tensor.T if transposed else tensor, expected)
        elif name in ("float32", "bfloat16", str(dtype)[6:]):
            assert torch.equal(tensor, tensors[key])
    trip = format.round_trip(tensors)
    assert all(torch.equal(trip[key], tensor) for key, tensor in found.items())


def test_dense_experts_keep_their_bytes() -> None:
    tensors = tensors_of(shapes_of(32, 24, True, True), 1)
    layout, blob = filled(ExpertFormat(Dense(BF16), BF16, True), tensors)
    assert layout == BlobLayout.of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, BF16)
    for field, tensor in zip(layout.fields, tensors.values(), strict=True):
        stored = bytes(blob[field.offset : field.offset + field.nbytes].tolist())
        assert stored == bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("name", NAMES)
def test_fields_do_not_overlap_and_are_aligned(name: str) -> None:
    fields = ExpertFormat(weight_format(name), BF16).layout(shapes_of(48, 40, False, True)).fields
    for before, after in pairwise(fields):
        assert before.offset + before.nbytes <= after.offset
        assert after.offset % 256 == 0
    assert all(math.prod(field.shape) * field.torch_dtype.itemsize == field.nbytes for field in fields)


@pytest.mark.parametrize("name", ["bfloat16", "int4-asym-g32", "bf16-packed", "fp8-channel"])
def test_layers_of_several_sizes_share_blobs(name: str) -> None:
    format = ExpertFormat(weight_format(name), BF16)
    layers = [shapes_of(48, ffn, False, False) for ffn in (24, 80, 40)]
    layout = format.shared_layout(layers)
    assert [field.name for field in layout.fields] == [WHOLE]
    assert layout.nbytes >= max(format.layout(shapes).nbytes for shapes in layers)
    assert layout.widest == 160
    for seed, shapes in enumerate(layers):
        blob = torch.zeros(layout.nbytes, dtype=torch.uint8)
        tensors = tensors_of(shapes, seed)
        format.convert(tensors, format.views(layout.views(blob), shapes))
        found = format.dequantize(format.views(layout.views(blob), shapes))
        expected = format.round_trip(tensors)
        assert all(torch.equal(found[key], expected[key]) for key in shapes)
    assert format.shared_layout(layers[:1] * 2) == format.layout(layers[0])


@pytest.mark.parametrize("name", NAMES)
def test_kernel_parameters_point_at_the_parts(name: str) -> None:
    format = ExpertFormat(weight_format(name), BF16, transposed=True)
    tensors = tensors_of(shapes_of(48, 40, True, True), 3)
    layout, blob = filled(format, tensors)
    kernel, views = format.kernel({key: tuple(tensor.shape) for key, tensor in tensors.items()}), layout.views(blob)
    assert kernel.dtype == "bfloat16"
    for matrix, outs, ins in (("gate_up_proj", 80, 48), ("down_proj", 48, 40)):
        found = kernel.matrix(matrix)
        assert (found.outs, found.ins) == (outs, ins)
        for part, (dtype, shape) in format.weight.parts(outs, ins).items():
            size = math.prod(shape) * dtype.itemsize
            here = blob[found.offset(part) : found.offset(part) + size].view(dtype)
            field = views[f"{matrix}.{part}" if format.is_packed and not format.is_dense else matrix]
            assert torch.equal(here.view(torch.uint8), field.reshape(-1).view(torch.uint8))
        assert found.bias_offset is not None
        bias = blob[found.bias_offset :][: 2 * outs].view(BF16)
        assert torch.equal(bias, tensors[f"{matrix}_bias"])


def test_parts_that_do_not_fit_a_blob_are_refused() -> None:
    format = ExpertFormat(weight_format("int8-channel"), BF16)
    layout = format.layout(shapes_of(32, 24, False, False))
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    parts = format.weight.quantize(torch.randn(32, 25))
    with pytest.raises(ValueError, match=r"down_proj.weight is int8 \[32, 25\], and its blob has place for int8"):
        format.write({"down_proj": parts}, views)


def test_which_conversions_are_lossless() -> None:
    f32, f16 = torch.float32, torch.float16

    def lossless(weight: object, run: torch.dtype, stored: torch.dtype) -> bool:
        return ExpertFormat(weight, run).lossless_from(stored)  # type: ignore[arg-type]

    packed = Bf16Packed()
    assert lossless(packed, BF16, BF16)
    assert lossless(packed, f32, BF16)  # float32 holds bfloat16
    assert lossless(packed, BF16, f32)  # the dense model is rounded to bfloat16 too
    assert not lossless(packed, f32, f32)
    assert not lossless(packed, f32, f16)
    assert lossless(Dense(BF16), f32, BF16)
    assert not lossless(Dense(BF16), f32, f32)
    assert not lossless(Dense(f16), f32, BF16)
    assert lossless(Dense(f32), f32, f16)
    assert not any(lossless(weight_format(name), BF16, BF16) for name in NAMES if name[:4] in ("int4", "int8", "fp8-"))


def test_conversion_on_a_device_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(shapes_of(32, 24, False, True), 2)
    plain = ExpertFormat(weight_format("int8-channel"), BF16)
    elsewhere = replace(plain, convert_on=torch.device("cpu"))
    assert (elsewhere, hash(elsewhere)) == (plain, hash(plain))
    expected, tried = plain.round_trip(tensors), list[torch.device | None]()
    quantize = ExpertFormat._quantize

    def full(self: ExpertFormat, tensor: Tensor, device: torch.device | None) -> object:
        tried.append(device)
        if device is not None:
            raise torch.OutOfMemoryError
        return quantize(self, tensor, None)

    monkeypatch.setattr(ExpertFormat, "_quantize", full)
    found = elsewhere.round_trip(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert tried == [torch.device("cpu"), *[None] * 4]
