"""Norms and routers of several layers in one kernel, against their plain form and the modules they stand for."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends.kernels.gates import route_layers, route_layers_plain  # noqa: E402
from spmoe.models.gates import FusedGates  # noqa: E402
from spmoe.models.inspection import inspect_model  # noqa: E402

pytestmark = [pytest.mark.usefixtures("mended_interpreter"), *([] if INTERPRETED else [pytest.mark.gpu])]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layers", "rows", "k", "experts", "top_k"), [(1, 1, 64, 8, 2), (3, 5, 75, 6, 6), (2, 3, 130, 64, 8)]
)
def test_every_layer_answers_for_its_own_rows(
    dtype: torch.dtype, layers: int, rows: int, k: int, experts: int, top_k: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(layers, rows, k).to(DEVICE, dtype)
    norms = (1 + torch.randn(layers, k) / 4).to(DEVICE, dtype)
    routers = (torch.randn(layers, experts, k) / k**0.5).to(DEVICE, dtype)
    index, weights = route_layers(x, norms, 1e-6, routers, top_k)
    expected, shares = route_layers_plain(x, norms, 1e-6, routers, top_k)
    same = (index == expected).float().mean()
    assert same == 1 if dtype == torch.float32 else same > 0.9  # logits of few bits may tie
    assert torch.allclose(weights, shares, atol=1e-5 if dtype == torch.float32 else 0.02)
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))


SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "mixtral":
        made: Any = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2))
    else:
        sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        made = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **sizes, num_experts=6, num_experts_per_tok=3))
    for weight in made.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
    return made.to(DEVICE).eval()


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_a_model_s_gates_pick_what_they_picked(kind: str) -> None:
    moe_layers = inspect_model(model(kind)).moe
    gates = FusedGates.of(moe_layers)
    assert gates is not None
    states = torch.randn(2, 5, 32).to(DEVICE)
    experts, shares = gates(range(1, 3), states)
    for layer in (1, 2):
        norm, router = moe_layers[layer].norm, moe_layers[layer].router
        assert norm is not None
        assert router is not None
        with torch.inference_mode():
            chosen, weights = router(norm(states[layer - 1]))[:2]
        order = weights.argsort(dim=-1, descending=True)
        assert torch.equal(chosen.gather(1, order), experts[layer - 1])
        own = weights.gather(1, order).float()
        assert torch.allclose(own / own.sum(-1, keepdim=True), shares[layer - 1], atol=1e-5)


def test_gates_of_another_kind_are_left_alone() -> None:
    moe_layers = inspect_model(model("mixtral")).moe
    for moe_layer in moe_layers:
        assert moe_layer.norm is not None
        assert isinstance(moe_layer.norm, nn.Module)
        moe_layer.norm.forward = lambda x: x * 3 - 1  # type: ignore[method-assign]
    assert FusedGates.of(moe_layers) is None
    assert FusedGates.of(moe_layers[:1]) is None
