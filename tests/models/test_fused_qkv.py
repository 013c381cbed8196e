"""Linear layers that are fed alike: computed at once, handed out once, and never to another input.

On CUDA or, with TRITON_INTERPRET=1, on the CPU.
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
    """As far as its projections."""

    def __init__(self, **changes: nn.Module) -> None:
        super().__init__()
        for name, count in COUNTS.items():
            self.add_module(name, changes.get(name) or nn.Linear(WIDTH, count, bias=name != "k_proj"))
        self.o_proj = nn.Linear(24, WIDTH)


class Launches:
    """How often each way to compute was taken."""

    def __init__(self) -> None:
        self.together = 0
        self.alone = 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    counted, one, several = Launches(), dense.small_batch_linear, dense.fused_linears

    def alone(*args: Any, **kwargs: Any) -> Any:
        counted.alone += 1
        return one(*args, **kwargs)

    def together(*args: Any, **kwargs: Any) -> Any:
        counted.together += 1
        return several(*args, **kwargs)

    monkeypatch.setattr(dense, "small_batch_linear", alone)
    monkeypatch.setattr(dense, "fused_linears", together)
    return counted


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own arithmetic, in which rows may depend on each other: nothing can be proved by it."""
    monkeypatch.setattr(dense, "small_batch_linear", lambda x, weight, bias, tile: functional.linear(x, weight, bias))
    monkeypatch.setattr(
        dense,
        "fused_linears",
        lambda x, weights, biases, tile: [functional.linear(x, *given) for given in zip(weights, biases, strict=True)],
    )


def at_once(model: nn.Module) -> list[FusedProjections]:
    """Have siblings computed at once without a proof."""
    found = [FusedProjections(layers) for part in model.modules() if (layers := parallel_linears(part))]
    for group in found:
        for number, layer in enumerate(group._layers):
            layer.forward = group.form(number)  # type: ignore[method-assign]
    return found


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FusedProjections]:
    """Every group that is made when something is fused."""
    groups: list[FusedProjections] = []
    monkeypatch.setattr(
        fusion, "FusedProjections", lambda layers: groups.append(FusedProjections(layers)) or groups[-1]
    )
    return groups


@pytest.fixture
def attention(launches: Launches, made: list[FusedProjections]) -> Iterator[Any]:
    """Its layers are fused; what it took to prove them is not counted."""
    module = Attention().to(DEVICE)
    fuse(module)
    launches.together = launches.alone = 0
    with torch.inference_mode():
        yield module


def states(rows: int = 3) -> Tensor:
    return torch.randn(1, rows, WIDTH, device=DEVICE)


def right(layer: nn.Linear, x: Tensor, y: Tensor) -> bool:
    return torch.allclose(y, functional.linear(x, layer.weight, layer.bias), atol=1e-5)


@pytest.mark.parametrize("order", list(permutations(COUNTS)), ids=str)
def test_whichever_is_first_computes_all(attention: Any, launches: Launches, order: tuple[str, ...]) -> None:
    for rows in (1, 5, 16):
        x = states(rows)
        before = launches.together
        results = {name: getattr(attention, name)(x) for name in order}
        assert launches.together == before + 1
        for name, y in results.items():
            assert y.shape == (1, rows, COUNTS[name])
            assert y.is_contiguous()
            assert right(getattr(attention, name), x, y)
        assert len({y.untyped_storage().data_ptr() for y in results.values()}) == 3
    assert not launches.alone


@pytest.mark.parametrize(
    "calls", ["qqkv", "qkkv", "kqv", "qkvqkv", "qkqkqk", "vvv", "qvkkvq", "q", "qk", "kvkvkv"], ids=str
)
def test_calls_in_any_number_and_order(attention: Any, made: list[FusedProjections], calls: str) -> None:
    for _ in range(2):
        x = states()
        for letter in calls:
            layer = getattr(attention, f"{letter}_proj")
            assert right(layer, x, layer(x))
    (group,) = made
    assert group._ahead is None or len(group._ahead.results) < len(COUNTS)


