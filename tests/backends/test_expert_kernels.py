"""Kernels of MoE experts against their PyTorch references and float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_helpers import DEVICE, KERNEL_MARKS, close, dtypes, needs_cuda, prepare_kernel_test
from torch import Tensor

from spmoe.backends.base import Gate
from spmoe.backends.kernels import experts
from spmoe.backends.kernels.dense import ACTIVATIONS
from spmoe.backends.kernels.experts import (
    ExpertScratch,
    ExpertShape,
    ExpertTile,
    ExpertTiles,
    ScratchBuffer,
    SlotExperts,
    reduce_experts,
    run_expert_batch,
    select_expert_tiles,
    slot_experts,
    slot_matrices,
)
from spmoe.formats.base import weight_format
from spmoe.formats.bf16_packed import Bf16Packed
from spmoe.formats.dense import Dense
from spmoe.formats.expert import ExpertFormat

pytestmark = KERNEL_MARKS


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_kernel_test(monkeypatch)


PACKED = [
    "int4-g32", "int4-g128", "int4-asym-g64", "int8-channel", "int8-g64", "fp8-block128", "fp8-channel", "fp8-tensor",
    "mxfp4", "nvfp4", "bf16-packed",
]  # fmt: skip


SILU = Gate("silu")


class Layer:
    """Random experts in shuffled slots, and rows that are routed to them."""

    def __init__(
        self, dtype: torch.dtype, rows: int, top_k: int, count: int, hidden: int, ffn: int, name: str = "",
        gate: Gate = SILU, bias: bool = False,
    ) -> None:  # fmt: skip
        # bf16-packed has room for all weights, so that random exponents fit
        weight = Bf16Packed(8192) if name == "bf16-packed" else weight_format(name) if name else Dense(dtype)
        self.format, self.gate = ExpertFormat(weight, dtype, transposed=bool(name) and bias), gate
        self.shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
        if self.format.transposed:
            self.shapes = {key: shape[::-1] for key, shape in self.shapes.items()}
        if bias:
            self.shapes |= {"gate_up_proj_bias": (2 * ffn,), "down_proj_bias": (hidden,)}
        layout, slots = self.format.layout(self.shapes), count + 3
        self.slots = torch.zeros(slots, layout.nbytes, dtype=torch.uint8, device=DEVICE)
        for slot in self.slots:
            normal = {key: torch.randn(shape, device=DEVICE) for key, shape in self.shapes.items()}
            dense = {key: (tensor / math.sqrt(hidden)).bfloat16() for key, tensor in normal.items()}
            self.format.convert(dense, layout.views(slot))
        self.table = torch.randperm(slots)[:count].to(DEVICE, torch.int32)
        self.hidden = torch.randn(rows, hidden).to(DEVICE, dtype)
        self.index = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).to(DEVICE)
        self.weights = torch.rand(rows, top_k).to(DEVICE)
        self.count, self.dtype = count, dtype

    @property
    def experts(self) -> SlotExperts:
        found = slot_experts(slot_matrices(self.slots, self.format, self.shapes), self.shapes)
        assert found is not None
        return found

    def scratch(self, tiles: ExpertTiles | None = None) -> ExpertScratch:
        """Allocate uninitialized scratch, optionally with other tiles than the default ones."""
        rows, top_k = self.index.shape
        scratch = ScratchBuffer(top_k, self.experts.shape, DEVICE).scratch(rows)
        if tiles is None:
            return scratch
        sums = torch.empty(tiles.splits, *scratch.partial_sums.shape[1:], dtype=torch.float32, device=DEVICE)
        return replace(scratch, tiles=tiles, partial_sums=sums)

    def run(self, scratch: ExpertScratch, batch: set[int] | None = None, plain: bool = False) -> None:
        """Run one batch (default: all experts); the table has -1 for experts that are not in it."""
        table = self.table
        if batch is not None:
            absent = torch.tensor([expert not in batch for expert in range(self.count)])
            table = table.masked_fill(absent.to(table.device), -1)
        run = experts.run_expert_batch_plain if plain else run_expert_batch
        run(self.hidden, self.index, self.weights, table, self.experts, self.gate, scratch)

    def out(self, scratch: ExpertScratch) -> Tensor:
        """Reduce the scratch to the layer's output."""
        return reduce_experts(scratch, torch.full_like(self.hidden, math.nan))

    def dense(self, expert: int) -> dict[str, Tensor]:
        """Return an expert's dequantized tensors in float64, matrices as [out, in]."""
        views = self.format.layout(self.shapes).views(self.slots[self.table[expert]])
        found = {name: tensor.double() for name, tensor in self.format.dequantize(views).items()}
        return {n: t.T if t.ndim == 2 and self.format.transposed else t for n, t in found.items()}

    def reference(self) -> Tensor:
        """Compute the layer's output in float64, row by row."""
        out, zero = torch.zeros_like(self.hidden, dtype=torch.float64), torch.zeros((), device=DEVICE)
        for row, routed in enumerate(self.index.tolist()):
            for expert, weight in zip(routed, self.weights[row].double(), strict=True):
                dense, x = self.dense(expert), self.hidden[row].double()
                both = dense["gate_up_proj"] @ x + dense.get("gate_up_proj_bias", zero)
                y = dense["down_proj"] @ gated(self.gate, both) + dense.get("down_proj_bias", zero)
                out[row] += weight * y
        return out


