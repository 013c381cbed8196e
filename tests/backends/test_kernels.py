"""The kernels against their twins and float64, on CUDA or, with TRITON_INTERPRET=1, on the CPU."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends.kernels import attention, experts  # noqa: E402
from spmoe.backends.kernels.experts import Geometry, Places, Scratch, Tile, Tiles, add_up, run_expert_batch  # noqa: E402

pytestmark = [pytest.mark.usefixtures("mended_interpreter"), *([] if INTERPRETED else [pytest.mark.gpu])]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no graphs and no gigabytes")

# largest error against float64 on the same inputs, as a share of the largest true value
BOUND = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_starts_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten, and another reads, becomes visible."""

    empty, new_empty = torch.empty, Tensor.new_empty

    def unset(tensor: Tensor) -> Tensor:
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *size, **options: unset(empty(*size, **options)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **options: unset(new_empty(*size, **options)))


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Whether every element is there and within the bound."""
    error = (got.double() - want.double()).abs().max().item()
    return error <= BOUND[dtype] * want.double().abs().max().item()  # a NaN is not


class Layer:
    """Random experts in slots that are not in their order, and rows that chose among them."""

    def __init__(
        self, device: str, dtype: torch.dtype, rows: int, top_k: int, count: int, hidden: int, ffn: int
    ) -> None:
        aligned = -(-2 * ffn * hidden // 128) * 128
        self.geometry = Geometry(hidden, ffn, 128, 128 + aligned)
        blob, slots = 128 + aligned + ffn * hidden + 64, count + 3
        self.arena = (torch.randn(slots, blob) / math.sqrt(hidden)).to(device, dtype)
        self.table = torch.randperm(slots)[:count].to(device, torch.int32)
        self.hidden = torch.randn(rows, hidden).to(device, dtype)
        self.index = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).to(device)
        self.weights = torch.rand(rows, top_k).to(device)
        self.count, self.dtype = count, dtype

    def scratch(self, tiles: Tiles | None = None) -> Scratch:
        """Room for every pair, unset; by other tiles than the usual if asked."""
        rows, top_k = self.index.shape
        scratch = Places(top_k, self.geometry, self.dtype, self.arena.device).scratch(rows)
        if tiles is None:
            return scratch
        parts = torch.empty(tiles.splits, *scratch.parts.shape[1:], dtype=torch.float32, device=self.arena.device)
        return replace(scratch, tiles=tiles, parts=parts)

    def run(
        self, scratch: Scratch, batch: set[int] | None = None, activation: str = "silu", plain: bool = False
    ) -> None:
        """One batch; nothing is said of the slots of experts that are not in it."""
        table = self.table
        if batch is not None:
            absent = torch.tensor([expert not in batch for expert in range(self.count)])
            table = table.masked_fill(absent.to(table.device), -1)
        run = experts.run_expert_batch_plain if plain else run_expert_batch
        run(self.hidden, self.index, self.weights, table, self.arena, self.geometry, activation, scratch)

    def out(self, scratch: Scratch) -> Tensor:
        """All places added up."""
        return add_up(scratch, torch.full_like(self.hidden, math.nan))

    def reference(self, activation: str) -> Tensor:
        """The layer's output in float64, row by row."""
        (hidden, ffn, gate_up_at, down_at), act = self.geometry, ACTIVATIONS[activation]
        out = torch.zeros_like(self.hidden, dtype=torch.float64)
        for row, chosen in enumerate(self.index.tolist()):
            for expert, weight in zip(chosen, self.weights[row].double(), strict=True):
                blob = self.arena[self.table[expert]].double()
                gate_up = blob[gate_up_at : gate_up_at + 2 * ffn * hidden].view(2 * ffn, hidden)
                gate, up = (gate_up @ self.hidden[row].double()).chunk(2)
                out[row] += weight * (blob[down_at : down_at + hidden * ffn].view(hidden, ffn) @ (act(gate) * up))
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
def test_experts_match_float64(
    device: str, dtype: torch.dtype, rows: int, top_k: int, count: int, hidden: int, ffn: int, activation: str
) -> None:
    layer = Layer(device, dtype, rows, top_k, count, hidden, ffn)
    scratch, twin = layer.scratch(), layer.scratch()
    layer.run(scratch, activation=activation)
    layer.run(twin, activation=activation, plain=True)
    assert close(scratch.up, twin.up, dtype)
    assert close(scratch.parts, twin.parts, dtype)
    sums = torch.empty(layer.hidden.shape, device=device), torch.empty(layer.hidden.shape, device=device)
    assert torch.equal(add_up(scratch, sums[0]), experts.add_up_plain(scratch, sums[1]))
    assert close(layer.out(scratch), layer.reference(activation), dtype)