def test_results_are_the_same_bits_alone_and_together(attention: Any, launches: Launches) -> None:
    x = states(5)
    together = [getattr(attention, name)(x) for name in COUNTS]
    alone = []
    for name in reversed(COUNTS):  # each is the first to see its input
        alone.append(getattr(attention, name)(x.clone()))
    row = [getattr(attention, name)(x[:, 2:3].clone()) for name in COUNTS]
    assert all(torch.equal(a, b) for a, b in zip(together, alone[::-1], strict=True))
    assert all(torch.equal(a[:, 2:3], b) for a, b in zip(together, row, strict=True))
    assert launches.alone > 0


def test_another_tensor_is_another_input(attention: Any) -> None:
    x = states()
    attention.q_proj(x)
    for other in (x.clone(), x[:, :2], x.view(3, WIDTH), states()):
        assert right(attention.k_proj, other, attention.k_proj(other))
        assert right(attention.v_proj, x, attention.v_proj(x))


def test_a_tensor_that_was_written_to_is_another_input(launches: Launches) -> None:
    module = Attention().to(DEVICE)
    fuse(module)
    with torch.no_grad():  # inference tensors do not count how often they were written to
        x = states()
        module.q_proj(x)
        x.mul_(2)
        assert right(module.k_proj, x, module.k_proj(x))  # type: ignore[arg-type]


def test_weights_are_those_of_the_call(attention: Any) -> None:
    x, other = states(), torch.randn(8, WIDTH, device=DEVICE)
    attention.q_proj(x)
    swapped = torch.func.functional_call(attention.k_proj, {"weight": other}, (x,))
    assert torch.allclose(swapped, functional.linear(x, other), atol=1e-5)
    attention.q_proj(x)
    attention.k_proj.weight = nn.Parameter(torch.randn(5, WIDTH, device=DEVICE))
    attention.v_proj.bias = None
    for layer in (attention.k_proj, attention.v_proj):
        assert right(layer, x, layer(x))
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):  # with other sizes than they were proved with
        assert right(layer, x, layer(x))


def test_weights_that_do_not_fit_together_are_used_apart(attention: Any, launches: Launches) -> None:
    attention.v_proj.half()
    x = states()
    for layer in (attention.q_proj, attention.k_proj):
        assert right(layer, x, layer(x))
    assert (launches.together, launches.alone) == (0, 2)


def test_each_has_the_rest_by_itself(attention: Any, launches: Launches) -> None:
    many, none = states(17), states(0)
    for name, count in COUNTS.items():
        layer = getattr(attention, name)
        assert torch.equal(layer(many), functional.linear(many, layer.weight, layer.bias))
        assert torch.equal(layer(input=many[:, :2]), functional.linear(many[:, :2], layer.weight, layer.bias))
        assert layer(none).shape == (1, 0, count)
        with pytest.raises(RuntimeError):
            layer(many.half())
        each = torch.vmap(layer)(many[:, :4])
        assert torch.allclose(each, functional.linear(many[:, :4], layer.weight, layer.bias), atol=1e-5)
    assert not launches.together


def in_store(group: FusedProjections) -> list[weakref.ref[Tensor]]:
    """What a group has computed ahead."""
    return [weakref.ref(y) for y, *_ in group._ahead.results.values()] if group._ahead else []


def test_nothing_is_kept_longer_than_its_input(attention: Any, made: list[FusedProjections]) -> None:
    x = states()
    attention.q_proj(x)
    kept = in_store(made[0])
    assert len(kept) == 2
    assert all(y() is not None for y in kept)
    del x
    gc.collect()
    assert all(y() is None for y in kept)


def test_what_was_taken_is_let_go(attention: Any, made: list[FusedProjections]) -> None:
    x = states()
    given = [weakref.ref(getattr(attention, name)(x)) for name in COUNTS]
    assert made[0]._ahead is None
    gc.collect()
    assert all(y() is None for y in given)
    attention.q_proj(x)
    kept = in_store(made[0])
    attention.q_proj(other := states())
    gc.collect()
    assert all(y() is None for y in kept), "at the next call"
    assert right(attention.v_proj, other, attention.v_proj(other))


def test_another_thread_has_results_of_its_own(attention: Any) -> None:
    x = states()
    attention.q_proj(x)
    found: list[Tensor] = []

    def other() -> None:
        with torch.inference_mode():
            found.extend(getattr(attention, name)(x) for name in ("k_proj", "v_proj"))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert right(attention.k_proj, x, found[0])
    mine = attention.k_proj(x)
    assert torch.equal(mine, found[0])
    assert mine.data_ptr() != found[0].data_ptr()