def gated(gate: Gate, both: Tensor) -> Tensor:
    """Combine gate and up, written out for every kind of gate that models have."""
    first, second = (both[0::2], both[1::2]) if gate.interleaved else both.chunk(2)
    if gate.limit:
        first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
    if gate.up_offset:
        return first * torch.sigmoid(gate.alpha * first) * (second + 1)
    return ACTIVATIONS[gate.activation](first) * second


@dtypes
@pytest.mark.parametrize(
    ("rows", "top_k", "count", "hidden", "ffn", "activation"),
    [
        (1, 2, 8, 160, 160, "silu"),
        (5, 2, 8, 160, 12, "silu"),
        (5, 3, 4, 64, 96, "gelu"),
        (3, 1, 4, 48, 33, "gelu_tanh"),
        (17, 2, 3, 32, 32, "relu"),
        (40, 4, 6, 33, 20, "silu"),
    ],
)
def test_experts_match_reference(
    dtype: torch.dtype, rows: int, top_k: int, count: int, hidden: int, ffn: int, activation: str
) -> None:
    layer = Layer(dtype, rows, top_k, count, hidden, ffn, gate=Gate(activation))
    scratch, expected = layer.scratch(), layer.scratch()
    layer.run(scratch)
    layer.run(expected, plain=True)
    assert close(scratch.up, expected.up, dtype)
    assert close(scratch.partial_sums, expected.partial_sums, dtype)
    outs = torch.empty(layer.hidden.shape, device=DEVICE), torch.empty(layer.hidden.shape, device=DEVICE)
    assert torch.equal(reduce_experts(scratch, outs[0]), experts.reduce_experts_plain(scratch, outs[1]))
    assert close(layer.out(scratch), layer.reference(), dtype)


@pytest.mark.parametrize(
    ("ffn", "splits"),
    [
        (96, 2),
        (96, 3),
        (80, 2),
        (40, 3),
        (16, 4),
    ],  # equal, unequal, with a remainder, and with a short or an empty split
)
def test_every_split_matches_reference(ffn: int, splits: int) -> None:
    tiles = ExpertTiles(ExpertTile(32, 16, 2, 2), ExpertTile(16, 16, 4, 3), splits)
    layer = Layer(torch.float16, 3, 2, 4, 48, ffn)
    scratch, expected = layer.scratch(tiles), layer.scratch(tiles)
    layer.run(scratch)
    layer.run(expected, plain=True)
    for sums, expected_sums in zip(scratch.partial_sums, expected.partial_sums, strict=True):
        assert close(sums, expected_sums, torch.float16)
    assert close(layer.out(scratch), layer.reference(), torch.float16)