@pytest.mark.parametrize(
    ("ffn", "splits"),
    [(96, 2), (96, 3), (80, 2), (40, 3), (16, 4)],  # even, uneven, ragged, one of them short or empty
)
def test_splits_match_their_twin(device: str, ffn: int, splits: int) -> None:
    tiles = Tiles(Tile(32, 16, 2, 2), Tile(16, 16, 4, 3), splits)
    layer = Layer(device, torch.float16, 3, 2, 4, 48, ffn)
    scratch, twin = layer.scratch(tiles), layer.scratch(tiles)
    layer.run(scratch)
    layer.run(twin, plain=True)
    for part, same in zip(scratch.parts, twin.parts, strict=True):
        assert close(part, same, torch.float16)
    assert close(layer.out(scratch), layer.reference("silu"), torch.float16)


@pytest.mark.parametrize("seed", range(4))
def test_grouping_into_waves_changes_no_bit(device: str, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layer = Layer(device, rng.choice([torch.float32, torch.bfloat16]), rng.choice([1, 5, 18]), 3, 8, 64, 48)
    whole, waved = layer.scratch(), layer.scratch()
    layer.run(whole)
    order = rng.sample(range(8), 8)
    cuts = [0, *sorted(rng.sample(range(1, 8), rng.randint(1, 4))), 8]
    written = torch.zeros_like(layer.index, dtype=torch.bool)
    for start, end in pairwise(cuts):
        batch = set(order[start:end])
        before = waved.up.clone(), waved.parts.clone()
        layer.run(waved, batch)
        now = torch.isin(layer.index, torch.tensor(sorted(batch), device=device))
        written |= now
        for after, old in zip((waved.up, waved.parts), before, strict=True):
            assert torch.equal(after.isfinite().all(-1), written.flatten().expand(after.shape[:-1]))
            assert torch.equal(after[..., ~now.flatten(), :].nan_to_num(), old[..., ~now.flatten(), :].nan_to_num())
    assert torch.equal(waved.up, whole.up)
    assert torch.equal(waved.parts, whole.parts)
    assert torch.equal(layer.out(waved), layer.out(whole))


@dtypes
def test_a_rows_company_changes_no_bit(device: str, dtype: torch.dtype) -> None:
    layer = Layer(device, dtype, 5, 2, 4, 64, 48)
    scratch = layer.scratch()
    layer.run(scratch)
    together = layer.out(scratch)
    hidden, index, weights = layer.hidden, layer.index, layer.weights
    for row in range(5):
        layer.hidden, layer.index, layer.weights = hidden[row, None], index[row, None], weights[row, None]
        alone = layer.scratch()
        layer.run(alone)
        assert torch.equal(layer.out(alone)[0], together[row])


@pytest.mark.parametrize("expert", [0, 1, 31, 32, 63, 64, 127, 128, 511, 512, 576])
def test_each_of_many_experts(device: str, expert: int) -> None:
    layer = Layer(device, torch.float32, 2, 1, 577, 16, 16)
    layer.index = torch.tensor([[expert], [(expert + 1) % 577]], device=device)
    scratch = layer.scratch()
    layer.run(scratch, {expert})
    assert scratch.up.isfinite().all(-1).tolist() == [True, False]
    layer.run(scratch, set(range(577)) - {expert})
    assert close(layer.out(scratch), layer.reference("silu"), torch.float32)


def test_routing_weights_may_have_the_models_dtype(device: str) -> None:
    layer = Layer(device, torch.bfloat16, 3, 2, 4, 32, 32)
    layer.weights = layer.weights.bfloat16()
    scratch = layer.scratch()
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference("silu"), torch.bfloat16)


def test_too_much_is_refused(device: str) -> None:
    layer = Layer(device, torch.float32, 65, 1, 4, 16, 16)
    with pytest.raises(ValueError, match="1 to 64 rows"):
        layer.scratch()


@pytest.mark.parametrize(
    ("hidden", "ffn", "top_k"), [(4096, 14336, 2), (4096, 6400, 2), (2048, 1408, 8), (2048, 768, 8), (2048, 1024, 8)]
)
def test_places_fit_what_memory_is_planned_for(hidden: int, ffn: int, top_k: int) -> None:
    """Two rows of the widest field, in float32, for each expert that a row is sent to: see engine/memory.py."""
    one = Places(top_k, Geometry(hidden, ffn, 0, 0), torch.bfloat16, "meta")
    assert one._up.nbytes + one._parts.nbytes <= 4 * max(2 * ffn, hidden) * 2 * top_k * experts.MAX_KERNEL_ROWS


