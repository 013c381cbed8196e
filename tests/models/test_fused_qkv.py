"""Fused projections: computed together for one input, and each result is used once, for that input only.

Runs on CUDA, or on the CPU with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralMLP

from spmoe.models import fusion
from spmoe.models.families import families, tiny_model
from spmoe.models.fused_qkv import FusedProjections, parallel_linears
from spmoe.models.fusion import fuse

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends.kernels import dense  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

WIDTH, COUNTS = 32, {"q_proj": 24, "k_proj": 8, "v_proj": 11}


class Attention(nn.Module):
    """An attention module with only its projections."""

    def __init__(self, **changes: nn.Module) -> None:
        super().__init__()
        for name, count in COUNTS.items():
            self.add_module(name, changes.get(name) or nn.Linear(WIDTH, count, bias=name != "k_proj"))
        self.o_proj = nn.Linear(24, WIDTH)


class Launches:
    """Number of launches of each kernel. `simulated`: PyTorch computes instead, and nothing is counted."""

    def __init__(self) -> None:
        self.fused = 0
        self.single = 0
        self.simulated = False

    def fuse(self, module: nn.Module) -> None:
        """Fuse a module without kernel launches, which take seconds in Triton's interpreter."""
        self.simulated = True
        fuse(module)
        self.simulated = False