@pytest.mark.parametrize("seed", range(4))
def test_results_are_bit_equal_however_experts_are_batched(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layer = Layer(rng.choice([torch.float32, torch.bfloat16]), rng.choice([1, 5, 18]), 3, 8, 64, 48)
    whole, batched = layer.scratch(), layer.scratch()
    layer.run(whole)
    order = rng.sample(range(8), 8)
    cuts = [0, *sorted(rng.sample(range(1, 8), rng.randint(1, 4))), 8]
    written = torch.zeros_like(layer.index, dtype=torch.bool)
    for start, end in pairwise(cuts):
        batch = set(order[start:end])
        before = batched.up.clone(), batched.partial_sums.clone()
        layer.run(batched, batch)
        now = torch.isin(layer.index, torch.tensor(sorted(batch), device=DEVICE))
        written |= now
        for after, old in zip((batched.up, batched.partial_sums), before, strict=True):
            assert torch.equal(after.isfinite().all(-1), written.flatten().expand(after.shape[:-1]))
            assert torch.equal(after[..., ~now.flatten(), :].nan_to_num(), old[..., ~now.flatten(), :].nan_to_num())
    assert torch.equal(batched.up, whole.up)
    assert torch.equal(batched.partial_sums, whole.partial_sums)
    assert torch.equal(layer.out(batched), layer.out(whole))


@dtypes
def test_experts_are_batch_invariant(dtype: torch.dtype) -> None:
    layer = Layer(dtype, 5, 2, 4, 64, 48)
    scratch = layer.scratch()
    layer.run(scratch)
    full = layer.out(scratch)
    hidden, index, weights = layer.hidden, layer.index, layer.weights
    for row in range(5):
        layer.hidden, layer.index, layer.weights = hidden[row, None], index[row, None], weights[row, None]
        alone = layer.scratch()
        layer.run(alone)
        assert torch.equal(layer.out(alone)[0], full[row])


@pytest.mark.parametrize("expert", [0, 1, 31, 32, 63, 64, 127, 128, 511, 512, 576])
def test_each_of_577_experts_can_run_alone(expert: int) -> None:
    layer = Layer(torch.float32, 2, 1, 577, 16, 16)
    layer.index = torch.tensor([[expert], [(expert + 1) % 577]], device=DEVICE)
    scratch = layer.scratch()
    layer.run(scratch, {expert})
    assert scratch.up.isfinite().all(-1).tolist() == [True, False]
    layer.run(scratch, set(range(577)) - {expert})
    assert close(layer.out(scratch), layer.reference(), torch.float32)


def test_routing_weights_may_have_the_models_dtype() -> None:
    layer = Layer(torch.bfloat16, 3, 2, 4, 32, 32)
    layer.weights = layer.weights.bfloat16()
    scratch = layer.scratch()
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference(), torch.bfloat16)


def test_more_than_64_rows_are_rejected() -> None:
    layer = Layer(torch.float32, 65, 1, 4, 16, 16)
    with pytest.raises(ValueError, match="expected 1 to 64 rows, got 65"):
        layer.scratch()


@pytest.mark.parametrize("kind", ["dense", "bf16-packed", "fp8", "int4"])
@pytest.mark.parametrize(
    ("hidden", "ffn", "top_k"), [(4096, 14336, 2), (4096, 6400, 2), (2048, 1408, 8), (2048, 768, 8), (2048, 1024, 8)]
)
def test_scratch_buffer_fits_the_memory_plan(hidden: int, ffn: int, top_k: int, kind: str) -> None:
    """engine/memory.py plans two float32 rows of the widest field per (row, top-k position) pair."""
    buffer = ScratchBuffer(top_k, ExpertShape(hidden, ffn, kind, torch.bfloat16), "meta")
    assert buffer.nbytes <= 4 * max(2 * ffn, hidden) * 2 * top_k * experts.MAX_KERNEL_ROWS


