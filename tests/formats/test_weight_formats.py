"""Weight formats against plain implementations, and properties over shapes, scales and special numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formats import E2M1, decode, e4m3, round_to_bfloat16
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmoe.errors import UsageError
from spmoe.formats import base
from spmoe.formats.base import WeightFormat, weight_format
from spmoe.formats.bf16_packed import Bf16Packed, EscapeOverflow
from spmoe.formats.dense import Dense
from spmoe.formats.fp8 import Fp8
from spmoe.formats.int4 import Int4
from spmoe.formats.int8 import Int8
from spmoe.registry import WEIGHT_FORMATS

DENSE = ("float32", "float16", "bfloat16")
PACKED = tuple(name for name in WEIGHT_FORMATS.names() if name not in DENSE)
LOSSY = tuple(name for name in PACKED if name != "bf16-packed")
OTHERS = (  # formats of checkpoints, which have no registered name
    Int4(32, asymmetric=True, scale_dtype=torch.float16),
    Int4(48, scale_dtype=torch.float32),
    Int8(0, torch.float32),
    Int8(16, torch.float16),
)
FORMATS = [*(weight_format(name) for name in LOSSY), *OTHERS]
SCALES = (1.0, 1e-30, 1e-38, 1e4, 1e30)

sides = st.tuples(st.integers(1, 9), st.integers(1, 70).map(lambda half: 2 * half))


def names(format: WeightFormat) -> str:
    return format.name


def random_parts(format: WeightFormat, outs: int, ins: int, seed: int) -> dict[str, Tensor]:
    """Return parts of random bytes: every code occurs, scales are any finite numbers."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, (dtype, shape) in format.parts(outs, ins).items():
        if name in ("scale", "global_scale") and dtype.is_floating_point and dtype != torch.float8_e4m3fn:
            parts[name] = (torch.randn(shape, generator=generator) * 10 ** float(seed % 30 - 15)).to(dtype)
        else:
            high = 17 if name == "zero" else 256
            found = torch.randint(0, high, shape, generator=generator).to(torch.uint8)
            parts[name] = found if dtype == torch.uint8 else found.view(dtype)
    return parts


def assert_same_numbers(found: Tensor, expected: np.ndarray) -> None:
    """Compare bit for bit; NaN equals NaN."""
    numbers = found.float().numpy()
    assert numbers.shape == expected.shape
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(numbers), nan)
    assert np.array_equal(numbers[~nan].view(np.uint32), expected.astype(np.float32)[~nan].view(np.uint32))


# ---- names


def test_names() -> None:
    assert len(PACKED) == 16
    for name in WEIGHT_FORMATS.names():
        assert weight_format(name).name == name
        assert weight_format(name) == weight_format(name)
    assert [format.name for format in OTHERS] == [
        "int4-asym-g32-f16",
        "int4-g48-f32",
        "int8-channel-f32",
        "int8-g16-f16",
    ]
    assert len({format.name for format in FORMATS}) == len(FORMATS)
    assert Fp8(32, 128).name == "fp8-block32x128"
    for other in (OTHERS[0], OTHERS[2], Bf16Packed(256)):  # a registered name with further parameters
        assert weight_format(other.name) == other
    with pytest.raises(UsageError, match=r"unknown expert format 'int3'; choose one of bf16-packed, .*nvfp4"):
        weight_format("int3")


# ---- the definition


@settings(max_examples=100, deadline=None, derandomize=True)
@given(format=st.sampled_from(FORMATS), shape=sides, seed=st.integers(0, 10**6))
def test_dequantize_equals_the_plain_implementation(format: WeightFormat, shape: tuple[int, int], seed: int) -> None:
    parts = random_parts(format, *shape, seed)
    expected = decode(format, parts, *shape)
    assert_same_numbers(format.dequantize(parts, torch.float32), expected)
    assert_same_numbers(format.dequantize(parts, torch.bfloat16), round_to_bfloat16(expected))


