"""Kernels of attention and rotary embedding against their PyTorch references and float64."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_helpers import DEVICE, INTERPRETED, KERNEL_MARKS, close, dtypes, needs_cuda, prepare_kernel_test
from torch import Tensor

from spmoe.backends.kernels import attention
from spmoe.backends.kernels.rotary import apply_rotary, apply_rotary_plain

pytestmark = KERNEL_MARKS


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_kernel_test(monkeypatch)
    if INTERPRETED:  # programs run one after the other
        monkeypatch.setattr(attention, "_MAX_SPLITS", 4)


START = 21  # of the sequence's range in the arena


class Context:
    """KV arena with NaN outside of one sequence's positions, and the queries, keys and values of new rows."""

    def __init__(
        self,
        dtype: torch.dtype,
        rows: int,
        length: int,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
        capacity: int = 576,
    ) -> None:
        def random_rows(heads: int, dim: int) -> Tensor:  # not contiguous, as the projections return them
            return torch.randn(1, rows, heads, dim).to(DEVICE, dtype).transpose(1, 2)

        self.query, self.new_keys = random_rows(heads, dim), random_rows(kv_heads, dim)
        self.new_values = random_rows(kv_heads, value_dim)
        positions = START + capacity + 9
        self.keys = torch.full((1, kv_heads, positions, dim), math.nan, dtype=dtype, device=DEVICE)
        self.values = torch.full((1, kv_heads, positions, value_dim), math.nan, dtype=dtype, device=DEVICE)
        self.keys[:, :, START : START + length].normal_()
        self.values[:, :, START : START + length].normal_()
        self.ranges = torch.tensor([[START], [length], [capacity]], device=DEVICE)
        self.scaling = 1.5 / math.sqrt(dim)

    def append(self) -> None:
        """Append the new rows to the cache."""
        attention.append_kv(self.keys, self.values, self.new_keys, self.new_values, self.ranges)

    def attend(self, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        """Run the kernel."""
        return attention.decode_attention(self.query, self.keys, self.values, self.ranges, self.scaling, window, sinks)

    def reference(self, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        """Compute attention in float64, row by row and head by head."""
        query, keys, values = (t.double() for t in (self.query, self.keys[:, :, START:], self.values[:, :, START:]))
        (_, heads, rows, _), start = query.shape, int(self.ranges[1])
        out = query.new_full((1, rows, heads, values.shape[-1]), math.nan)
        for row in range(rows):
            end = start + row + 1
            visible = slice(0 if window is None else max(0, end - window), end)
            for head in range(heads):
                kv = head * keys.shape[1] // heads
                scores = keys[0, kv, visible] @ query[0, head, row] * self.scaling
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                out[0, row, head] = scores.softmax(0)[: end - visible.start] @ values[0, kv, visible]
        return out


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 500])
@pytest.mark.parametrize(("rows", "window"), [(1, None), (5, None), (5, 3)])
def test_attention_of_every_length(length: int, rows: int, window: int | None) -> None:
    check_attention(Context(torch.float16, rows, length, 5, 1, 32, 32), window)