def test_threads_at_once(plain: None) -> None:
    module, wrong = Attention(), []
    at_once(module)
    before = sys.getswitchinterval()
    shared = torch.randn(2, WIDTH)

    def work(seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for turn in range(100):
            x = torch.randn(2, WIDTH, generator=rng) if turn % 3 else shared
            wrong.extend(name for name in COUNTS if not right(layer := getattr(module, name), x, layer(x)))

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


def test_layers_of_other_modules_run_in_between(launches: Launches) -> None:
    first, second = Attention().to(DEVICE), Attention().to(DEVICE)
    fuse(first)
    fuse(second)
    launches.together = 0
    x = states()
    with torch.inference_mode():
        for name in COUNTS:
            for module in (first, second):
                layer = getattr(module, name)
                assert right(layer, x, layer(x))
    assert launches.together == 2


def test_layers_that_are_fed_apart_soon_compute_only_their_own(attention: Any, launches: Launches) -> None:
    for _ in range(4):
        for name in COUNTS:
            layer, x = getattr(attention, name), states()
            assert right(layer, x, layer(x))
    assert launches.together == 2
    assert launches.alone == 10


def test_a_pass_that_breaks_off_changes_nothing(attention: Any, launches: Launches) -> None:
    for _ in range(3):
        attention.q_proj(states())
        x = states()
        for name in COUNTS:
            getattr(attention, name)(x)
    assert (launches.together, launches.alone) == (6, 0)


def test_undone(launches: Launches) -> None:
    module = Attention().to(DEVICE)
    undo = fuse(module)
    assert all("forward" in vars(getattr(module, name)) for name in COUNTS)
    undo()
    assert not any("forward" in vars(part) for part in module.modules())
    launches.together = 0
    module.q_proj(states())
    assert not launches.together


@pytest.mark.parametrize("fault", ["raises", "is off", "is not a number", "depends on the others", "differs alone"])
def test_a_kernel_that_fails_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(x: Tensor, weights: list[Any], biases: list[Any], tile: Any = None) -> list[Tensor]:
        if fault == "raises":
            raise RuntimeError("out of resources")
        results = [dense.small_batch_linear(x, *given, tile=tile) for given in zip(weights, biases, strict=True)]
        if fault == "is off":
            results[-1][-1, -1] += 0.1
        elif fault == "is not a number":
            results[1][0, 0] = torch.nan
        elif fault == "differs alone" or len(x) == 1:
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
            assert "forward" in vars(layer), "by itself it is as it should be"
            assert right(layer, x, layer(x))


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


ODD: dict[str, Callable[[], nn.Module]] = {
    "of another class": lambda: Attention(q_proj=Shifted(WIDTH, 24), v_proj=Shifted(WIDTH, 8)),
    "of another input": lambda: Attention(k_proj=nn.Linear(16, 8)),
    "of another dtype": lambda: Attention(k_proj=nn.Linear(WIDTH, 8).double()),
    "of an MLP": lambda: MistralMLP(MistralConfig(hidden_size=WIDTH, intermediate_size=24)),
}


@pytest.mark.parametrize("name", ODD)
def test_layers_that_are_no_siblings(name: str) -> None:
    assert not any(parallel_linears(part) for part in ODD[name]().modules())


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    module = Attention().to(DEVICE)
    module.k_proj.forward = own = lambda x: x  # type: ignore[method-assign,assignment]
    undo = fuse(module)
    assert module.k_proj.forward is own
    with torch.inference_mode():
        x = states()
        assert right(module.v_proj, x, module.v_proj(x))  # type: ignore[arg-type]
    undo()
    assert module.k_proj.forward is own


@pytest.mark.skipif(not INTERPRETED, reason="nothing here is a device's")
@pytest.mark.parametrize("family", families())
def test_families_feed_them_alike(family: str, plain: None) -> None:
    """Else all would be computed for one, until it shows."""
    model, tokens = tiny_model(family), torch.arange(4)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits
        fed = at_once(model)
        found = model(input_ids=tokens).logits
    assert torch.equal(found, expected)
    assert not any(group._unasked or group._ahead for group in fed)
    assert fed or family not in ("mixtral", "phimoe", "qwen3_moe", "deepseek_v2", "gpt_oss")