@pytest.mark.parametrize(("outs", "ins"), [(130, 260), (128, 128), (1, 300), (257, 2)])
def test_fp8_blocks_may_be_short(outs: int, ins: int) -> None:
    parts = random_parts(Fp8(), outs, ins, 3)
    assert parts["scale"].shape == (math.ceil(outs / 128), math.ceil(ins / 128))
    assert_same_numbers(Fp8().dequantize(parts, torch.float32), decode(Fp8(), parts, outs, ins))


def test_every_fp8_and_fp4_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    one = torch.ones(1, 1)
    found = weight_format("fp8-tensor").dequantize(
        {"weight": codes.view(torch.float8_e4m3fn), "scale": one}, torch.float32
    )
    assert found.isnan().nonzero()[:, 1].tolist() == [0x7F, 0xFF]
    assert_same_numbers(found, np.array([[e4m3(code) for code in range(256)]], np.float32))
    nibbles = torch.tensor([[low | low + 1 << 4 for low in range(0, 16, 2)]], dtype=torch.uint8)
    half = weight_format("mxfp4").dequantize({"codes": nibbles, "scale": torch.tensor([[126]]).byte()}, torch.float32)
    assert_same_numbers(half, np.array([E2M1], np.float32) / 2)


@pytest.mark.parametrize("format", [*FORMATS, Bf16Packed(2**16)], ids=names)
def test_working_on_some_rows_at_a_time_changes_nothing(format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((300, 130), (1, 48), (129, 2)):
        weight = weights(shape, 5, 1.0)
        weight[:, 0] *= 2.0 ** -torch.arange(0, 90, 90 / shape[0])[: shape[0]].floor()  # rare exponents
        with monkeypatch.context() as patch:
            parts = format.quantize(weight)
            expected = [format.dequantize(parts, dtype) for dtype in (torch.float32, torch.bfloat16)]
            patch.setattr(base, "_CACHED_BYTES", 2000)
            patch.setattr(base, "_CACHED_WEIGHTS", 3000)
            found = format.quantize_by_rows(weight)
            assert all(torch.equal(bytes_of(found[name]), bytes_of(part)) for name, part in parts.items())
            assert torch.equal(format.dequantize_by_rows(parts, torch.float32), expected[0])
            assert torch.equal(format.dequantize_by_rows(parts, torch.bfloat16), expected[1])


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_operator_for_int8(rows: int) -> None:
    format, weight = Int8(0), weights((70, 96), 1, 0.02)
    parts, x = format.quantize(weight), torch.randn(rows, 96).bfloat16()
    assert format.has_operator(x)
    exact = x.double() @ torch.from_numpy(decode(format, parts, 70, 96)).double().T
    found = format.linear(parts, x)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).abs().max()) <= 2.0**-8 * float(exact.abs().max())
    assert not format.has_operator(x.float())
    assert not format.has_operator(x.repeat(65, 1))
    assert not format.has_operator(x[:, :88])  # PyTorch reads behind such inputs
    assert not Int8(32).has_operator(x)
    assert not Int8(0, torch.float32).has_operator(x)


# ---- conversion


