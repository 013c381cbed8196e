"""Weights that kernels dequantize are those of the formats' definitions, in every bit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from kernel_helpers import DEVICE, FLOATS, KERNEL_MARKS, dtypes, needs_cuda, prepare_kernel_test
from torch import Tensor, nn
from torch.nn.functional import silu

from spmoe.backends.base import Gate, kernel_gate
from spmoe.backends.kernels import packed
from spmoe.backends.kernels.experts import slot_experts, slot_matrices
from spmoe.backends.kernels.packed import dequantize_matrix, dequantize_matrix_plain, slot_matrix
from spmoe.formats.base import WeightFormat, weight_format
from spmoe.formats.bf16_packed import Bf16Packed
from spmoe.formats.dense import Dense
from spmoe.formats.expert import ExpertFormat
from spmoe.formats.fp4 import E2M1_VALUES
from spmoe.formats.fp8 import Fp8
from spmoe.formats.int4 import Int4
from spmoe.formats.int8 import Int8

pytestmark = [*KERNEL_MARKS, pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")]

FORMATS: list[WeightFormat] = [
    *(weight_format(name) for name in ("int4-g32", "int4-asym-g128", "int8-channel", "int8-g64", "mxfp4", "nvfp4")),
    *(weight_format(name) for name in ("fp8-block128", "fp8-channel", "fp8-tensor")),
    Fp8(64, 128),
    Int4(64, True, torch.float16),
    Int4(32, False, torch.float32),
    Int8(32, torch.float16),
    Bf16Packed(8192),
    Dense(torch.float16),
]


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_kernel_test(monkeypatch)


def names(format: Any) -> str:
    return str(getattr(format, "name", format))


def any_codes(format: WeightFormat, outs: int, ins: int) -> dict[str, Tensor]:
    """Return parts with every code and with scales from the smallest to the largest numbers."""
    if isinstance(format, Bf16Packed | Dense):
        bits = torch.randint(0, 1 << 16, (outs, ins)) - (1 << 15)
        near = (torch.randint(0, 12, (outs, ins)) + 115 << 7) | torch.randint(0, 128, (outs, ins))
        bits = torch.where(torch.rand(outs, ins) < 0.01, bits, near).short()
        weight = bits.view(torch.bfloat16)
        return format.quantize(weight if isinstance(format, Bf16Packed) else weight.nan_to_num())
    parts = {}
    for name, part in format.parts(outs, ins).items():
        if name in ("codes", "weight"):
            parts[name] = torch.randint(0, 256, part.shape).to(torch.uint8).view(part.dtype)
        elif name == "zero":
            parts[name] = torch.randint(0, 17, part.shape).to(torch.uint8)
        elif part.dtype == torch.uint8:  # e8m0, whose code 255 is refused in checkpoints
            parts[name] = torch.randint(0, 255, part.shape).to(torch.uint8)
        elif part.dtype == torch.float8_e4m3fn:
            parts[name] = torch.randint(0, 256, part.shape).to(torch.uint8).view(part.dtype)
        else:
            low, high = (-126, 127) if part.dtype != torch.float16 else (-14, 15)
            parts[name] = (2.0 ** torch.empty(part.shape).uniform_(low, high)).to(part.dtype)
    return parts


def make_slots(format: ExpertFormat, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """Return two slots, of which the second has an expert."""
    layout = format.layout(shapes)
    slots = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    tensors = {
        name: any_codes(format.weight, *(shape[::-1] if format.transposed else shape)) for name, shape in shapes.items()
    }
    format.write(tensors, layout.views(slots[1]))
    return slots.to(DEVICE)


def dequantized(experts: ExpertFormat, shapes: dict[str, tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each projection as the kernel and as the definition dequantize it."""
    slots = make_slots(experts, shapes)
    for name, shape in shapes.items():
        matrix = slot_matrix(slots, experts, shapes, name)
        assert matrix is not None
        found = dequantize_matrix(matrix, 1, torch.empty(shape, dtype=experts.dtype, device=DEVICE))
        yield found, dequantize_matrix_plain(matrix, 1, torch.empty_like(found))