def linear_in_float64(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear layer's result, of which no row depends on the other rows."""
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    counted, single, fused = Launches(), dense.small_batch_linear, dense.fused_linears

    def count_single(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
        if counted.simulated:
            return linear_in_float64(x, weight, bias)
        counted.single += 1
        return single(x, weight, bias, **options)

    def count_fused(x: Tensor, weights: Any, biases: Any, **options: Any) -> Any:
        if counted.simulated:
            return [linear_in_float64(x, *given) for given in zip(weights, biases, strict=True)]
        counted.fused += 1
        return fused(x, weights, biases, **options)

    monkeypatch.setattr(dense, "small_batch_linear", count_single)
    monkeypatch.setattr(dense, "fused_linears", count_fused)
    return counted


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels by PyTorch, whose results may depend on the other rows, so `fuse` would reject them."""
    monkeypatch.setattr(dense, "small_batch_linear", lambda x, weight, bias, tile: functional.linear(x, weight, bias))
    monkeypatch.setattr(
        dense,
        "fused_linears",
        lambda x, weights, biases, tile: [functional.linear(x, *given) for given in zip(weights, biases, strict=True)],
    )


def fuse_unchecked(model: nn.Module) -> list[FusedProjections]:
    """Fuse all parallel linear layers without checking the results."""
    found = [FusedProjections(layers) for module in model.modules() if (layers := parallel_linears(module))]
    for group in found:
        for number, layer in enumerate(group._layers):
            layer.forward = group.forward_of(number)  # type: ignore[method-assign]
    return found


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[FusedProjections]:
    """Collect every group of projections that `fuse` makes."""
    made: list[FusedProjections] = []
    monkeypatch.setattr(fusion, "FusedProjections", lambda layers: made.append(FusedProjections(layers)) or made[-1])
    return made


@pytest.fixture
def attention(launches: Launches, groups: list[FusedProjections]) -> Iterator[Any]:
    """A module with fused projections."""
    module = Attention().to(DEVICE)
    launches.fuse(module)
    with torch.inference_mode():
        yield module


def states(rows: int = 3) -> Tensor:
    return torch.randn(1, rows, WIDTH, device=DEVICE)


def is_correct(layer: nn.Linear, x: Tensor, y: Tensor) -> bool:
    return torch.allclose(y, functional.linear(x, layer.weight, layer.bias), atol=1e-5)


@pytest.mark.parametrize("order", list(permutations(COUNTS)), ids=str)
def test_first_call_computes_all_projections(attention: Any, launches: Launches, order: tuple[str, ...]) -> None:
    for rows in (1, 5, 16):
        x = states(rows)
        before = launches.fused
        results = {name: getattr(attention, name)(x) for name in order}
        assert launches.fused == before + 1
        for name, y in results.items():
            assert y.shape == (1, rows, COUNTS[name])
            assert y.is_contiguous()
            assert is_correct(getattr(attention, name), x, y)
        assert len({y.untyped_storage().data_ptr() for y in results.values()}) == 3
    assert not launches.single


@pytest.mark.parametrize(
    "calls", ["qqkv", "qkkv", "kqv", "qkvqkv", "qkqkqk", "vvv", "qvkkvq", "q", "qk", "kvkvkv"], ids=str
)
def test_projections_may_be_called_in_any_order_and_number(
    attention: Any, groups: list[FusedProjections], calls: str
) -> None:
    for _ in range(2):
        x = states()
        for letter in calls:
            layer = getattr(attention, f"{letter}_proj")
            assert is_correct(layer, x, layer(x))
    (group,) = groups
    assert group._pending is None or len(group._pending.results) < len(COUNTS)


def test_fused_and_single_results_have_equal_bits(attention: Any, launches: Launches) -> None:
    x = states(5)
    fused = [getattr(attention, name)(x) for name in COUNTS]
    single = []
    for name in reversed(COUNTS):  # each is the first to be called with its input
        single.append(getattr(attention, name)(x.clone()))
    row = [getattr(attention, name)(x[:, 2:3].clone()) for name in COUNTS]
    assert all(torch.equal(a, b) for a, b in zip(fused, single[::-1], strict=True))
    assert all(torch.equal(a[:, 2:3], b) for a, b in zip(fused, row, strict=True))
    assert launches.single > 0


def test_results_are_not_used_for_another_tensor(attention: Any) -> None:
    x = states()
    attention.q_proj(x)
    for other in (x.clone(), x[:, :2], x.view(3, WIDTH), states()):
        assert is_correct(attention.k_proj, other, attention.k_proj(other))
        assert is_correct(attention.v_proj, x, attention.v_proj(x))


def test_results_are_not_used_after_a_write_to_the_input(launches: Launches) -> None:
    module = Attention().to(DEVICE)
    launches.fuse(module)
    with torch.no_grad():  # inference tensors do not count writes
        x = states()
        module.q_proj(x)
        x.mul_(2)
        assert is_correct(module.k_proj, x, module.k_proj(x))  # type: ignore[arg-type]


def test_replaced_weights_are_used(attention: Any) -> None:
    x, other = states(), torch.randn(8, WIDTH, device=DEVICE)
    attention.q_proj(x)
    swapped = torch.func.functional_call(attention.k_proj, {"weight": other}, (x,))
    assert torch.allclose(swapped, functional.linear(x, other), atol=1e-5)
    attention.q_proj(x)
    attention.k_proj.weight = nn.Parameter(torch.randn(5, WIDTH, device=DEVICE))
    attention.v_proj.bias = None
    for layer in (attention.k_proj, attention.v_proj):
        assert is_correct(layer, x, layer(x))
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):  # sizes differ from those at the check
        assert is_correct(layer, x, layer(x))


def test_weights_of_different_dtypes_are_not_fused(attention: Any, launches: Launches) -> None:
    attention.v_proj.half()
    x = states()
    for layer in (attention.q_proj, attention.k_proj):
        assert is_correct(layer, x, layer(x))
    assert (launches.fused, launches.single) == (0, 2)


def test_unsupported_inputs_use_the_layers_own_forward(attention: Any, launches: Launches) -> None:
    many, none = states(65), states(0)
    for name, count in COUNTS.items():
        layer = getattr(attention, name)
        assert torch.equal(layer(many), functional.linear(many, layer.weight, layer.bias))
        assert torch.equal(layer(input=many[:, :2]), functional.linear(many[:, :2], layer.weight, layer.bias))
        assert layer(none).shape == (1, 0, count)
        with pytest.raises(RuntimeError):
            layer(many.half())
        each = torch.vmap(layer)(many[:, :4])
        assert torch.allclose(each, functional.linear(many[:, :4], layer.weight, layer.bias), atol=1e-5)
    assert not launches.fused


def pending_results(group: FusedProjections) -> list[weakref.ref[Tensor]]:
    """Return weak references to the results that were computed ahead."""
    return [weakref.ref(y) for y, *_ in group._pending.results.values()] if group._pending else []


def test_pending_results_are_freed_with_their_input(attention: Any, groups: list[FusedProjections]) -> None:
    x = states()
    attention.q_proj(x)
    kept = pending_results(groups[0])
    assert len(kept) == 2
    assert all(y() is not None for y in kept)
    del x
    gc.collect()
    assert all(y() is None for y in kept)


def test_used_and_outdated_results_are_freed(attention: Any, groups: list[FusedProjections]) -> None:
    x = states()
    given = [weakref.ref(getattr(attention, name)(x)) for name in COUNTS]
    assert groups[0]._pending is None
    gc.collect()
    assert all(y() is None for y in given)
    attention.q_proj(x)
    kept = pending_results(groups[0])
    attention.q_proj(other := states())
    gc.collect()
    assert all(y() is None for y in kept), "freed at the next call"
    assert is_correct(attention.v_proj, other, attention.v_proj(other))


def test_threads_do_not_share_results(attention: Any) -> None:
    x = states()
    attention.q_proj(x)
    found: list[Tensor] = []

    def other() -> None:
        with torch.inference_mode():
            found.extend(getattr(attention, name)(x) for name in ("k_proj", "v_proj"))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert is_correct(attention.k_proj, x, found[0])
    mine = attention.k_proj(x)
    assert torch.equal(mine, found[0])
    assert mine.data_ptr() != found[0].data_ptr()


def test_concurrent_threads_get_correct_results(plain: None) -> None:
    module, wrong = Attention(), []
    fuse_unchecked(module)
    before = sys.getswitchinterval()
    shared = torch.randn(2, WIDTH)

    def work(seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for step in range(100):
            x = torch.randn(2, WIDTH, generator=rng) if step % 3 else shared
            wrong.extend(name for name in COUNTS if not is_correct(layer := getattr(module, name), x, layer(x)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_calls_of_several_modules_may_interleave(launches: Launches) -> None:
    first, second = Attention().to(DEVICE), Attention().to(DEVICE)
    launches.fuse(first)
    launches.fuse(second)
    x = states()
    with torch.inference_mode():
        for name in COUNTS:
            for module in (first, second):
                layer = getattr(module, name)
                assert is_correct(layer, x, layer(x))
    assert launches.fused == 2


def test_projections_with_separate_inputs_stop_being_fused(attention: Any, launches: Launches) -> None:
    for _ in range(4):
        for name in COUNTS:
            layer, x = getattr(attention, name), states()
            assert is_correct(layer, x, layer(x))
    assert launches.fused == 2
    assert launches.single == 10


def test_interrupted_forward_keeps_projections_fused(attention: Any, launches: Launches) -> None:
    for _ in range(3):
        attention.q_proj(states())
        x = states()
        for name in COUNTS:
            getattr(attention, name)(x)
    assert (launches.fused, launches.single) == (6, 0)


def test_undo_restores_the_forwards(launches: Launches) -> None:
    module = Attention().to(DEVICE)
    undo = fuse(module)
    assert all("forward" in vars(getattr(module, name)) for name in COUNTS)
    undo()
    assert not any("forward" in vars(child) for child in module.modules())
    launches.fused = 0
    module.q_proj(states())
    assert not launches.fused


@pytest.mark.parametrize("fault", ["raises", "wrong value", "NaN", "depends on other rows", "differs from single"])
def test_faulty_fused_kernel_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(x: Tensor, weights: list[Any], biases: list[Any], tile: Any = None) -> list[Tensor]:
        if fault == "raises":
            raise RuntimeError("out of resources")
        results = [dense.small_batch_linear(x, *given, tile=tile) for given in zip(weights, biases, strict=True)]
        if fault == "wrong value":
            results[-1][-1, -1] += 0.1
        elif fault == "NaN":
            results[1][0, 0] = torch.nan
        elif fault == "differs from single" or len(x) == 1:
            results[1] *= 1 + 1e-6
        return results

    monkeypatch.setattr(dense, "fused_linears", faulty)
    module = Attention().to(DEVICE)
    fuse(module)
    monkeypatch.setattr(dense, "fused_linears", None)
    x = states()
    with torch.inference_mode():
        for name in COUNTS:
            layer = getattr(module, name)
            assert "forward" in vars(layer), "the single kernel is still used"
            assert is_correct(layer, x, layer(x))


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


UNSUPPORTED: dict[str, Callable[[], nn.Module]] = {
    "another class": lambda: Attention(q_proj=Shifted(WIDTH, 24), v_proj=Shifted(WIDTH, 8)),
    "another input size": lambda: Attention(k_proj=nn.Linear(16, 8)),
    "another dtype": lambda: Attention(k_proj=nn.Linear(WIDTH, 8).double()),
    "an MLP": lambda: MistralMLP(MistralConfig(hidden_size=WIDTH, intermediate_size=24)),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_layers_are_not_fused(name: str) -> None:
    assert not any(parallel_linears(module) for module in UNSUPPORTED[name]().modules())


def test_replaced_forward_is_kept() -> None:
    module = Attention().to(DEVICE)
    module.k_proj.forward = own = lambda x: x  # type: ignore[method-assign,assignment]
    undo = fuse(module)
    assert module.k_proj.forward is own
    with torch.inference_mode():
        x = states()
        assert is_correct(module.v_proj, x, module.v_proj(x))  # type: ignore[arg-type]
    undo()
    assert module.k_proj.forward is own


@pytest.mark.skipif(not INTERPRETED, reason="does not depend on the device")
@pytest.mark.parametrize("family", families())
def test_families_call_all_projections_with_one_input(family: str, plain: None) -> None:
    """Otherwise the first forwards would compute results that are never used.

    Inkling 2 projects queries, keys and values from three different hidden states in some layers; fusing stops there.
    """
    model, tokens = tiny_model(family), torch.arange(4)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits
        groups = fuse_unchecked(model)
        found = model(input_ids=tokens).logits
    assert torch.equal(found, expected)
    unused = any(group._misses or group._pending for group in groups)
    assert unused == (family == "inkling2_text")
    assert groups or family not in ("mixtral", "phimoe", "qwen3_moe", "deepseek_v2", "gpt_oss")