def weights(shape: tuple[int, int], seed: int, scale: float) -> Tensor:
    """Return random weights with groups of zeros and, in each row, one weight that is far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight[:, seed % shape[1]] *= 20
    weight[seed % shape[0], : shape[1] // 2] = 0
    return (weight * scale).bfloat16()


class ReciprocalDivision(TorchDispatchMode):
    """Divide by scalars as CUDA does: multiply by their rounded reciprocals."""

    divisions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            self.divisions += 1
            return args[0] * (1 / torch.tensor(args[1], dtype=torch.float32))
        return func(*args, **(kwargs or {}))


def test_division_by_reciprocals_is_told_apart() -> None:
    numbers = torch.arange(1.0, 1000)
    with ReciprocalDivision() as mode:
        assert not torch.equal(numbers / 6, base.divide(numbers, 6))
    assert mode.divisions == 1


@pytest.mark.parametrize("format", FORMATS, ids=names)
def test_conversion_does_not_depend_on_the_device(format: WeightFormat) -> None:
    weight = weights((64, 384), 3, 1.0)
    expected = format.quantize(weight)
    with ReciprocalDivision():
        found = format.quantize(weight)
    for name, part in expected.items():
        assert torch.equal(part.view(torch.uint8), found[name].view(torch.uint8)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("format", FORMATS, ids=names)
def test_cuda_converts_to_the_bits_of_the_cpu(format: WeightFormat) -> None:
    weight = weights((256, 1536), 5, 1.0)
    for name, part in format.quantize(weight.cuda()).items():
        assert torch.equal(part.cpu().view(torch.uint8), format.quantize(weight)[name].view(torch.uint8)), name


def values_of(format: WeightFormat) -> np.ndarray:
    """Return the numbers of all codes, before scales."""
    if format.name.startswith("fp8"):
        return np.array([value for code in range(256) if not math.isnan(value := e4m3(code))])
    if format.name.startswith("int8"):
        return np.arange(-127.0, 128)
    return np.array(E2M1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(format=st.sampled_from(FORMATS), shape=sides, seed=st.integers(0, 10**6), scale=st.sampled_from(SCALES))
def test_conversion_takes_the_nearest_code(
    format: WeightFormat, shape: tuple[int, int], seed: int, scale: float
) -> None:
    """No other code of the same scale is nearer to a weight, and the largest weight of a group is not clipped much."""
    weight = weights(shape, seed, scale)
    parts = format.quantize(weight)
    format.check(parts, *shape)
    found, wanted = format.dequantize(parts, torch.float32).double().numpy(), weight.double().numpy()
    assert np.isfinite(found).all()
    steps, zero = steps_of(format, parts, shape)
    for row, column in itertools.product(*map(range, shape)):
        values = np.arange(16.0) - zero[row, column] if format.name.startswith("int4") else values_of(format)
        error = np.abs(values * steps[row, column] - wanted[row, column]).min()
        assert (
            abs(found[row, column] - wanted[row, column])
            <= error * (1 + 1e-5) + 2e-7 * abs(wanted[row, column]) + 2e-39
        )
    largest = np.abs(wanted).max()
    tolerance = {"int8": 0.01, "fp8": 0.07, "mxfp4": 0.26, "nvfp4": 0.26}.get(format.name.split("-")[0], 0.11)
    assert np.abs(found - wanted).max() <= tolerance * largest + 1e-37


def steps_of(
    format: WeightFormat, parts: Mapping[str, Tensor], shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and the zero point of each weight, taken from the parts by repetition."""
    kind = format.name.split("-")[0]
    scale = parts["scale"].double().numpy() if kind != "mxfp4" else 2.0 ** (parts["scale"].double().numpy() - 127)
    if kind == "nvfp4":
        scale = scale * parts["global_scale"].double().numpy()

    def repeated(numbers: np.ndarray) -> np.ndarray:
        high = 128 if kind == "fp8" and "channel" not in format.name else 1
        wide = {"fp8": 128, "mxfp4": 32, "nvfp4": 16}.get(kind) or vars(format)["group"] or shape[1]
        if numbers.shape[1] == 1:
            wide = shape[1]
        return np.repeat(np.repeat(numbers, high, axis=0), wide, axis=1)[: shape[0], : shape[1]]

    zero = repeated(parts["zero"].double().numpy()) if "zero" in parts else np.full(shape, 8.0)
    return repeated(scale), zero


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("number", [0.0, -0.0, 1e-40, 3e38, -3e38])
def test_matrix_of_one_number(name: str, number: float) -> None:
    weight = torch.full((3, 40), number)
    format = weight_format(name)
    parts = format.quantize(weight)
    format.check(parts, 3, 40)
    found = format.dequantize(parts, torch.float32)
    assert torch.isfinite(found).all()
    assert torch.allclose(found, weight, rtol=0.16, atol=1e-37)


