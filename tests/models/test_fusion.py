"""`fuse` replaces a module's forward if, and only if, the kernel reproduces its output.

Tests with kernels run on CUDA, or on the CPU with TRITON_INTERPRET=1; the others run anywhere.
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
    """Mark a test that needs kernels to run."""
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
    "qwen2_moe, renormalized": lambda: qwen2_moe(norm_topk_prob=True),
    "deepseek_v2": deepseek_v2,
}


def build(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    """Build a module with random weights; no tensor is all ones or zeros."""
    torch.manual_seed(0)
    module = make().to(DEVICE, dtype).eval()
    for name, weight in module.named_parameters():
        spread = torch.randn(weight.shape).to(weight) / (4 if weight.ndim == 1 else weight.shape[-1] ** 0.5)
        weight.data.copy_(1 + spread if weight.ndim == 1 and "bias" not in name else spread)
    return module


def router() -> Any:
    return build(lambda: of_mixtral(MixtralTopKRouter))


def replaced(model: nn.Module) -> set[str]:
    """Return the names of the modules whose forward was replaced."""
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


def states(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 32).to(DEVICE, dtype)


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_fused_model_gives_the_same_logits(name: str, dtype: torch.dtype) -> None:
    model = build(MODELS[name], dtype)
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
def test_fused_router_keeps_shapes_and_dtypes(name: str) -> None:
    model = build(MODELS[name], DTYPES[-1])
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
    """Rotate pairs of neighbouring dimensions instead of halves."""

    def apply_rotary(x: Tensor) -> Tensor:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos[:, None] + rotated * sin[:, None]

    return apply_rotary(query), apply_rotary(key)


class Interleaved(nn.Module):
    """An attention module with only its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = Shifted(32, 32)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = self.project(states)[:, None]
        return apply_rotary_pos_emb(query, query, cos, sin)[0]


def without_linears(module: Any) -> nn.Module:
    """Protect the linear layers from fusion, so that only the module itself could be replaced."""
    for layer in (module.gate_proj, module.up_proj, module.down_proj):
        layer.forward = layer.forward
    return module  # type: ignore[no-any-return]


UNSUPPORTED: dict[str, Callable[[], nn.Module]] = {
    "a norm that subtracts the mean": lambda: nn.LayerNorm(32, bias=False),
    "a norm that adds 1 to its weight": lambda: GemmaRMSNorm(32),
    "a norm with another step": lambda: Doubled(32),
    "a router with sigmoid": lambda: of_mixtral(Sigmoid),
    "a router with groups": lambda: of_mixtral(Grouped),
    "a linear layer with another step": lambda: Shifted(32, 32),
    "a gated MLP with a factor": lambda: without_linears(Scaled(MistralConfig(**SHAPE))),
    "a gated MLP with a clamp": lambda: without_linears(Clamped(MistralConfig(**SHAPE))),
    "rotary positions of neighbouring dimensions": Interleaved,
    "an embedding": lambda: nn.Embedding(8, 32),
    "a convolution": lambda: nn.Conv1d(4, 4, 3),
}


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_similar_modules_are_not_replaced(name: str, dtype: torch.dtype) -> None:
    module = build(UNSUPPORTED[name], dtype)
    before = replaced(module)
    assert replaced(fused(module)) == before


def fused(module: nn.Module) -> nn.Module:
    fuse(module)
    return module


