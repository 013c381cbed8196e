"""Fused forms are put in place where, and only where, they give what the module gives.

On CUDA or, with TRITON_INTERPRET=1, on the CPU; what is not fused is tested anywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralMLP
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM, Qwen2MoeTopKRouter

from spmoe.models import rotary
from spmoe.models.fusion import fuse
from spmoe.models.gates import StackedGates
from spmoe.models.inspection import inspect_model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
if INTERPRETED:
    pytest.importorskip("triton", reason="no triton")


def with_kernels(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs kernels to run."""
    if INTERPRETED:
        return test
    missing = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device, and TRITON_INTERPRET is not 1")
    return pytest.mark.gpu(missing(test))  # type: ignore[no-any-return]


SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2))


def qwen2_moe(**changes: Any) -> Any:
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = Qwen2MoeConfig(**SHAPE | sizes | {"num_experts": 6, "num_experts_per_tok": 3} | changes)
    return Qwen2MoeForCausalLM(config)


def deepseek_v2() -> Any:
    attention = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
    }
    changes = {"num_key_value_heads": 4, "first_k_dense_replace": 0}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SHAPE | attention | experts | changes))


MODELS = {
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen2_moe, renormalised": lambda: qwen2_moe(norm_topk_prob=True),
    "deepseek_v2": deepseek_v2,
}


def made(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    """A module with random weights, none of them all ones or zeros."""
    torch.manual_seed(0)
    module = make().to(DEVICE, dtype).eval()
    for name, weight in module.named_parameters():
        spread = torch.randn(weight.shape).to(weight) / (4 if weight.ndim == 1 else weight.shape[-1] ** 0.5)
        weight.data.copy_(1 + spread if weight.ndim == 1 and "bias" not in name else spread)
    return module


def router() -> Any:
    return made(lambda: of_mixtral(MixtralTopKRouter))


def replaced(model: nn.Module) -> set[str]:
    """Names of the modules whose forward is not their class's."""
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


def states(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 32).to(DEVICE, dtype)


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_it_gave(name: str, dtype: torch.dtype) -> None:
    model = made(MODELS[name], dtype)
    tokens = torch.arange(5, device=DEVICE)[None]
    with torch.inference_mode():
        before = model(tokens).logits.float()
        undo = fuse(model)
        found = replaced(model)
        after = model(tokens).logits.float()
    for path, module in model.named_modules():
        kinds = ("RMSNorm", "Router", "MLP", *(() if name == "deepseek_v2" else ("Attention",)))
        expected = isinstance(module, nn.Linear) or type(module).__name__.endswith(kinds)
        assert (path in found) == expected, path
    precision = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(before, after, rtol=0, atol=precision * float(before.abs().max()))
    undo()
    assert not replaced(model)
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits.float(), before)


@with_kernels
@pytest.mark.parametrize("name", MODELS)
def test_a_router_answers_in_the_same_form(name: str) -> None:
    model = made(MODELS[name], DTYPES[-1])
    (moe_layer,) = inspect_model(model).moe
    assert moe_layer.router is not None
    gate = moe_layer.router.router
    x = states(5, DTYPES[-1])
    with torch.inference_mode():
        expected = gate(x)
        fuse(gate)
        assert "forward" in vars(gate)
        found = gate(x)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    assert torch.allclose(found[0], expected[0], rtol=0.02, atol=0.02)


class Sigmoid(MixtralTopKRouter):
    def forward(self, hidden_states: Tensor) -> Any:
        logits = functional.linear(hidden_states, self.weight)
        weights, index = logits.float().sigmoid().topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), index


class Grouped(MixtralTopKRouter):
    def forward(self, hidden_states: Tensor) -> Any:
        logits = functional.linear(hidden_states, self.weight)
        halves = logits.float().softmax(-1).unflatten(1, (2, -1)).max(-1)
        weights, index = halves.values, halves.indices + torch.tensor([0, 4], device=logits.device)
        return logits, weights / weights.sum(-1, keepdim=True), index


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Scaled(MistralMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01


class Clamped(MistralMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))  # type: ignore[no-any-return]


class Doubled(MixtralRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.05


def of_mixtral(kind: type[nn.Module]) -> nn.Module:
    return kind(MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2))