@pytest.mark.parametrize("kind", ["dense", "bf16-packed", "int8", "mxfp4"])
def test_expert_tiles_are_equal_for_1_to_16_rows(kind: str) -> None:
    for hidden, ffn, top_k in [(4096, 14336, 2), (2048, 1408, 8), (2880, 2880, 4)]:
        shape = ExpertShape(hidden, ffn, kind, torch.bfloat16)
        tiles = select_expert_tiles(1, shape, top_k)
        assert all(select_expert_tiles(rows, shape, top_k) == tiles for rows in range(2, 17))
        split = -(-ffn // (tiles.down.block_k * tiles.splits)) * tiles.down.block_k
        assert split * (tiles.splits - 1) < ffn, "no split is empty"
        if kind == "dense" and hidden % 128 == 0:
            assert (ffn % tiles.up.block_n, hidden % tiles.up.block_k) == (0, 0)
            assert (hidden % tiles.down.block_n, ffn % tiles.down.block_k) == (0, 0)


@pytest.mark.parametrize("rows", [1, 40])
def test_bf16_packed_splits_its_inputs_as_bfloat16_does(rows: int) -> None:
    """Otherwise sums are rounded in another order, and bits differ."""
    for hidden, ffn, top_k in [(4096, 14336, 2), (2048, 1408, 8), (2048, 768, 8), (2880, 2880, 4), (64, 96, 2)]:
        found = []
        for kind in ("dense", "bf16-packed"):
            tiles = select_expert_tiles(rows, ExpertShape(hidden, ffn, kind, torch.bfloat16), top_k)
            size = -(-ffn // (tiles.down.block_k * tiles.splits)) * tiles.down.block_k
            found.append((tiles.splits, size if tiles.splits > 1 else ffn))
        assert found[0] == found[1]


# ---- packed weights


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("dtype", "rows", "hidden", "ffn"),
    [(torch.float32, 2, 96, 160), (torch.bfloat16, 3, 160, 144), (torch.float16, 1, 128, 256)],
    ids=str,
)
def test_packed_experts_match_reference(name: str, dtype: torch.dtype, rows: int, hidden: int, ffn: int) -> None:
    layer = Layer(dtype, rows, 2, 3, hidden, ffn, name)
    scratch, expected = layer.scratch(), layer.scratch()
    layer.run(scratch)
    layer.run(expected, plain=True)
    assert close(scratch.up, expected.up, dtype)
    assert close(scratch.partial_sums, expected.partial_sums, dtype)
    assert close(layer.out(scratch), layer.reference(), dtype)


@pytest.mark.parametrize("name", ["int4-asym-g32", "mxfp4", "bf16-packed", "fp8-block128"])
def test_more_rows_of_packed_experts(name: str) -> None:
    layer = Layer(torch.bfloat16, 20, 2, 3, 70 if name.startswith("fp8") else 64, 96, name)
    scratch = layer.scratch()
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference(), torch.bfloat16)


GATES = {
    "gpt-oss": Gate("silu", limit=0.3, alpha=1.702, up_offset=1.0, interleaved=True),
    "deepseek-v4": Gate("silu", limit=0.25),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", ["", "mxfp4", "int8-channel"])
def test_biases_and_clamped_gates(gate: str, name: str) -> None:
    layer = Layer(torch.float32, 5, 2, 3, 64, 96, name, GATES[gate], bias=True)
    scratch, expected = layer.scratch(), layer.scratch()
    layer.run(scratch)
    layer.run(expected, plain=True)
    assert close(scratch.up, expected.up, torch.float32)
    assert close(layer.out(scratch), layer.reference(), torch.float32)


def test_bias_is_added_once_however_inputs_are_split() -> None:
    tiles = ExpertTiles(ExpertTile(32, 64, 2, 2), ExpertTile(16, 64, 4, 3), 3)
    layer = Layer(torch.float32, 3, 2, 4, 48, 192, "mxfp4", bias=True)
    scratch = layer.scratch(tiles)
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference(), torch.float32)