@dtypes
@pytest.mark.parametrize("format", FORMATS, ids=names)
def test_dequantized_weights_are_those_of_the_definition(format: WeightFormat, dtype: torch.dtype) -> None:
    experts = ExpertFormat(format, dtype, transposed=False)
    shapes = {"gate_up_proj": (40, 264), "down_proj": (132, 20)}
    for found, expected in dequantized(experts, shapes):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        if dtype == torch.bfloat16 and isinstance(format, Bf16Packed):  # also the bits of NaN and zeros
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def halves(words: list[int], dtype: torch.dtype) -> Tensor:
    """Return the lower and the higher half of each word as numbers."""
    bits = torch.tensor([half for word in words for half in (word & 0xFFFF, word >> 16)])
    return torch.where(bits > 32767, bits - 65536, bits).short().view(dtype)


def word_of(pair: Tensor) -> int:
    low, high = (int(half) & 0xFFFF for half in pair.view(torch.int16))
    return low | high << 16


def half_instruction(name: str, sources: list[int]) -> int:
    """Execute `fma`, `mul` or `add` of two numbers at once."""
    dtype = torch.bfloat16 if name.endswith("bf16x2") else torch.float16
    a, b, *c = (halves([source], dtype).double() for source in sources)
    found = a + b if name.startswith("add") else a * b + (c[0] if c else 0.0)
    return word_of(found.to(dtype))


def run_assembly(text: str, **registers: int) -> list[int]:
    """Execute the few instructions that the kernels' assembly has; return registers $0 to $3. No predicate holds."""
    registers = {f"${name[1:]}": number for name, number in registers.items()}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in re.sub(r"^{|}$|\.reg[^;]*;", "", text.strip()).split(";"):
        if not line.strip() or line.lstrip().startswith(("@", "setp", "mad.wide")):  # of raw groups
            continue
        name, operands = line.split(maxsplit=1)
        if name == "mov.b64":  # {low, high} of a register of 64 bits
            low, high, source = re.findall(r"[$\w]+", operands)
            registers[low], registers[high] = value(source) & 0xFFFFFFFF, value(source) >> 32
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        a, *rest = (value(source) for source in sources)
        if name == "prmt.b32":
            pool = a.to_bytes(4, "little") + rest[0].to_bytes(4, "little")
            found = int.from_bytes(bytes(pool[rest[1] >> 4 * i & 7] for i in range(4)), "little")
        elif name == "lop3.b32":
            assert rest[2] == 0xEA
            found = a & rest[0] | rest[1]
        elif name == "mov.b32":
            found = a
        elif name == "mad.lo.s32":
            found = a * rest[0] + rest[1]
        elif name.endswith("x2"):
            found = half_instruction(name, [a, *rest])
        else:
            operation = {
                "shl.b32": int.__lshift__, "shr.u32": int.__rshift__, "and.b32": int.__and__, "xor.b32": int.__xor__,
                "add.s32": int.__add__, "mul.lo.s32": int.__mul__,
            }[name]  # fmt: skip
            found = operation(a, rest[0])
        registers[target] = found & 0xFFFFFFFF
    return [registers.get(f"${i}", 0) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_assembly_multiplies_every_int8_code(dtype: torch.dtype) -> None:
    text = (packed._INT8_BFLOAT16 if dtype == torch.bfloat16 else packed._INT8_FLOAT16).value
    for first in range(256):
        codes = torch.tensor([first, (first * 7 + 3) % 256, 255 - first, (first + 128) % 256], dtype=torch.uint8)
        scale = torch.tensor([0.0371, -3.3, 1.0, 2.0**-9]).to(dtype)
        word = int.from_bytes(bytes(codes.tolist()), "little")
        outs = run_assembly(text, r2=word, r3=word_of(scale[:2]), r4=word_of(scale[2:]))[:2]
        assert torch.equal(halves(outs, dtype), (codes.view(torch.int8).float() * scale.float()).to(dtype))


def test_assembly_unpacks_bfloat16() -> None:
    """One row of 128 weights; the groups with rare exponents are left out."""
    weight = (torch.randn(1, 128) * 0.03).bfloat16()
    parts = Bf16Packed(8192).quantize(weight)
    low, codes, base = parts["low"][0, 0], parts["codes"][0, 0], int(parts["base"])
    planes, compared = weight.view(8, 16), 0
    for group in range(16):
        words = [int(one) & 0xFFFFFFFF for one in (low[0, group], low[1, group], codes[group])]
        if words[2] == 0xFFFFFFFF:
            continue
        text = packed._BF16_PACKED.value
        outs = run_assembly(text, r4=words[0], r5=words[1], r6=words[2], r7=base * 0x00800080)
        assert torch.equal(halves(outs, torch.bfloat16), planes[:, group])
        compared += 1
    assert compared > 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["int4", "e2m1"])