@pytest.mark.parametrize("name", [name for name in LOSSY if "4" in name.split("-")[0]])
def test_odd_rows_do_not_fit_into_nibbles(name: str) -> None:
    with pytest.raises(ValueError, match="7 inputs cannot be stored in 4 bits"):
        weight_format(name).parts(2, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_weights_are_kept(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 5).to(dtype)
    parts = Dense(dtype).quantize(weight)
    assert torch.equal(Dense(dtype).dequantize(parts, dtype), weight)
    assert Dense(dtype).parts(3, 5)["weight"] == (dtype, (3, 5))


# ---- joining and checking


@settings(max_examples=100, deadline=None, derandomize=True)
@given(format=st.sampled_from([*FORMATS, Bf16Packed(2**16)]), outs=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_join_stacks_outputs(format: WeightFormat, outs: int, seed: int) -> None:
    first, second = (format.quantize(weights((outs, 48), seed + n, 10.0**-n)) for n in (0, 1))
    if isinstance(format, Fp8) and format.rows != 1:  # a block must not span both
        with pytest.raises(ValueError, match="cannot be joined"):
            format.join(first, second)
        (smaller, first), (_, second) = (format.with_rows(half, math.gcd(outs, 128)) for half in (first, second))
        format = smaller
    joined = format.join(first, second)
    format.check(joined, 2 * outs, 48)
    expected = torch.cat([format.dequantize(half, torch.float32) for half in (first, second)])
    assert torch.equal(format.dequantize(joined, torch.float32), expected)


def test_smaller_fp8_blocks_hold_the_same_weights() -> None:
    for format, outs in ((Fp8(), 300), (weight_format("fp8-tensor"), 6)):
        assert isinstance(format, Fp8)
        parts = format.quantize(torch.randn(outs, 200))
        smaller, other = format.with_rows(parts, 2)
        smaller.check(other, outs, 200)
        assert torch.equal(smaller.dequantize(other, torch.float32), format.dequantize(parts, torch.float32))
    with pytest.raises(ValueError, match="cannot be divided"):
        Fp8().with_rows(parts, 3)


@pytest.mark.parametrize("format", [*FORMATS, Bf16Packed()], ids=names)
def test_parts_that_do_not_fit_are_refused(format: WeightFormat) -> None:
    parts = format.quantize(torch.randn(4, 64).bfloat16())
    format.check(parts, 4, 64)
    for name, part in parts.items():
        with pytest.raises(ValueError, match=f"{name} is missing"):
            format.check({key: value for key, value in parts.items() if key != name}, 4, 64)
        with pytest.raises(ValueError, match=f"{name} is .* but {format.name} needs"):
            format.check({**parts, name: part[..., :-1] if part.shape[-1] > 1 else part[:-1]}, 4, 64)
        with pytest.raises(ValueError, match=f"{name} is float64, but {format.name} needs"):
            format.check({**parts, name: part.double()}, 4, 64)


def test_scales_that_are_not_numbers_are_refused() -> None:
    for name in ("int4-g32", "int8-channel", "nvfp4", "fp8-channel"):
        format = weight_format(name)
        parts = format.quantize(torch.randn(2, 32))
        parts["scale"].view(torch.uint8)[:] = 0x7F  # NaN in e4m3; a huge number in bfloat16
        if name != "nvfp4":
            parts["scale"][0, 0] = math.inf
        with pytest.raises(ValueError, match="not a finite number"):
            format.check(parts, 2, 32)
    parts = weight_format("mxfp4").quantize(torch.randn(2, 32))
    parts["scale"][0] = 255
    with pytest.raises(ValueError, match="255, which is not a number"):
        weight_format("mxfp4").check(parts, 2, 32)
    parts = weight_format("int4-asym-g32").quantize(torch.randn(2, 32))
    parts["zero"][0] = 16
    with pytest.raises(ValueError, match="above 15"):
        weight_format("int4-asym-g32").check(parts, 2, 32)


def bytes_of(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


# ---- bf16-packed


def bits_of(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int16)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 9), st.one_of(st.integers(1, 33), st.integers(127, 300))),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([1, 14, 16, 40, 256]),
)
def test_bf16_packed_is_bit_identical(shape: tuple[int, int], seed: int, spread: int) -> None:
    """Bits of any kind come back: NaN with their payload, infinities, subnormal numbers and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(0, 256, (), generator=generator) + torch.randint(0, spread, shape, generator=generator)
    others = torch.randint(0, 256, shape, generator=generator)
    bits = (exponent % 256 << 7 | others & 127 | (others & 128) << 8).int()
    bits = torch.where(bits > 32767, bits - 65536, bits).short()
    weight = bits.view(torch.bfloat16)
    format = Bf16Packed(2**16)
    parts = format.quantize(weight)
    format.check(parts, *shape)
    assert torch.equal(bits_of(format.dequantize(parts, torch.bfloat16)), bits)
    assert torch.equal(
        bits_of(torch.from_numpy(decode(format, parts, *shape)).bfloat16().nan_to_num()), bits_of(weight.nan_to_num())
    )
    exponents = (bits.int() >> 7 & 255).unique()
    if int(exponents.max() - exponents.min()) < 14:  # the window has 16, and a group all of code 15 would be raw
        assert not (parts["codes"] == -1).any()


def test_bf16_packed_of_special_numbers() -> None:
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-133, -(2.0**-133), 2.0**-126, 3.38e38, 1.0]
    weight = torch.tensor([special, special[::-1]]).bfloat16()
    parts = Bf16Packed().quantize(weight)
    assert torch.equal(bits_of(Bf16Packed().dequantize(parts, torch.bfloat16)), bits_of(weight))


def test_bf16_packed_size_and_escapes() -> None:
    weight = (torch.randn(512, 1024) * 0.02).bfloat16()
    format = Bf16Packed()
    parts = format.quantize(weight)
    bits = sum(part.nbytes for part in parts.values()) * 8 / weight.numel()
    assert 12 < bits < 12.1
    is_raw = parts["codes"] == -1
    found = int(is_raw.sum())
    assert 0 < found < format.capacity(512, 1024)
    assert parts["low"][:, :, 0][is_raw].tolist() == list(range(found))
    exponent = (bits_of(weight).int() >> 7 & 255).view(512, -1, 8, 16) - parts["base"].view(-1, 1, 1, 1)
    assert torch.equal(is_raw, ((exponent < 0) | (exponent > 15)).any(dim=2))
    for start, stop in ((0, 512), (100, 300), (511, 512)):
        some = format.dequantize(format.outputs(parts, start, stop), torch.bfloat16)
        assert torch.equal(some, weight[start:stop])


def test_bf16_packed_refuses_what_it_cannot_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-(2**15), 2**15, (64, 128), generator=generator).short().view(torch.bfloat16)
    with pytest.raises(EscapeOverflow, match="rare exponents, and there is place for 16") as raised:
        Bf16Packed().quantize(weight)
    assert 0 < raised.value.escapes <= 2**16 // 8  # all groups
    enough = Bf16Packed(raised.value.escapes)
    assert torch.equal(bits_of(enough.dequantize(enough.quantize(weight), torch.bfloat16)), bits_of(weight))
    with pytest.raises(ValueError, match="rounds these float32 weights"):
        Bf16Packed().quantize(torch.tensor([[1.001]]))
    parts = Bf16Packed().quantize(torch.tensor([[1.5]]))  # bfloat16 holds it
    Bf16Packed().check(parts, 1, 1)
    parts = Bf16Packed().quantize(torch.ones(1, 130))
    Bf16Packed().check(parts, 1, 130)
    with pytest.raises(ValueError, match="base of bf16-packed is not from 0 to 240"):
        Bf16Packed().check({**parts, "base": torch.full_like(parts["base"], 241)}, 1, 130)
    parts["codes"][0, 0, 0], parts["low"][0, 0, 0, 0] = -1, 99
    with pytest.raises(ValueError, match="place outside of the list"):
        Bf16Packed().check(parts, 1, 130)