@pytest.mark.parametrize("name", ["int4-asym-g32", "int8-g32", "mxfp4"])
def test_scales_after_the_last_group_are_not_read(name: str) -> None:
    """The last tile of a split may lie wholly after the inputs; whatever follows the scales must not become NaN."""
    tiles = ExpertTiles(ExpertTile(32, 64, 2, 2), ExpertTile(16, 64, 4, 3), 3)
    layer = Layer(torch.float16, 2, 2, 3, 48, 320, name)  # splits of 128 inputs: the last tile starts at 320
    used = torch.zeros(layer.slots.shape[1], dtype=torch.bool)
    for field in layer.format.layout(layer.shapes).fields:
        used[field.offset : field.offset + field.nbytes] = True
    layer.slots[:, ~used.to(DEVICE)] = 0xFF
    scratch = layer.scratch(tiles)
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference(), torch.float16)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_large_scales_change_the_instructions_and_no_result(name: str, dtype: torch.dtype) -> None:
    """One large scale, of zeros, makes the kernels compute tiles of other outputs again, without a folded factor."""
    layer = Layer(dtype, 3, 2, 4, 512, 1024, name)
    layout = layer.format.layout(layer.shapes)
    expected = None
    for large in (False, True):
        for slot in layer.slots:
            for matrix in ("gate_up_proj", "down_proj"):
                parts = layer.format.parts(layout.views(slot), matrix)
                parts["codes"][:8] = 0
                if large and name == "mxfp4":
                    parts["scale"][:8] = 254
                elif large:
                    parts["global_scale"][:8] = 2.0**100
        scratch = layer.scratch()
        layer.run(scratch)
        out = layer.out(scratch)
        assert bool(out.isfinite().all())
        expected = out if expected is None else expected
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["int4-g64", "mxfp4", "fp8-channel", "bf16-packed"])
def test_packed_results_do_not_depend_on_the_batch(name: str) -> None:
    layer = Layer(torch.bfloat16, 4, 2, 4, 128, 64, name)
    whole, batched = layer.scratch(), layer.scratch()
    layer.run(whole)
    for batch in ({2}, {0, 3}, {1}):
        layer.run(batched, batch)
    assert torch.equal(layer.out(batched), layer.out(whole))
    hidden, index, weights = layer.hidden, layer.index, layer.weights
    for row in range(4):
        layer.hidden, layer.index, layer.weights = hidden[row, None], index[row, None], weights[row, None]
        alone = layer.scratch()
        layer.run(alone)
        assert torch.equal(layer.out(alone)[0], layer_row(whole, hidden, row))


def layer_row(scratch: ExpertScratch, hidden: Tensor, row: int) -> Tensor:
    return reduce_experts(scratch, torch.empty_like(hidden))[row]


def as_dense(layer: Layer, dtype: torch.dtype) -> Layer:
    """Return the layer with its experts dequantized into dense slots."""
    dense = Layer(dtype, *layer.index.shape, layer.count, layer.hidden.shape[1], layer.experts.shape.ffn)
    packed_layout, layout = layer.format.layout(layer.shapes), dense.format.layout(dense.shapes)
    for packed, slot in zip(layer.slots, dense.slots, strict=True):
        for name, tensor in layer.format.dequantize(packed_layout.views(packed)).items():
            layout.views(slot)[name].copy_(tensor)
    dense.table, dense.hidden, dense.index, dense.weights = layer.table, layer.hidden, layer.index, layer.weights
    return dense


@pytest.mark.parametrize("rows", [1, 17])
def test_bf16_packed_and_bfloat16_give_equal_bits(rows: int) -> None:
    layer = Layer(torch.bfloat16, rows, 2, 3, 160, 256, "bf16-packed")
    dense = as_dense(layer, torch.bfloat16)
    found, expected = layer.scratch(), dense.scratch()
    layer.run(found)
    dense.run(expected)
    assert torch.equal(layer.out(found), dense.out(expected))