def test_assembly_decodes_every_nibble(kind: str, dtype: torch.dtype) -> None:
    """The interpreter runs other code; on a GPU, the tests above run the assembly."""
    short = "BFLOAT16" if dtype == torch.bfloat16 else "FLOAT16"
    text = getattr(packed, f"_{kind.upper()}_{short}").value
    values = list(range(16)) if kind == "int4" else [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    offset = {"BFLOAT16": 128, "FLOAT16": 1024}[short] if kind == "int4" else 0
    unit = 1.0 if kind == "int4" else {"BFLOAT16": 2.0**126, "FLOAT16": 2.0**14}[short]
    for first in range(256):
        data = [first, (first * 7 + 3) % 256, 255 - first, (first + 128) % 256]
        outs = run_assembly(text, r4=int.from_bytes(bytes(data), "little"))
        words = data[0] | data[1] << 8, data[2] | data[3] << 8
        expected = [values[word >> 4 * place & 15] for place in range(4) for word in words]
        assert (halves(outs, dtype).double() * unit - offset).tolist() == expected


def test_assembly_separates_four_inputs() -> None:
    outs = run_assembly(packed._UNZIP_QUADS.value, r4=0x0003000200010000, r5=0x0007000600050004)
    assert outs == [0x00040000, 0x00050001, 0x00060002, 0x00070003]


def test_assembly_widens_two_numbers() -> None:
    numbers = torch.tensor([-3.0, 2.0**-127]).bfloat16()
    outs = run_assembly(packed._WIDEN.value, r2=word_of(numbers))[:2]
    words = torch.tensor([word - (word >> 31 << 32) for word in outs], dtype=torch.int32)
    assert torch.equal(words.view(torch.float32), numbers.float())


@triton.jit
def _decode_kernel(codes, zeros, out, KIND: tl.constexpr, DTYPE: tl.constexpr) -> None:
    i = tl.arange(0, 256)
    scale = packed._decode_scale(tl.load(codes + i)[:, None], zeros, i, KIND, True, DTYPE, False, False)
    tl.store(out + i[:, None], scale.to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_scales_with_a_factor_multiply_every_code_exactly(kind: str, dtype: torch.dtype) -> None:
    """All scales that the kernels' first try is for; larger ones make it compute the tile again without a factor."""
    short, factor = ("BFLOAT16", 2.0**126) if dtype == torch.bfloat16 else ("FLOAT16", 2.0**14)
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)
    limits = torch.full((256,), 2.0**-8 * (1 - 2.0**-24), device=DEVICE)
    found, narrow = torch.empty(256, device=DEVICE), tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    _decode_kernel[(1,)](codes, limits, found, KIND=kind, DTYPE=narrow)
    if kind == "mxfp4":
        exact = 2.0 ** (torch.arange(128).double() - 127)
    else:
        exact = (codes.view(torch.float8_e4m3fn).float() * limits).cpu().double()
        exact = torch.where(exact.isnan(), 0.0, exact)
        found = torch.where(found.isnan(), 0.0, found)
    scale = found.cpu().double()[: len(exact)]
    assert torch.equal(scale, exact * factor), "finite, and exact"
    outs = run_assembly(getattr(packed, f"_E2M1_{short}").value, r4=0xFBEA_7362)
    fields, values = halves(outs, dtype).double(), [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    for place, (low, high) in enumerate(((0x2, 0xA), (0x6, 0xE), (0x3, 0xB), (0x7, 0xF))):
        for half, code in enumerate((low, high)):
            product = (fields[2 * place + half] * scale).float().to(dtype)
            assert torch.equal(product, (values[code] * exact).float().to(dtype))


@needs_cuda
@pytest.mark.parametrize("name", ["int4-g128", "mxfp4", "nvfp4", "fp8-block128", "int8-channel", "bf16-packed"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dequantized_weights_of_real_sizes(name: str, dtype: torch.dtype) -> None:
    weight = Bf16Packed(8192) if name == "bf16-packed" else weight_format(name)
    experts, shapes = ExpertFormat(weight, dtype), {"gate_up_proj": (2 * 2880, 2880), "down_proj": (2880, 2880)}
    for found, expected in dequantized(experts, shapes):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("format", "shapes"),
    [
        (Int8(24), {"gate_up_proj": (8, 96), "down_proj": (48, 72)}),  # groups that are no power of two
        (Int4(32, False), {"gate_up_proj": (8, 18), "down_proj": (18, 22)}),  # rows that are no multiple of four
    ],
    ids=["groups", "rows"],
)
def test_matrices_of_odd_sizes_have_no_kernel(format: WeightFormat, shapes: dict[str, tuple[int, int]]) -> None:
    experts = ExpertFormat(format, torch.float32)
    slots = make_slots(experts, shapes)
    assert all(slot_matrix(slots, experts, shapes, name) is None for name in shapes)
    assert slot_experts(slot_matrices(slots, experts, shapes), shapes) is None


@pytest.mark.parametrize(
    "shapes",
    [
        {"up_proj": (8, 16), "down_proj": (16, 8)},  # not gated
        {"gate_up_proj": (16, 16), "down_proj": (16, 8), "gate_up_proj_scale": (16,)},  # something unknown
    ],
)
def test_experts_of_other_kinds_have_no_kernel(shapes: dict[str, tuple[int, ...]]) -> None:
    format = ExpertFormat(Dense(torch.float32), torch.float32)
    slots = torch.zeros(1, format.layout(shapes).nbytes, dtype=torch.uint8)
    assert slot_experts(slot_matrices(slots, format, shapes), shapes) is None


def test_dense_transposed_experts_have_no_kernel() -> None:
    shapes = {"gate_up_proj": (16, 16), "down_proj": (8, 16)}
    for weight, expected in ((Dense(torch.float32), False), (weight_format("mxfp4"), True)):
        format = ExpertFormat(weight, torch.float32, transposed=True)
        slots = torch.zeros(1, format.layout(shapes).nbytes, dtype=torch.uint8)
        assert (slot_experts(slot_matrices(slots, format, shapes), shapes) is not None) == expected


# ---- gates


class Gated(nn.Module):
    """Experts module without weights."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, act_fn: nn.Module | None = None, **attributes: Any) -> None:
        super().__init__()
        self.act_fn = act_fn or nn.SiLU()
        for name, value in attributes.items():
            setattr(self, name, value)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class OneSided(Gated):
    """Clamps only the gate, which no model does."""

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up


class Clamped(Gated):
    """The experts of DeepSeek-V4."""

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Interleaved(Gated):
    """The experts of gpt-oss."""

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class Broken(Gated):
    def _apply_gate(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs a device")


def test_gates_are_found_by_their_results() -> None:
    assert kernel_gate(Gated()) == Gate("silu")
    assert kernel_gate(Gated(nn.ReLU())) == Gate("relu")
    assert kernel_gate(Gated(limit=7.0)) == Gate("silu"), "the module has a limit, and does not apply it"
    assert kernel_gate(Clamped(limit=10.0)) == Gate("silu", 10.0)
    assert kernel_gate(Interleaved(limit=7.0, alpha=1.702)) == Gate("silu", 7.0, 1.702, 1.0, interleaved=True)
    for unknown in (OneSided(limit=1.0), Gated(nn.Mish()), Broken()):
        assert kernel_gate(unknown) is None
    ungated = Gated()
    ungated.has_gate = False
    assert kernel_gate(ungated) is None


def test_gates_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    gate = kernel_gate(GptOssExperts(config))
    assert gate is not None
    assert gate.interleaved
    both = 20 * torch.randn(5, 16)
    assert torch.allclose(gate.apply(both, silu), GptOssExperts(config)._apply_gate(both))
    assert math.isclose(gate.alpha, 1.702)
