"""Kernels of norms, linear layers and routers against their PyTorch references and float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import DEVICE, FLOATS, INTERPRETED, KERNEL_MARKS, close, dtypes, needs_cuda, prepare_kernel_test
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM

from spmoe.backends.kernels import dense
from spmoe.backends.kernels.dense import (
    LinearTile,
    RouterOutputFormat,
    fused_linears,
    fused_linears_plain,
    gated_linear,
    norm_and_route_layers,
    norm_and_route_layers_plain,
    rms_norm,
    route,
    select_fused_tile,
    select_linear_tile,
    small_batch_linear,
)
from spmoe.models.gates import FusedGates
from spmoe.models.inspection import inspect_model

pytestmark = KERNEL_MARKS


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_kernel_test(monkeypatch)


def random_weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, k) / math.sqrt(k)).to(DEVICE, dtype)


# ---- RMSNorm


@dtypes
@pytest.mark.parametrize(("shape", "scale"), [((1, 3, 64), 1.0), ((2, 3, 4, 48), 1e-3), ((5, 1000), 50.0)])
def test_rms_norm_matches_reference(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    x = (torch.randn(shape) * scale + 0.3 * scale).to(DEVICE, dtype)
    weight = (1 + torch.randn(shape[-1]) / 4).to(DEVICE, dtype)
    found, expected = rms_norm(x, weight, 1e-6), dense.rms_norm_plain(x, weight, 1e-6)
    assert found.dtype == dtype
    assert torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert (found == expected).float().mean() > 0.95 or dtype == torch.float32
    wide = x.double()
    exact = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert close(found, exact)


def test_rms_norm_accepts_strided_input() -> None:
    rows, weight = torch.randn(2, 3, 40, device=DEVICE), torch.rand(24, device=DEVICE)
    for x in (rows[..., :24], rows[..., 16:], rows.transpose(0, 1)[..., :24], torch.randn(24, 5, device=DEVICE).T):
        assert torch.allclose(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6), rtol=1e-6)


def test_rms_norm_rejects_rows_that_are_too_long() -> None:
    n = dense.MAX_NORM_SIZE
    x, weight = torch.randn(1, n, device=DEVICE), torch.ones(n, device=DEVICE)
    assert torch.allclose(rms_norm(x, weight, 1e-6), dense.rms_norm_plain(x, weight, 1e-6), rtol=1e-6)
    with pytest.raises(ValueError, match=f"{n + 1} elements; at most {n}"):
        rms_norm(torch.ones(1, n + 1), torch.ones(n + 1), 1e-6)


# ---- linear layers

SIZES = [(16, 64), (33, 75), (9, 1100)]
DOT_TILES = [LinearTile(16, 128, 4, 3, use_dot=True), LinearTile(8, 64, 2, 4, use_dot=True)]
FMA_TILES = [LinearTile(8, 64, 4, 3, use_dot=False), LinearTile(4, 128, 8, 2, use_dot=False)]
# float32 does not use tensor cores; the FMA kernels convert every dtype to float32 when they load it
TILES = [
    *((tile, dtype) for tile in DOT_TILES for dtype in (torch.float16, torch.bfloat16)),
    *zip(FMA_TILES, (torch.float32, torch.bfloat16), strict=True),
]
DEFAULT_TILES = [(None, dtype) for dtype in FLOATS]


@dtypes
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_linear_matches_reference(dtype: torch.dtype, n: int, k: int) -> None:
    weight = random_weight(n, k, dtype)
    for rows, bias in [(1, None), (5, torch.randn(n).to(DEVICE, dtype)), (16, None), (35, None)]:
        x = torch.randn(rows, k).to(DEVICE, dtype)
        found, exact = small_batch_linear(x, weight, bias), x.double() @ weight.double().T
        assert found.dtype == dtype
        assert close(found, dense.small_batch_linear_plain(x, weight, bias))
        assert close(found, exact if bias is None else exact + bias.double())


@pytest.mark.parametrize(("tile", "dtype"), TILES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 256), (13, 200)])
def test_linear_with_every_tile(dtype: torch.dtype, tile: LinearTile, n: int, k: int) -> None:
    weight, bias = random_weight(n, k, dtype), torch.randn(n).to(DEVICE, dtype)
    for rows in (3, 12):
        x = torch.randn(rows, k).to(DEVICE, dtype)
        exact = x.double() @ weight.double().T + bias.double()
        assert close(small_batch_linear(x, weight, bias, tile=tile), exact)


@pytest.mark.parametrize(("tile", "dtype"), [*DEFAULT_TILES, *TILES], ids=str)
def test_linear_is_batch_invariant(dtype: torch.dtype, tile: LinearTile | None) -> None:
    x, weight = torch.randn(64, 200).to(DEVICE, dtype), torch.randn(9, 200).to(DEVICE, dtype)
    full = small_batch_linear(x, weight, tile=tile)
    for rows in (1, 5, 8, 9, 17, 40):
        assert torch.equal(small_batch_linear(x[-rows:], weight, tile=tile), full[-rows:])


def test_linear_tiles_do_not_depend_on_rows() -> None:
    for n, k in [(160, 160), (1024, 4096), (4096, 4096), (14336, 4096), (32000, 64), (8, 16)]:
        for dtype in FLOATS:
            (tile,) = {select_linear_tile(rows, n, k, dtype) for rows in range(1, 65)}
            assert tile.block_k >= 16 * tile.num_warps
            assert not (tile.use_dot and dtype == torch.float32)
    with pytest.raises(ValueError, match="expected 1 to 64 rows, got 65"):
        select_linear_tile(65, 64, 64, torch.float32)
    assert {dense._fma_groups(rows)[1] for rows in range(17, 65)} == {8}, "one kernel for all prompts"


# ---- several linear layers in one launch


def random_layers(counts: tuple[int, ...], k: int, dtype: torch.dtype, biased: int = 0) -> tuple[list[Any], list[Any]]:
    """Return weights and biases; bit i of `biased` gives layer i a bias."""
    torch.manual_seed(sum(counts) + k)
    weights = [random_weight(n, k, dtype) for n in counts]
    return weights, [torch.randn(n).to(DEVICE, dtype) if biased >> i & 1 else None for i, n in enumerate(counts)]


def check_fused(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], tile: LinearTile | None = None) -> None:
    """Check each layer against float64, and bit by bit against `small_batch_linear` with the same tile."""
    (rows, k), counts = x.shape, [len(weight) for weight in weights]
    found = fused_linears(x, weights, biases, tile)
    plain = fused_linears_plain(x, weights, biases)
    tile = tile or select_fused_tile(rows, counts, k, x.dtype)
    for y, expected, weight, bias in zip(found, plain, weights, biases, strict=True):
        assert (y.shape, y.dtype, y.is_contiguous()) == ((rows, len(weight)), x.dtype, True)
        exact = x.double() @ weight.double().T
        assert close(y, exact if bias is None else exact + bias.double())
        assert close(y, expected)
        assert torch.equal(y, small_batch_linear(x, weight, bias, tile=tile))


@settings(
    max_examples=12 if INTERPRETED else 200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple),
    k=st.sampled_from([16, 75, 129, 256, 300]),
    rows=st.integers(1, 64),
    dtype=st.sampled_from(FLOATS),
    biased=st.integers(0, 15),
)
def test_fused_linears_of_random_sizes(
    counts: tuple[int, ...], k: int, rows: int, dtype: torch.dtype, biased: int
) -> None:
    weights, biases = random_layers(counts, k, dtype, biased)
    check_fused(torch.randn(rows, k).to(DEVICE, dtype), weights, biases)


@pytest.mark.parametrize(("counts", "k"), [((256, 32, 32), 64), ((260, 130), 40), ((520, 9, 9, 1), 32)])
def test_fused_linears_of_many_tiles(counts: tuple[int, ...], k: int) -> None:
    """Use sizes with many tiles per layer, as projections with grouped KV heads have."""
    weights, biases = random_layers(counts, k, torch.bfloat16, biased=5)
    check_fused(torch.randn(5, k).to(DEVICE, torch.bfloat16), weights, biases)


@pytest.mark.parametrize(("tile", "dtype"), TILES, ids=str)
@pytest.mark.parametrize(("counts", "k", "rows"), [((16, 8), 256, 3), ((9, 3), 140, 9)])
def test_fused_linears_with_every_tile(
    dtype: torch.dtype, tile: LinearTile, counts: tuple[int, ...], k: int, rows: int
) -> None:
    weights, biases = random_layers(counts, k, dtype, biased=2)
    check_fused(torch.randn(rows, k).to(DEVICE, dtype), weights, biases, tile)


@pytest.mark.parametrize(("tile", "dtype"), [*DEFAULT_TILES, *TILES], ids=str)
def test_fused_linears_are_batch_invariant(dtype: torch.dtype, tile: LinearTile | None) -> None:
    weights, biases = random_layers((9, 5), 140, dtype, biased=3)
    x = torch.randn(50, 140).to(DEVICE, dtype)
    full = fused_linears(x, weights, biases, tile)
    for rows in (1, 9, 33):
        for y, all_rows in zip(fused_linears(x[-rows:], weights, biases, tile), full, strict=True):
            assert torch.equal(y, all_rows[-rows:])


def test_fused_linears_accept_strided_input() -> None:
    weights, biases = random_layers((24, 12), 40, torch.float32)
    check_fused(torch.randn(5, 80, device=DEVICE)[:, ::2], weights, biases)
    check_fused(torch.randn(40, 3, device=DEVICE).T, weights, biases)


def test_fused_tiles_do_not_depend_on_rows() -> None:
    for counts, k in [((2048,) * 3, 2048), ((4096, 1024, 1024), 4096), ((32, 16, 16), 32)]:
        for dtype in FLOATS:
            assert len({select_fused_tile(rows, counts, k, dtype) for rows in range(1, 65)}) == 1
    with pytest.raises(ValueError, match="expected 1 to 64 rows, got 65"):
        select_fused_tile(65, (16, 16), 16, torch.float32)


# ---- gated layers


@dtypes
@pytest.mark.parametrize(
    ("n", "k", "activation"),
    [*((*size, "silu") for size in SIZES), (16, 64, "gelu"), (9, 75, "gelu_tanh"), (16, 64, "relu")],
)
def test_gated_linear_matches_reference_and_is_batch_invariant(
    dtype: torch.dtype, n: int, k: int, activation: str
) -> None:
    gate, up = (random_weight(n, k, dtype) for _ in range(2))
    x = torch.randn(36, k).to(DEVICE, dtype)
    full = gated_linear(x, gate, up, activation)
    exact = dense.ACTIVATIONS[activation](x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert full.dtype == dtype
    assert close(full, dense.gated_linear_plain(x, gate, up, activation))
    assert close(full, exact)
    for rows in (1, 9, 20):
        assert torch.equal(gated_linear(x[:rows], gate, up, activation), full[:rows])


# ---- routers


@dtypes
@pytest.mark.parametrize(("count", "k", "top_k"), [(8, 96, 2), (5, 40, 5), (60, 64, 4), (64, 75, 8), (130, 16, 6)])
@pytest.mark.parametrize("one_kernel", [True, False])
def test_router_matches_reference(dtype: torch.dtype, count: int, k: int, top_k: int, one_kernel: bool) -> None:
    weight = random_weight(count, k, dtype)
    for rows, output in [
        (1, RouterOutputFormat(dtype)),
        (2, RouterOutputFormat(dtype, dtype, renormalize=False)),
        (3, RouterOutputFormat(torch.float32, torch.float32, renormalize=False, scale=2.5)),
    ]:
        x = (torch.randn(rows, k) * torch.logspace(-1, 1, rows)[:, None]).to(DEVICE, dtype)
        logits, weights, index = route(x, weight, top_k, output, one_kernel)
        assert (logits.dtype, weights.dtype, index.dtype) == (output.logits, output.weights, torch.int64)
        assert close(logits, x.double() @ weight.double().T, dtype)
        # ids and weights must follow from these logits exactly
        values, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
        values, order = values[:, :top_k], order[:, :top_k]
        if output.renormalize:
            values = values / values.sum(-1, keepdim=True)
        assert torch.equal(index, order)
        rtol = torch.finfo(weights.dtype).eps + 1e-5
        assert torch.allclose(weights.double(), values * output.scale, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("one_kernel", [True, False])
@pytest.mark.parametrize("count", [8, 60, 130])
def test_router_breaks_ties_by_lower_id(count: int, one_kernel: bool) -> None:
    x, weight = torch.ones(2, 16, device=DEVICE), torch.zeros(count, 16, device=DEVICE)
    weight[[3, 6]] = 1.0
    _, weights, index = route(x, weight, 5, RouterOutputFormat(torch.float32), one_kernel)
    assert index.tolist() == [[3, 6, 0, 1, 2]] * 2
    assert torch.allclose(weights.sum(-1), torch.ones(2, device=DEVICE))
    assert torch.equal(index, dense.route_plain(x, weight, 5, RouterOutputFormat(torch.float32))[2])


@pytest.mark.parametrize("one_kernel", [True, False])
@pytest.mark.parametrize("count", [7, 130])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_router_ids_are_in_range_for_non_finite_logits(count: int, one_kernel: bool, bad: float) -> None:
    x, weight = torch.randn(3, 16, device=DEVICE), torch.randn(count, 16, device=DEVICE)
    x[0] = bad
    x[1, 0] = bad
    with np.errstate(all="ignore"):
        _, _, index = route(x, weight, 4, RouterOutputFormat(torch.float32), one_kernel)
    assert ((index >= 0) & (index < count)).all()
    assert all(len(set(row)) == 4 for row in index.tolist())


def test_router_rejects_top_k_above_the_number_of_experts() -> None:
    x, weight = torch.randn(1, 16, device=DEVICE), torch.randn(4, 16, device=DEVICE)
    with pytest.raises(ValueError, match="5 of 4 experts"):
        route(x, weight, 5, RouterOutputFormat(torch.float32))


# ---- norms and routers of several layers in one launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layers", "rows", "k", "experts", "top_k"), [(1, 1, 64, 8, 2), (3, 5, 75, 6, 6), (2, 3, 130, 64, 8)]
)
def test_norm_and_route_layers_matches_reference(
    dtype: torch.dtype, layers: int, rows: int, k: int, experts: int, top_k: int
) -> None:
    x = torch.randn(layers, rows, k).to(DEVICE, dtype)
    norms = (1 + torch.randn(layers, k) / 4).to(DEVICE, dtype)
    routers = (torch.randn(layers, experts, k) / k**0.5).to(DEVICE, dtype)
    index, weights = norm_and_route_layers(x, norms, 1e-6, routers, top_k)
    expected, expected_weights = norm_and_route_layers_plain(x, norms, 1e-6, routers, top_k)
    same = (index == expected).float().mean()
    assert same == 1 if dtype == torch.float32 else same > 0.9  # logits in bfloat16 may tie
    assert torch.allclose(weights, expected_weights, atol=1e-5 if dtype == torch.float32 else 0.02)
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))


SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(kind: str) -> Any:
    if kind == "mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2))
    else:
        sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **sizes, num_experts=6, num_experts_per_tok=3))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(DEVICE).eval()


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_fused_gates_route_as_the_models_routers(kind: str) -> None:
    moe_layers = inspect_model(make_model(kind)).moe
    gates = FusedGates.of(moe_layers)
    assert gates is not None
    states = torch.randn(2, 5, 32).to(DEVICE)
    experts, shares = gates(range(1, 3), states)
    for layer in (1, 2):
        norm, router = moe_layers[layer].norm, moe_layers[layer].router
        assert norm is not None
        assert router is not None
        with torch.inference_mode():
            routed, weights = router(norm(states[layer - 1]))[:2]
        order = weights.argsort(dim=-1, descending=True)
        assert torch.equal(routed.gather(1, order), experts[layer - 1])
        expected = weights.gather(1, order).float()
        assert torch.allclose(expected / expected.sum(-1, keepdim=True), shares[layer - 1], atol=1e-5)


def test_gates_that_are_not_rms_norm_and_router_are_not_fused() -> None:
    moe_layers = inspect_model(make_model("mixtral")).moe
    for moe_layer in moe_layers:
        assert isinstance(moe_layer.norm, nn.Module)
        moe_layer.norm.forward = lambda x: x * 3 - 1  # type: ignore[method-assign]
    assert FusedGates.of(moe_layers) is None
    assert FusedGates.of(moe_layers[:1]) is None


# ---- CUDA only


@needs_cuda
def test_norm_linear_and_router_in_a_cuda_graph() -> None:
    x, norm = torch.randn(5, 512, device="cuda").bfloat16(), torch.rand(512, device="cuda").bfloat16()
    linear, gate = (torch.randn(n, 512, device="cuda").bfloat16() / 20 for n in (512, 16))

    def forward() -> tuple[Tensor, ...]:
        states = small_batch_linear(rms_norm(x, norm, 1e-6), linear)
        return route(states, gate, 4, RouterOutputFormat(torch.bfloat16))

    expected = [t.clone() for t in forward()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_cuda
def test_fused_linears_in_a_cuda_graph() -> None:
    weights, biases = random_layers((512, 128, 128), 512, torch.bfloat16, biased=3)
    x = torch.randn(5, 512, device="cuda").bfloat16()
    expected = fused_linears(x, weights, biases)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused_linears(x, weights, biases)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (1024, 4096), (10944, 2048), (2048, 10944), (576, 2048), (32000, 4096)]
)
def test_linear_of_real_sizes(dtype: torch.dtype, n: int, k: int) -> None:
    x, weight = torch.randn(16, k, device="cuda").to(dtype), (torch.randn(n, k, device="cuda") / 64).to(dtype)
    found = small_batch_linear(x, weight)
    assert close(found, x.double() @ weight.double().T)
    for rows in range(1, 16):
        assert torch.equal(small_batch_linear(x[:rows], weight), found[:rows])


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("counts", "k"),
    [
        ((2048, 2048, 2048), 2048),
        ((2048, 256, 256), 2048),
        ((4096, 1024, 1024), 4096),
        ((4096, 512, 512), 2880),
        ((3072, 576), 2048),
        ((1536, 576), 7168),
    ],
)
def test_fused_linears_of_real_sizes(dtype: torch.dtype, counts: tuple[int, ...], k: int) -> None:
    weights, biases = random_layers(counts, k, dtype, biased=1)
    x = torch.randn(16, k, device="cuda").to(dtype)
    check_fused(x, weights, biases)
    found = fused_linears(x, weights, biases)
    for rows in range(1, 16):
        for y, all_rows in zip(fused_linears(x[:rows], weights, biases), found, strict=True):
            assert torch.equal(y, all_rows[:rows])