@needs_cuda
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 64])
@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 14336), (2048, 1408), (2880, 2880)])
def test_bf16_packed_and_bfloat16_give_equal_bits_at_real_sizes(hidden: int, ffn: int, rows: int) -> None:
    layer = Layer(torch.bfloat16, rows, 2, 2, hidden, ffn, "bf16-packed")
    dense = as_dense(layer, torch.bfloat16)
    found, expected = layer.scratch(), dense.scratch()
    layer.run(found)
    dense.run(expected)
    assert torch.equal(found.up, expected.up)
    assert torch.equal(found.partial_sums, expected.partial_sums)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 5, 33, 64])
@pytest.mark.parametrize(("hidden", "ffn"), [(2048, 1408), (2880, 2880)])
@pytest.mark.parametrize("name", PACKED)
def test_packed_experts_at_real_sizes(name: str, hidden: int, ffn: int, rows: int) -> None:
    layer = Layer(torch.bfloat16, rows, 4, 8, hidden, ffn, name)
    scratch = layer.scratch()
    layer.run(scratch)
    full = layer.out(scratch)
    assert close(full, layer.reference(), torch.bfloat16)
    if rows <= 16:
        layer.hidden, layer.index, layer.weights = layer.hidden[-1:], layer.index[-1:], layer.weights[-1:]
        alone = layer.scratch()
        layer.run(alone)
        assert torch.equal(layer.out(alone)[0], full[-1])


@needs_cuda
@pytest.mark.parametrize("name", ["", "mxfp4"])
def test_slots_beyond_4_gib(name: str) -> None:
    layer = Layer(torch.bfloat16, 2, 2, 4, 64, 64, name)
    slots = torch.zeros((5 << 30) // layer.slots.shape[1], layer.slots.shape[1], dtype=torch.uint8, device=DEVICE)
    slots[-layer.slots.shape[0] :] = layer.slots
    layer.table += slots.shape[0] - layer.slots.shape[0]
    layer.slots = slots
    scratch = layer.scratch()
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference(), torch.bfloat16)


@needs_cuda
def test_captured_layer_reads_its_inputs_at_replay() -> None:
    layer = Layer(torch.bfloat16, 5, 2, 8, 160, 96)
    scratch, out = layer.scratch(), torch.zeros_like(layer.hidden)
    layer.run(scratch)  # warm-up: compiles the kernels
    reduce_experts(scratch, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run(scratch)
        reduce_experts(scratch, out)
    for _ in range(3):
        layer.hidden.normal_()
        layer.index.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(5)]))
        graph.replay()
        assert close(out, layer.reference(), torch.bfloat16)


@pytest.mark.parametrize(("first", "hidden"), [(0, 70), (4, 33)])
def test_results_of_the_cpu_are_placed_in_their_pairs_and_nowhere_else(first: int, hidden: int) -> None:
    """Pairs outside of the pass are left to the others; splits but the first one are zero."""
    values, pairs = torch.randn(5, hidden, device=DEVICE), torch.tensor([1, 4, 6, 9, 12], device=DEVICE)
    found, expected = (torch.full((3, 6, hidden), 7.0, device=DEVICE) for _ in range(2))
    experts.place_results(values, pairs, first, found)
    experts.place_results_plain(values, pairs, first, expected)
    assert torch.equal(found, expected)
    inside = [pair - first for pair in pairs.tolist() if 0 <= pair - first < 6]
    assert torch.equal((found != 7.0).all(-1).all(0).nonzero().flatten().cpu(), torch.tensor(inside))
    assert not found[1:, inside].any()


@pytest.mark.parametrize("limit", [0, 2, 3])
def test_no_more_results_of_the_cpu_are_placed_than_there_are(limit: int) -> None:
    values, pairs = torch.randn(3, 40, device=DEVICE), torch.tensor([1, 4, 2], device=DEVICE)
    found, expected = (torch.full((2, 6, 40), 7.0, device=DEVICE) for _ in range(2))
    experts.place_results(values, pairs, 0, found, torch.tensor([limit], device=DEVICE))
    experts.place_results_plain(values[:limit], pairs[:limit], 0, expected)
    assert torch.equal(found, expected)