class Attentions(nn.Module):
    """Attention modules of several layers, and some of another class; linear layers are protected from fusion."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MistralAttention(MistralConfig(**SHAPE), number) for number in range(4))
        self.others = nn.ModuleList(Interleaved() for _ in range(3))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.forward = module.forward  # type: ignore[method-assign]


@pytest.fixture
def rotary_checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, torch.dtype]]:
    """Collect every rotary function that is checked, with its dtype."""
    checked: list[tuple[Any, torch.dtype]] = []
    original = rotary.kernel_matches

    def kernel_matches(own: Any, device: torch.device, dtype: torch.dtype) -> bool:
        checked.append((own, dtype))
        return original(own, device, dtype)

    monkeypatch.setattr(rotary, "kernel_matches", kernel_matches)
    return checked


@with_kernels
def test_rotary_functions_are_checked_once_per_model(rotary_checks: list[tuple[Any, torch.dtype]]) -> None:
    model = build(Attentions)
    for number in (1, 2):  # each call of `fuse` checks anew
        undo = fuse(model)
        assert all("forward" in vars(layer) for layer in model.layers)
        assert not any("forward" in vars(layer) for layer in model.others)
        assert len(rotary_checks) == 2 * number, "two functions, though seven layers"
        undo()
    assert len(set(rotary_checks)) == 2


def test_rotary_check_is_per_function_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    checked: list[tuple[Any, torch.device, torch.dtype]] = []

    def kernel_matches(own: Any, device: torch.device, dtype: torch.dtype) -> bool:
        checked.append((own, device, dtype))
        if dtype is torch.float16:
            raise RuntimeError("out of resources")
        return dtype is torch.float32

    monkeypatch.setattr(rotary, "kernel_matches", kernel_matches)
    kernels, layers = rotary.RotaryKernels(), [build(Interleaved) for _ in range(3)]
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert all(kernels.fused_forward(layer, cpu, torch.float32) is not None for layer in layers)
    assert not any(kernels.fused_forward(layer, cpu, torch.bfloat16) for layer in layers)
    with pytest.raises(RuntimeError, match="out of resources"):
        kernels.fused_forward(layers[0], cpu, torch.float16)
    assert kernels.fused_forward(layers[1], cpu, torch.float16) is None, "it failed before"
    assert kernels.fused_forward(layers[0], other, torch.float32) is not None
    assert len(checked) == len(set(checked)) == 4


@with_kernels
def test_router_with_equal_logits_is_not_replaced() -> None:
    gate = router()
    gate.weight.data.zero_()
    assert not replaced(fused(gate))


@with_kernels
def test_replaced_forward_is_kept() -> None:
    layer = build(lambda: nn.Linear(32, 32))
    layer.forward = own = lambda x: x
    fuse(layer)()
    assert layer.forward is own


@with_kernels
@pytest.mark.parametrize("fault", ["raises", "wrong value", "NaN", "depends on other rows"])
def test_faulty_kernel_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.backends.kernels import dense

    def faulty(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if fault == "raises":
            raise RuntimeError("out of resources")
        y = dense.small_batch_linear_plain(x, weight, bias)
        if fault == "wrong value":
            y[-1, -1] += 0.1
        elif fault == "NaN":
            y[0, 0] = torch.nan
        elif len(x) == 1:
            y *= 1 + 1e-6
        return y

    monkeypatch.setattr(dense, "small_batch_linear", faulty)
    assert not replaced(fused(build(lambda: nn.Linear(32, 8))))


@with_kernels
def test_replaced_weights_are_used() -> None:
    layer = fused(build(lambda: nn.Linear(32, 8)))
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
def test_unsupported_inputs_use_the_modules_own_forward() -> None:
    layer, gate = fused(build(lambda: nn.Linear(32, 8))), fused(router())
    assert replaced(layer)
    assert replaced(gate)
    with torch.inference_mode():
        many = states(65)
        assert torch.equal(layer(many), functional.linear(many, layer.weight, layer.bias))
        assert torch.equal(layer(input=many[:2]), functional.linear(many[:2], layer.weight, layer.bias))
        assert layer(many[:0]).shape == (0, 8)
        with pytest.raises(RuntimeError):
            layer(many[:2].half())
        for given in (many, many.view(1, 65, 32), many[:2].view(1, 2, 32)):
            assert torch.equal(gate(given)[0], functional.linear(given.view(-1, 32), gate.weight))
        for shape in [(32,), (1, 4, 32), (2, 2, 32)]:
            x = torch.randn(shape, device=DEVICE)
            assert torch.allclose(layer(x), functional.linear(x, layer.weight, layer.bias), atol=1e-5)


@with_kernels
def test_forward_hooks_are_called() -> None:
    layer, outputs = fused(build(lambda: nn.Linear(32, 8))), []
    layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.inference_mode():
        assert layer(states(2)) is outputs[0]


@with_kernels
def test_stacked_gates_still_work_after_fusion() -> None:
    model = build(lambda: MixtralForCausalLM(MixtralConfig(**SHAPE | {"num_hidden_layers": 2}, num_local_experts=8)))
    gates = StackedGates.of(inspect_model(model).moe)
    assert gates is not None
    residual = torch.randn(2, 3, 32, device=DEVICE)
    before = gates(range(2), residual)
    for layer in model.model.layers:
        assert replaced(fused(layer.mlp.gate))
        assert replaced(fused(layer.post_attention_layernorm))
    assert all(torch.equal(a, b) for a, b in zip(gates(range(2), residual), before, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels on the CPU")
def test_nothing_is_replaced_on_the_cpu() -> None:
    model = build(mixtral).cpu()
    fuse(model)()
    assert not replaced(fused(model))


def test_nothing_is_replaced_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spmoe.backends.kernels.dense", None)
    assert not replaced(fused(build(mixtral)))


def test_nothing_is_replaced_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert not replaced(fused(mixtral()))


def test_families_return_router_weights_in_different_dtypes() -> None:
    """Show why fused routers copy the dtypes of the module's own output."""
    config = Qwen2MoeConfig(num_experts=4, num_experts_per_tok=2, hidden_size=32)
    gate = build(lambda: Qwen2MoeTopKRouter(config), torch.bfloat16)
    assert gate(states(1, torch.bfloat16))[1].dtype == torch.bfloat16
    assert router().bfloat16()(states(1, torch.bfloat16))[1].dtype == torch.float32