def test_tiles_are_the_same_up_to_sixteen_rows() -> None:
    for geometry, top_k in [(Geometry(4096, 14336, 0, 0), 2), (Geometry(2048, 1408, 0, 0), 8)]:
        usual = experts.config_for(1, geometry, top_k, torch.bfloat16)
        assert all(experts.config_for(rows, geometry, top_k, torch.bfloat16) == usual for rows in range(2, 17))
        assert (geometry.ffn % usual.up.n, geometry.hidden % usual.up.k) == (0, 0)
        assert (geometry.hidden % usual.down.n, geometry.ffn % usual.down.k) == (0, 0)


@needs_cuda
def test_slots_far_into_a_large_arena(device: str) -> None:
    layer = Layer(device, torch.bfloat16, 2, 2, 4, 64, 64)
    arena = torch.zeros(
        (5 << 30) // (2 * layer.arena.shape[1]), layer.arena.shape[1], dtype=torch.bfloat16, device=device
    )
    arena[-layer.arena.shape[0] :] = layer.arena
    layer.table += arena.shape[0] - layer.arena.shape[0]
    layer.arena = arena
    scratch = layer.scratch()
    layer.run(scratch)
    assert close(layer.out(scratch), layer.reference("silu"), torch.bfloat16)


@needs_cuda
def test_a_captured_layer_follows_its_inputs(device: str) -> None:
    layer = Layer(device, torch.bfloat16, 5, 2, 8, 160, 96)
    scratch, out = layer.scratch(), torch.zeros_like(layer.hidden)
    layer.run(scratch)  # compiles
    add_up(scratch, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run(scratch)
        add_up(scratch, out)
    for _ in range(3):
        layer.hidden.normal_()
        layer.index.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(5)]))
        graph.replay()
        assert close(out, layer.reference("silu"), torch.bfloat16)