@pytest.mark.parametrize(("length", "window"), [(17, None), (500, 3)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "dtype"),
    [
        (5, 1, 32, 32, torch.float32),
        (8, 2, 16, 16, torch.bfloat16),
        (4, 4, 16, 16, torch.float16),
        (2, 2, 80, 80, torch.float16),
        (4, 1, 128, 128, torch.bfloat16),
        (2, 1, 192, 128, torch.bfloat16),
        (1, 1, 192, 128, torch.float32),
        (2, 1, 256, 256, torch.bfloat16),
        (1, 1, 512, 512, torch.float32),
    ],
)
def test_attention_of_every_shape(
    length: int,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> None:
    check_attention(Context(dtype, 5, length, heads, kv_heads, dim, value_dim), window)


def check_attention(context: Context, window: int | None) -> None:
    """Compare the kernel and its reference with float64; the cache holds NaN at positions that must not be read."""
    context.append()
    out, want = context.attend(window), context.reference(window)
    plain = attention.decode_attention_plain(
        context.query, context.keys, context.values, context.ranges, context.scaling, window
    )
    assert out.shape == plain.shape == want.shape
    assert close(out, want)
    assert close(plain, want)


@pytest.mark.parametrize("shift", [-30.0, 0.0, 3.0, 8.0])
@pytest.mark.parametrize(("length", "window"), [(0, None), (1, None), (500, None), (500, 3)])
@dtypes
def test_attention_with_sinks(dtype: torch.dtype, length: int, window: int | None, shift: float) -> None:
    """The score of a sink may be far below or far above all others."""
    context = Context(dtype, 5, length, 6, 2, 32, 32)
    context.append()
    sinks = (torch.randn(6) + shift).to(DEVICE, dtype)
    out, want = context.attend(window, sinks), context.reference(window, sinks)
    plain = attention.decode_attention_plain(
        context.query, context.keys, context.values, context.ranges, context.scaling, window, sinks
    )
    assert close(out, want)
    assert close(plain, want)
    if shift == 3.0:
        assert not close(out, context.reference(window))


@pytest.mark.parametrize("window", [1, 2, 64, 65, 600])
def test_window_includes_the_row_itself(window: int) -> None:
    for length in (0, 64, 130):
        context = Context(torch.float32, 4, length, 1, 1, 16, 16)
        context.append()
        out = context.attend(window)
        assert close(out, context.reference(window), torch.float32)
        for wrong in {max(1, window - 1), window + 1} - {window}:
            same = min(wrong, window) >= length + 4  # both windows include all positions
            assert close(out, context.reference(wrong), torch.float32) == same


@pytest.mark.parametrize(
    ("rows", "heads", "dtype"), [(16, 4, torch.bfloat16), (64, 2, torch.bfloat16), (17, 4, torch.float32)]
)
def test_attention_of_many_rows(rows: int, heads: int, dtype: torch.dtype) -> None:
    check_attention(Context(dtype, rows, 100, heads, 1, 16, 16), 20)


@dtypes
@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize(("rows", "heads"), [(6, 3), (16, 8)])  # one block of queries, and several
def test_attention_is_batch_invariant(dtype: torch.dtype, window: int | None, rows: int, heads: int) -> None:
    # the new rows' positions lie on both sides of a block boundary, and so does the start of their windows
    context = Context(dtype, rows, 126, heads, 1, 16, 16, capacity=160)
    context.append()
    full, query = context.attend(window), context.query
    for row in (0, 1, 2, 3, rows - 1):
        context.query = query[:, :, row : row + 1]
        context.ranges[1] = 126 + row
        assert torch.equal(context.attend(window), full[:, row : row + 1])


@dtypes
@pytest.mark.parametrize("window", [None, 65])
def test_rows_of_several_sequences_are_those_of_each_alone(dtype: torch.dtype, window: int | None) -> None:
    """In every bit, wherever the sequences lie; a repeated row changes nothing."""
    contexts = [Context(dtype, rows, length, 6, 2, 16, 16, 160) for rows, length in ((1, 70), (3, 126), (1, 5))]
    alone = []
    for context in contexts:
        context.append()
        alone.append(context.attend(window))
    starts = [0]
    for context in contexts[:-1]:
        starts.append(starts[-1] + context.keys.shape[2])
    ranges = [
        (start + START, int(one.ranges[1]) + row, 160)
        for start, one in zip(starts, contexts, strict=True)
        for row in range(one.query.shape[2])
    ]
    merged = Context(dtype, 1, 0, 6, 2, 16, 16)
    for name in ("query", "new_keys", "new_values"):
        parts = [getattr(one, name) for one in contexts]
        setattr(merged, name, torch.cat([*parts, parts[-1]], dim=2))
    merged.keys, merged.values = (torch.cat([getattr(one, name) for one in contexts], 2) for name in ("keys", "values"))
    before = merged.keys.clone()
    for start, context in zip(starts, contexts, strict=True):
        first = start + START + int(context.ranges[1])
        merged.keys[:, :, first : first + context.query.shape[2]] = math.nan
    merged.ranges = torch.tensor([*ranges, ranges[-1]], device=DEVICE).T.contiguous()
    merged.append()
    assert torch.equal(merged.keys.nan_to_num(), before.nan_to_num())
    assert torch.equal(merged.attend(window)[:, :-1], torch.cat(alone, dim=1))
    plain = attention.decode_attention_plain(
        merged.query, merged.keys, merged.values, merged.ranges, merged.scaling, window
    )
    assert close(plain[:, :-1], torch.cat(alone, dim=1))


@dtypes
@pytest.mark.parametrize(("rows", "length"), [(1, 0), (5, 17), (64, 512)])
def test_append_writes_the_new_rows_only(dtype: torch.dtype, rows: int, length: int) -> None:
    context = Context(dtype, rows, length, 4, 2, 80, 32)
    keys, values = context.keys.clone(), context.values.clone()
    attention.append_kv_plain(keys, values, context.new_keys, context.new_values, context.ranges)
    context.append()
    for got, want in ((context.keys, keys), (context.values, values)):
        own = slice(START, START + length + rows)
        assert torch.equal(got[:, :, own], want[:, :, own])
        assert not got[:, :, own].isnan().any()
        assert got[:, :, : own.start].isnan().all()
        assert got[:, :, own.stop :].isnan().all()


def test_append_drops_rows_beyond_the_capacity() -> None:
    context = Context(torch.float32, 4, 574, 1, 1, 32, 32)
    plain = context.keys.clone(), context.values.clone()
    attention.append_kv_plain(*plain, context.new_keys, context.new_values, context.ranges)
    context.append()
    for keys in (context.keys, plain[0]):
        assert keys[0, 0, START + 574 : START + 576].equal(context.new_keys[0, 0, :2])
        assert keys[:, :, START + 576 :].isnan().all(), "of another sequence"


def test_number_of_splits_follows_from_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_SPLITS", 64)
    assert [attention.num_kv_splits(kv_heads) for kv_heads in (1, 8, 16, 1000)] == [64, 32, 16, 1]


@needs_cuda
def test_one_captured_graph_serves_every_length() -> None:
    context = Context(torch.bfloat16, 5, 0, 8, 2, 128, 128)
    context.append()
    context.attend()  # warm-up: compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context.append()
        out = context.attend()
    for start in range(0, 570, 5):
        context.ranges[1] = start
        context.query.normal_()
        context.new_keys.normal_()
        graph.replay()
        if start % 95 == 0:
            assert close(out, context.reference(), torch.bfloat16)


# ---- rotary embedding


@dtypes
@pytest.mark.parametrize(
    ("batch", "angles", "rows", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 4, 2, 16), (1, 1, 5, 3, 3, 12), (2, 2, 7, 2, 1, 64), (3, 1, 2, 1, 1, 2)],
)
def test_rotary_is_bit_equal_to_reference(
    dtype: torch.dtype, batch: int, angles: int, rows: int, heads: int, kv_heads: int, dim: int
) -> None:
    cos, sin = (torch.randn(angles, rows, dim).to(DEVICE, dtype) for _ in range(2))
    for contiguous in (False, True):  # as the projections return them, and as a norm after them does
        query = torch.randn(batch, rows, heads, dim).to(DEVICE, dtype).transpose(1, 2)
        key = torch.randn(batch, rows, kv_heads, dim).to(DEVICE, dtype).transpose(1, 2)
        if contiguous:
            query, key = query.contiguous(), key.contiguous()
        found, expected = apply_rotary(query, key, cos, sin), apply_rotary_plain(query, key, cos, sin)
        for rotated, want, original in zip(found, expected, (query, key), strict=True):
            assert torch.equal(rotated, want)
            assert rotated.stride() == original.stride()