def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs neighbours, not halves."""

    def turn(x: Tensor) -> Tensor:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos[:, None] + turned * sin[:, None]

    return turn(query), turn(key)


class Interleaved(nn.Module):
    """Attention, as far as its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = Shifted(32, 32)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = self.project(states)[:, None]
        return apply_rotary_pos_emb(query, query, cos, sin)[0]


def without_linears(module: Any) -> nn.Module:
    """Its linear layers stay as they are, so that only the module itself could be replaced."""
    for layer in (module.gate_proj, module.up_proj, module.down_proj):
        layer.forward = layer.forward
    return module  # type: ignore[no-any-return]


ODD: dict[str, Callable[[], nn.Module]] = {
    "a norm that takes the mean away": lambda: nn.LayerNorm(32, bias=False),
    "a norm with one more than its weight": lambda: GemmaRMSNorm(32),
    "a norm with more in it": lambda: Doubled(32),
    "a router by another function": lambda: of_mixtral(Sigmoid),
    "a router with groups": lambda: of_mixtral(Grouped),
    "a linear layer with more in it": lambda: Shifted(32, 32),
    "a gated layer times something": lambda: without_linears(Scaled(MistralConfig(**SHAPE))),
    "a gated layer that is clamped": lambda: without_linears(Clamped(MistralConfig(**SHAPE))),
    "rotary positions of neighbours": Interleaved,
    "an embedding": lambda: nn.Embedding(8, 32),
    "a convolution": lambda: nn.Conv1d(4, 4, 3),
}


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ODD)
def test_what_only_looks_alike_is_left_alone(name: str, dtype: torch.dtype) -> None:
    module = made(ODD[name], dtype)
    before = replaced(module)
    assert replaced(fused(module)) == before


def fused(module: nn.Module) -> nn.Module:
    fuse(module)
    return module