class Context:
    """A cache with NaN behind what it holds, and the queries, keys and values of new rows."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        rows: int,
        length: int,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
    ) -> None:
        def random_rows(heads: int, dim: int) -> Tensor:  # not contiguous, as projections give them
            return torch.randn(1, rows, heads, dim).to(device, dtype).transpose(1, 2)

        self.query, self.new_keys = random_rows(heads, dim), random_rows(kv_heads, dim)
        self.new_values = random_rows(kv_heads, value_dim)
        self.keys = torch.full((1, kv_heads, 576, dim), math.nan, dtype=dtype, device=device)
        self.values = torch.full((1, kv_heads, 576, value_dim), math.nan, dtype=dtype, device=device)
        self.keys[:, :, :length].normal_()
        self.values[:, :, :length].normal_()
        self.length = torch.tensor([length], device=device, dtype=torch.int32 if length % 2 else torch.int64)
        self.scaling = 1.5 / math.sqrt(dim)

    def append(self) -> None:
        """Write the new rows."""
        attention.append(self.keys, self.values, self.new_keys, self.new_values, self.length)

    def bind_compute_stream(self, window: int | None = None) -> Tensor:
        """By the kernel."""
        return attention.decode_attention(self.query, self.keys, self.values, self.length, self.scaling, window)

    def reference(self, window: int | None = None) -> Tensor:
        """Row by row and head by head in float64."""
        query, keys, values = self.query.double(), self.keys.double(), self.values.double()
        (_, heads, rows, _), start = query.shape, int(self.length)
        out = query.new_full((1, rows, heads, values.shape[-1]), math.nan)
        for row in range(rows):
            end = start + row + 1
            seen = slice(0 if window is None else max(0, end - window), end)
            for head in range(heads):
                kv = head * keys.shape[1] // heads
                share = (keys[0, kv, seen] @ query[0, head, row] * self.scaling).softmax(0)
                out[0, row, head] = share @ values[0, kv, seen]
        return out


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 500])
@pytest.mark.parametrize(("rows", "window"), [(1, None), (5, None), (5, 3)])
def test_attention_of_every_length(device: str, length: int, rows: int, window: int | None) -> None:
    check_attention(Context(device, torch.float16, rows, length, 5, 1, 32, 32), window)


@pytest.mark.parametrize(("length", "window"), [(17, None), (500, 3)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "dtype"),
    [
        (5, 1, 32, 32, torch.float32),
        (32, 8, 16, 16, torch.bfloat16),
        (16, 16, 16, 16, torch.float16),
        (2, 2, 80, 80, torch.float16),
        (4, 1, 128, 128, torch.bfloat16),
        (2, 1, 192, 128, torch.bfloat16),
        (1, 1, 192, 128, torch.float32),
        (2, 1, 256, 256, torch.bfloat16),
        (1, 1, 512, 512, torch.float32),
    ],
)
def test_attention_of_every_shape(
    device: str,
    length: int,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> None:
    check_attention(Context(device, dtype, 5, length, heads, kv_heads, dim, value_dim), window)


def check_attention(context: Context, window: int | None) -> None:
    """Kernel and twin against float64, with NaN wherever nobody may look."""
    context.append()
    out, want = context.bind_compute_stream(window), context.reference(window)
    twin = attention.decode_attention_plain(
        context.query, context.keys, context.values, context.length, context.scaling, window
    )
    assert out.shape == twin.shape == want.shape
    assert close(out, want, out.dtype)
    assert close(twin, want, out.dtype)


@pytest.mark.parametrize("window", [1, 2, 64, 65, 600])
def test_a_window_counts_the_row_itself(device: str, window: int) -> None:
    for length in (0, 64, 130):
        context = Context(device, torch.float32, 4, length, 1, 1, 16, 16)
        context.append()
        out = context.bind_compute_stream(window)
        assert close(out, context.reference(window), torch.float32)
        for wrong in {max(1, window - 1), window + 1} - {window}:
            same = min(wrong, window) >= length + 4  # both see everything
            assert close(out, context.reference(wrong), torch.float32) == same


@pytest.mark.parametrize(
    ("rows", "heads", "dtype"), [(16, 4, torch.bfloat16), (64, 2, torch.bfloat16), (17, 4, torch.float32)]
)
def test_attention_of_many_rows(device: str, rows: int, heads: int, dtype: torch.dtype) -> None:
    check_attention(Context(device, dtype, rows, 100, heads, 1, 16, 16), 20)


@dtypes
@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize(("rows", "heads"), [(6, 6), (16, 16)])  # of few queries and many
def test_a_rows_company_changes_no_bit_of_attention(
    device: str, dtype: torch.dtype, window: int | None, rows: int, heads: int
) -> None:
    context = Context(device, dtype, rows, 190, heads, 2, 16, 16)  # positions on both sides of a block's end
    context.append()
    together, query = context.bind_compute_stream(window), context.query
    for row in range(rows):
        context.query = query[:, :, row : row + 1]
        assert torch.equal(context.bind_compute_stream(window), together[:, row : row + 1])
        context.length += 1


@dtypes
@pytest.mark.parametrize(("rows", "length"), [(1, 0), (5, 17), (64, 512)])
def test_append_writes_there_and_nowhere_else(device: str, dtype: torch.dtype, rows: int, length: int) -> None:
    context = Context(device, dtype, rows, length, 4, 2, 80, 32)
    keys, values = context.keys.clone(), context.values.clone()
    attention.append_plain(keys, values, context.new_keys, context.new_values, context.length)
    context.append()
    for got, want in ((context.keys, keys), (context.values, values)):
        assert torch.equal(got[:, :, : length + rows], want[:, :, : length + rows])
        assert got[:, :, length + rows :].isnan().all()


def test_append_stops_at_the_end(device: str) -> None:
    context = Context(device, torch.float32, 4, 574, 1, 1, 32, 32)
    heads = torch.full((1, 2, 576, 32), math.nan, device=device)
    context.keys = heads[:, :1]  # what lies behind would be overwritten
    context.append()
    assert context.keys[0, 0, 574:].equal(context.new_keys[0, 0, :2])
    assert heads[:, 1].isnan().all()


def test_splits_depend_on_shape_alone() -> None:
    assert attention.splits_for(8, 8192, 64) == 32
    assert attention.splits_for(16, 8192, 64) == 16
    assert attention.splits_for(1, 64, 64) == 1
    assert attention.splits_for(1000, 8192, 64) == 1


@needs_cuda
def test_one_captured_graph_serves_every_length(device: str) -> None:
    context = Context(device, torch.bfloat16, 5, 0, 8, 2, 128, 128)
    context.append()
    context.bind_compute_stream()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context.append()
        out = context.bind_compute_stream()
    for start in range(0, 570, 5):
        context.length.fill_(start)
        context.query.normal_()
        context.new_keys.normal_()
        graph.replay()
        if start % 95 == 0:
            assert close(out, context.reference(), torch.bfloat16)
