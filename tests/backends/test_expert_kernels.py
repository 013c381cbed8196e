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

from spmoe.backends.kernels import experts
from spmoe.backends.kernels.dense import ACTIVATIONS
from spmoe.backends.kernels.experts import (
    ExpertLayout,
    ExpertScratch,
    ExpertTile,
    ExpertTiles,
    ScratchBuffer,
    reduce_experts,
    run_expert_batch,
    select_expert_tiles,
)

pytestmark = KERNEL_MARKS


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_kernel_test(monkeypatch)


class Layer:
    """Random experts in shuffled slots, and rows that are routed to them."""

    def __init__(self, dtype: torch.dtype, rows: int, top_k: int, count: int, hidden: int, ffn: int) -> None:
        aligned = -(-2 * ffn * hidden // 128) * 128
        self.layout = ExpertLayout(hidden, ffn, 128, 128 + aligned)
        blob, slots = 128 + aligned + ffn * hidden + 64, count + 3
        self.arena = (torch.randn(slots, blob) / math.sqrt(hidden)).to(DEVICE, dtype)
        self.table = torch.randperm(slots)[:count].to(DEVICE, torch.int32)
        self.hidden = torch.randn(rows, hidden).to(DEVICE, dtype)
        self.index = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).to(DEVICE)
        self.weights = torch.rand(rows, top_k).to(DEVICE)
        self.count, self.dtype = count, dtype

    def scratch(self, tiles: ExpertTiles | None = None) -> ExpertScratch:
        """Allocate uninitialized scratch, optionally with other tiles than the default ones."""
        rows, top_k = self.index.shape
        scratch = ScratchBuffer(top_k, self.layout, self.dtype, self.arena.device).scratch(rows)
        if tiles is None:
            return scratch
        sums = torch.empty(tiles.splits, *scratch.partial_sums.shape[1:], dtype=torch.float32, device=DEVICE)
        return replace(scratch, tiles=tiles, partial_sums=sums)

    def run(
        self, scratch: ExpertScratch, batch: set[int] | None = None, activation: str = "silu", plain: bool = False
    ) -> None:
        """Run one batch (default: all experts); the table has -1 for experts that are not in it."""
        table = self.table
        if batch is not None:
            absent = torch.tensor([expert not in batch for expert in range(self.count)])
            table = table.masked_fill(absent.to(table.device), -1)
        run = experts.run_expert_batch_plain if plain else run_expert_batch
        run(self.hidden, self.index, self.weights, table, self.arena, self.layout, activation, scratch)

    def out(self, scratch: ExpertScratch) -> Tensor:
        """Reduce the scratch to the layer's output."""
        return reduce_experts(scratch, torch.full_like(self.hidden, math.nan))

    def reference(self, activation: str) -> Tensor:
        """Compute the layer's output in float64, row by row."""
        (hidden, ffn, gate_up_offset, down_offset), act = self.layout, ACTIVATIONS[activation]
        out = torch.zeros_like(self.hidden, dtype=torch.float64)
        for row, routed in enumerate(self.index.tolist()):
            for expert, weight in zip(routed, self.weights[row].double(), strict=True):
                blob = self.arena[self.table[expert]].double()
                gate_up = blob[gate_up_offset : gate_up_offset + 2 * ffn * hidden].view(2 * ffn, hidden)
                gate, up = (gate_up @ self.hidden[row].double()).chunk(2)
                out[row] += weight * (
                    blob[down_offset : down_offset + hidden * ffn].view(hidden, ffn) @ (act(gate) * up)
                )
        return out


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
    layer = Layer(dtype, rows, top_k, count, hidden, ffn)
    scratch, expected = layer.scratch(), layer.scratch()
    layer.run(scratch, activation=activation)
    layer.run(expected, activation=activation, plain=True)
    assert close(scratch.up, expected.up, dtype)
    assert close(scratch.partial_sums, expected.partial_sums, dtype)
    outs = torch.empty(layer.hidden.shape, device=DEVICE), torch.empty(layer.hidden.shape, device=DEVICE)
    assert torch.equal(reduce_experts(scratch, outs[0]), experts.reduce_experts_plain(scratch, outs[1]))
    assert close(layer.out(scratch), layer.reference(activation), dtype)


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
    assert close(layer.out(scratch), layer.reference("silu"), torch.float16)


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
    assert close(layer.out(scratch), layer.reference("silu"), torch.float32)


def test_routing_weights_may_have_the_models_dtype() -> None:
    layer = Layer(torch.bfloat16, 3, 2, 4, 32, 32)
    layer.weights = layer.weights.bfloat16()
    scratch = layer.scratch()
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference("silu"), torch.bfloat16)


def test_more_than_64_rows_are_rejected() -> None:
    layer = Layer(torch.float32, 65, 1, 4, 16, 16)
    with pytest.raises(ValueError, match="expected 1 to 64 rows, got 65"):
        layer.scratch()


@pytest.mark.parametrize(
    ("hidden", "ffn", "top_k"), [(4096, 14336, 2), (4096, 6400, 2), (2048, 1408, 8), (2048, 768, 8), (2048, 1024, 8)]
)
def test_scratch_buffer_fits_the_memory_plan(hidden: int, ffn: int, top_k: int) -> None:
    """engine/memory.py plans two float32 rows of the widest field per (row, top-k position) pair."""
    buffer = ScratchBuffer(top_k, ExpertLayout(hidden, ffn, 0, 0), torch.bfloat16, "meta")
    assert buffer.nbytes <= 4 * max(2 * ffn, hidden) * 2 * top_k * experts.MAX_KERNEL_ROWS


def test_expert_tiles_are_equal_for_1_to_16_rows() -> None:
    for layout, top_k in [(ExpertLayout(4096, 14336, 0, 0), 2), (ExpertLayout(2048, 1408, 0, 0), 8)]:
        tiles = select_expert_tiles(1, layout, top_k, torch.bfloat16)
        assert all(select_expert_tiles(rows, layout, top_k, torch.bfloat16) == tiles for rows in range(2, 17))
        assert (layout.ffn % tiles.up.block_n, layout.hidden % tiles.up.block_k) == (0, 0)
        assert (layout.hidden % tiles.down.block_n, layout.ffn % tiles.down.block_k) == (0, 0)


@needs_cuda
def test_slots_beyond_4_gib() -> None:
    layer = Layer(torch.bfloat16, 2, 2, 4, 64, 64)
    arena = torch.zeros(
        (5 << 30) // (2 * layer.arena.shape[1]), layer.arena.shape[1], dtype=torch.bfloat16, device=DEVICE
    )
    arena[-layer.arena.shape[0] :] = layer.arena
    layer.table += arena.shape[0] - layer.arena.shape[0]
    layer.arena = arena
    scratch = layer.scratch()
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference("silu"), torch.bfloat16)


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
        assert close(out, layer.reference("silu"), torch.bfloat16)