class Attentions(nn.Module):
    """Those of several layers, and some of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MistralAttention(MistralConfig(**SHAPE), number) for number in range(4))
        self.others = nn.ModuleList(Interleaved() for _ in range(3))


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, torch.dtype]]:
    """Every rotary function that was tried, and on what."""
    tried: list[tuple[Any, torch.dtype]] = []
    whole = rotary.prove

    def prove(own: Any, device: torch.device, dtype: torch.dtype) -> bool:
        tried.append((own, dtype))
        return whole(own, device, dtype)

    monkeypatch.setattr(rotary, "prove", prove)
    return tried


@with_kernels
def test_rotary_functions_are_proved_once_and_not_per_layer(proofs: list[tuple[Any, torch.dtype]]) -> None:
    model = made(Attentions)
    for number in (1, 2):  # what one model was told is nothing to the next
        undo = fuse(model)
        assert all("forward" in vars(layer) for layer in model.layers)
        assert not any("forward" in vars(layer) for layer in model.others)
        assert len(proofs) == 2 * number, "for seven layers"
        undo()
    assert len(set(proofs)) == 2


def test_a_proof_is_for_one_function_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    tried: list[tuple[Any, torch.device, torch.dtype]] = []

    def prove(own: Any, device: torch.device, dtype: torch.dtype) -> bool:
        tried.append((own, device, dtype))
        if dtype is torch.float16:
            raise RuntimeError("out of resources")
        return dtype is torch.float32

    monkeypatch.setattr(rotary, "prove", prove)
    kernels, layers = rotary.RotaryKernels(), [made(Interleaved) for _ in range(3)]
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert all(kernels.form(layer, cpu, torch.float32) is not None for layer in layers)
    assert not any(kernels.form(layer, cpu, torch.bfloat16) for layer in layers)
    with pytest.raises(RuntimeError, match="out of resources"):
        kernels.form(layers[0], cpu, torch.float16)
    assert kernels.form(layers[1], cpu, torch.float16) is None, "it failed before"
    assert kernels.form(layers[0], other, torch.float32) is not None
    assert len(tried) == len(set(tried)) == 4


@with_kernels
def test_a_router_that_does_not_choose_is_left_alone() -> None:
    gate = router()
    gate.weight.data.zero_()
    assert not replaced(fused(gate))


@with_kernels
def test_a_forward_that_is_not_the_class_s_is_left_alone() -> None:
    layer = made(lambda: nn.Linear(32, 32))
    layer.forward = own = lambda x: x
    fuse(layer)()
    assert layer.forward is own


@with_kernels
@pytest.mark.parametrize("fault", ["raises", "is off", "is not a number", "depends on the others"])
def test_a_kernel_that_fails_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.backends.kernels import dense

    def faulty(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if fault == "raises":
            raise RuntimeError("out of resources")
        y = dense.small_batch_linear_plain(x, weight, bias)
        if fault == "is off":
            y[-1, -1] += 0.1
        elif fault == "is not a number":
            y[0, 0] = torch.nan
        elif len(x) == 1:
            y *= 1 + 1e-6
        return y

    monkeypatch.setattr(dense, "small_batch_linear", faulty)
    assert not replaced(fused(made(lambda: nn.Linear(32, 8))))


@with_kernels
def test_weights_are_those_of_the_call() -> None:
    layer = fused(made(lambda: nn.Linear(32, 8)))
    assert replaced(layer)
    x, other = states(3), torch.randn(8, 32, device=DEVICE)
    with torch.inference_mode():
        layer.weight.data.mul_(2)
        assert torch.allclose(layer(x), functional.linear(x, layer.weight, layer.bias), atol=1e-5)
        layer.weight = nn.Parameter(other)
        assert torch.allclose(layer(x), functional.linear(x, other, layer.bias), atol=1e-5)
        swapped = torch.func.functional_call(layer, {"weight": other * 3}, (x,))
        assert torch.allclose(swapped, functional.linear(x, other * 3, layer.bias), atol=1e-5)


@with_kernels
def test_the_module_s_own_forward_has_the_rest() -> None:
    layer, gate = fused(made(lambda: nn.Linear(32, 8))), fused(router())
    assert replaced(layer)
    assert replaced(gate)
    with torch.inference_mode():
        many = states(17)
        assert torch.equal(layer(many), functional.linear(many, layer.weight, layer.bias))
        assert torch.equal(layer(input=many[:2]), functional.linear(many[:2], layer.weight, layer.bias))
        assert layer(many[:0]).shape == (0, 8)
        with pytest.raises(RuntimeError):
            layer(many[:2].half())
        for given in (many, many.view(1, 17, 32), many[:2].view(1, 2, 32)):
            assert torch.equal(gate(given)[0], functional.linear(given.view(-1, 32), gate.weight))
        for shape in [(32,), (1, 4, 32), (2, 2, 32)]:
            x = torch.randn(shape, device=DEVICE)
            assert torch.allclose(layer(x), functional.linear(x, layer.weight, layer.bias), atol=1e-5)


@with_kernels
def test_hooks_are_called() -> None:
    layer, seen = fused(made(lambda: nn.Linear(32, 8))), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.inference_mode():
        assert layer(states(2)) is seen[0]


@with_kernels
def test_gates_that_were_stacked_before_still_answer() -> None:
    model = made(lambda: MixtralForCausalLM(MixtralConfig(**SHAPE | {"num_hidden_layers": 2}, num_local_experts=8)))
    gates = StackedGates.of(inspect_model(model).moe)
    assert gates is not None
    residual = torch.randn(2, 3, 32, device=DEVICE)
    before = gates(range(2), residual)
    fuse(model)
    assert "forward" in vars(model.model.layers[0].mlp.gate)
    assert all(torch.equal(a, b) for a, b in zip(gates(range(2), residual), before, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels on the CPU")
def test_on_the_cpu_nothing_is_replaced() -> None:
    model = made(mixtral).cpu()
    fuse(model)()
    assert not replaced(fused(model))


def test_without_kernels_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spmoe.backends.kernels.dense", None)
    assert not replaced(fused(made(mixtral)))


def test_what_has_no_values_is_left_alone() -> None:
    with torch.device("meta"):
        assert not replaced(fused(mixtral()))


def test_rounding_of_qwen_weights_is_the_model_s() -> None:
    """That the families differ is the reason to look at what a router answers."""
    config = Qwen2MoeConfig(num_experts=4, num_experts_per_tok=2, hidden_size=32)
    gate = made(lambda: Qwen2MoeTopKRouter(config), torch.bfloat16)
    assert gate(states(1, torch.bfloat16))[1].dtype == torch.bfloat16
    assert router().bfloat16()(states(1, torch.bfloat16))[1].dtype == torch.float32
