"""A widened model computes the small one's function; added dimensions stay zero, and added weights are not zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from checkpoints import expert_tensors, greedy, qwen3_moe, reference, save, seeded
from spmoe.backends.cpu import CpuBackend
from spmoe.errors import UsageError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import ensure_expert_file
from spmoe.experts.transfer import FileTransfer
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.load import load_without_experts, store_spec
from spmoe.models.shipped import shipped_pair
from spmoe.models.target import Target
from spmoe.models.widen import SHAPES, ExpertWidener, WideShape, wide_config, wide_store_spec, widen_draft, widen_target
from spmoe.observe.clock import RealClock
from spmoe.types import ExpertKey

HIDDEN = 80
GROUPED = WideShape("grouped", 640, 448, 512, 384, heads=8, kv_heads=2, head_dim=64)  # four times the head size
UNGROUPED = WideShape("ungrouped", 368, 208, 240, 176, heads=8, kv_heads=8, head_dim=32)  # twice
WIDE = [GROUPED, UNGROUPED]
SMALL = {
    "vocab_size": 211,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.2,
    "rms_norm_eps": 0.03,  # large, so that a wrong value changes the output
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": True,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def mistral(**changes: Any) -> Any:
    return MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": None} | changes))


def mixtral(**changes: Any) -> Any:
    return MixtralForCausalLM(MixtralConfig(**SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes))


def qwen2_moe(**changes: Any) -> Any:
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}
    counts = {"num_experts": 8, "num_experts_per_tok": 3}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL | sizes | counts | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "mlp.gate.weight")):  # these are initialized with zeros
            torch.nn.init.normal_(parameter, std=0.2)
    return model


FAMILIES = {"mistral": mistral, "mixtral": mixtral, "qwen2_moe": qwen2_moe}


@pytest.fixture(params=FAMILIES)
def small(request: pytest.FixtureRequest) -> Any:
    return seeded(FAMILIES[request.param], 3)


def widened(model: Any, shape: WideShape) -> Any:
    return widen_draft(model, shape, torch.float32, "cpu")


def tokens(model: Any, count: int = 24) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    return torch.randint(1, model.config.vocab_size, (1, count), generator=rng)  # [1, count]


@torch.inference_mode()
def assert_equivalent(small: Any, wide: Any) -> None:
    ids = tokens(small)
    expected, logits = small(ids).logits, wide(ids).logits
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert greedy(wide, ids[0].tolist(), 32) == greedy(small, ids[0].tolist(), 32)


@pytest.mark.parametrize("shape", WIDE, ids=lambda shape: shape.name)
def test_wide_model_is_equivalent(small: Any, shape: WideShape) -> None:
    wide = widened(small, shape)
    assert type(wide) is type(small)
    assert wide.config._attn_implementation == small.config._attn_implementation == "eager"
    assert wide.config.hidden_size == shape.hidden
    assert wide.config.max_position_embeddings == 32768
    assert_equivalent(small, wide)


@pytest.mark.parametrize("shape", WIDE, ids=lambda shape: shape.name)
@pytest.mark.parametrize("heads", [{"num_attention_heads": 4, "num_key_value_heads": 2}, {"num_key_value_heads": 5}])
def test_wide_model_is_equivalent_with_several_kv_heads(heads: dict[str, int], shape: WideShape) -> None:
    small = seeded(mistral, 4, **heads, head_dim=16)
    if heads["num_key_value_heads"] == 5:
        shape = replace(shape, kv_heads=8)
    assert_equivalent(small, widened(small, shape))


def test_wide_model_is_equivalent_with_untied_embeddings() -> None:
    small = seeded(mistral, 5, tie_word_embeddings=False)
    wide = widened(small, GROUPED)
    assert wide.lm_head.weight is not wide.model.embed_tokens.weight
    assert (wide.lm_head.weight[:, HIDDEN:] != 0).all(), "noise, since it multiplies zeros"
    assert_equivalent(small, wide)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_shipped_pair_widened_is_equivalent(which: str) -> None:
    small = reference(Path(shipped_pair()[which == "draft"]))
    wide = widened(small, WideShape("wide", 320, 224, 256, 256, heads=8, kv_heads=2, head_dim=128))
    assert_equivalent(small, wide)
    assert wide.generation_config.to_dict() == small.generation_config.to_dict()


@torch.inference_mode()
def test_bfloat16_error_is_similar_to_the_small_models(small: Any) -> None:
    ids, exact = tokens(small), small(tokens(small)).logits
    wide = widen_draft(small, GROUPED, torch.bfloat16, "cpu")
    assert {p.dtype for p in wide.parameters()} == {wide.config.dtype} == {torch.bfloat16}
    assert wide.model.rotary_emb.inv_freq.dtype == torch.float32
    error = float((wide(ids).logits - exact).square().mean())
    small.to(torch.bfloat16)
    assert error < 2.5 * float((small(ids).logits - exact).square().mean())


@pytest.mark.parametrize("shape", WIDE, ids=lambda shape: shape.name)
@torch.inference_mode()
def test_added_dimensions_stay_exactly_zero(small: Any, shape: WideShape) -> None:
    wide = widened(small, shape)
    captured = []
    for layer in wide.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_pre_hook(lambda module, args: captured.append(args[0]))
        layer.mlp.register_forward_hook(lambda module, args, output: captured.append(output))
    wide.model.norm.register_forward_hook(lambda module, args, output: captured.extend((args[0], output)))
    wide(tokens(wide))
    assert len(captured) == 3 * len(wide.model.layers) + 2
    for states in captured:  # [1, count, hidden]
        assert states.shape[-1] == shape.hidden
        assert bool(states[..., :HIDDEN].any())
        assert not bool(states[..., HIDDEN:].any())


@pytest.mark.parametrize("shape", WIDE, ids=lambda shape: shape.name)
def test_most_weights_are_not_zero(small: Any, shape: WideShape) -> None:
    wide = widened(small, shape)
    trained = small.state_dict()
    for name, weight in wide.named_parameters():
        assert bool(weight.isfinite().all())
        assert float(weight.abs().max()) < 12 * float(trained[name].abs().max()), name
        if not name.endswith(("embed_tokens.weight", "q_proj.bias", "v_proj.bias")):
            assert float((weight != 0).float().mean()) > 0.75, name


def test_norm_of_ones_is_widened_with_noise() -> None:
    small = mistral().eval()
    weight = widened(small, GROUPED).model.norm.weight
    assert bool((weight != 0).all())
    assert float(weight[HIDDEN:].std()) > 0.1


# ---- experts


def small_expert(hidden: int = 64, ffn: int = 32) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(8)
    shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
    return {name: 0.05 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def wide_expert(widener: ExpertWidener, key: ExpertKey, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    views = {
        "gate_up_proj": torch.empty(2 * GROUPED.ffn, GROUPED.hidden, dtype=dtype),
        "down_proj": torch.empty(GROUPED.hidden, GROUPED.ffn, dtype=dtype),
    }
    widener.fill(small_expert(), views, key)
    return views


def test_expert_is_mostly_noise_of_the_trained_scale() -> None:
    small, wide = small_expert(), wide_expert(ExpertWidener(torch.float32, "cpu"), ExpertKey(1, 2))
    weights = torch.cat([w.flatten() for w in wide.values()])
    assert float((weights != 0).float().mean()) >= 0.9
    for name, weight in wide.items():
        added = weight[weight != 0]
        assert float(added.std()) == pytest.approx(float(small[name].std()), rel=0.1)


def test_expert_depends_only_on_key_and_seed() -> None:
    widener = ExpertWidener(torch.float32, "cpu", seed=1)
    first = wide_expert(widener, ExpertKey(1, 2))
    again = wide_expert(ExpertWidener(torch.float32, "cpu", seed=1), ExpertKey(1, 2))
    others = [
        wide_expert(widener, ExpertKey(2, 1)),
        wide_expert(widener, ExpertKey(1, 3)),
        wide_expert(ExpertWidener(torch.float32, "cpu", seed=2), ExpertKey(1, 2)),
    ]
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert not any(torch.equal(weight, other[name]) for other in others)


def test_expert_of_another_dtype_is_copied_into_its_views() -> None:
    direct = wide_expert(ExpertWidener(torch.bfloat16, "cpu"), ExpertKey(0, 0), torch.bfloat16)
    copied = wide_expert(ExpertWidener(torch.bfloat16, "cpu"), ExpertKey(0, 0), torch.float32)
    for name, weight in direct.items():
        assert torch.equal(weight.float(), copied[name])


def test_noise_differs_between_rows() -> None:
    view = torch.empty(4096, 512)  # more values than the noise has
    ExpertWidener(torch.float32, "cpu").fill(small_expert(), {"down_proj": view}, ExpertKey(0, 0))
    assert len(torch.unique(view[:, -1])) > 4000


def test_unknown_expert_tensor_is_rejected() -> None:
    widener = ExpertWidener(torch.float32, "cpu")
    with pytest.raises(UsageError, match="how to widen up_proj"):
        widener.fill({"up_proj": torch.ones(2, 2)}, {"up_proj": torch.ones(4, 4)}, ExpertKey(0, 0))


# ---- with the engine's classes


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_wide_target_with_offloaded_experts_is_equivalent(family: str, tmp_path: Path) -> None:
    directory = save(seeded(FAMILIES[family], 6), tmp_path / "small")
    checkpoint, whole = Checkpoint.find(str(directory)), reference(directory)
    small = load_without_experts(checkpoint, torch.float32)
    wide = widen_target(small, GROUPED, torch.float32, "cpu")
    target, resident = Target(wide), widened(whole, GROUPED)
    assert target.gates_found
    assert not any("experts" in name for name, _ in wide.named_parameters())
    paths = [moe_layer.path for moe_layer in target.moe]
    spec = wide_store_spec(checkpoint, wide, paths, torch.float32, GROUPED)
    small_spec = store_spec(checkpoint, small, paths, torch.float32)
    assert spec.experts == small_spec.experts
    assert spec.layout.nbytes > 30 * small_spec.layout.nbytes
    other_seed = wide_store_spec(checkpoint, wide, paths, torch.float32, GROUPED, seed=1)
    assert len({one.fingerprint for one in (spec, small_spec, other_seed)}) == 3

    experts, widener = expert_tensors(whole), ExpertWidener(torch.float32, "cpu")

    def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
        widener.fill({name: w[key.expert] for name, w in experts[key.layer].items()}, views, key)

    file = ensure_expert_file(tmp_path / "wide.safetensors", spec, fill)
    slots = MemorySlots(target.top_k + 1, spec.layout)
    transfer, clock = FileTransfer(file, slots), RealClock()
    offloaded = Experts.build(slots, transfer, make_eviction("lru", spec.experts), spec.layout.nbytes, clock)
    try:
        target.connect(offloaded, CpuBackend())
        ids = tokens(whole)
        with torch.inference_mode():
            expected, all_resident = whole(ids).logits[0], resident(ids).logits[0]
        kv = target.new_kv(64)
        logits = target.forward(ids[0].tolist(), kv, ids.shape[1])
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
        torch.testing.assert_close(logits, all_resident, rtol=1e-5, atol=1e-5)
    finally:
        offloaded.close()


def test_wide_gates_select_the_same_experts(tmp_path: Path) -> None:
    checkpoint = Checkpoint.find(str(save(seeded(mixtral, 7), tmp_path)))
    small = load_without_experts(checkpoint, torch.float32)
    wide = Target(widen_target(small, UNGROUPED, torch.float32, "cpu"))
    states = torch.randn(3, 9, HIDDEN, generator=torch.Generator().manual_seed(9))  # [layers, rows, hidden]
    padded = torch.nn.functional.pad(states, (0, UNGROUPED.hidden - HIDDEN))
    expected, routing = Target(small).route(range(3), states), wide.route(range(3), padded)
    assert torch.equal(routing.experts, expected.experts)
    torch.testing.assert_close(routing.scores, expected.scores)


# ---- configurations and errors


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_shipped_pair_fits_every_shape(shape: WideShape) -> None:
    for directory in shipped_pair():
        config = Checkpoint.find(directory).config
        wide = wide_config(config, shape, positions=65536)
        assert type(wide) is type(config)
        assert (wide.head_dim, wide.max_position_embeddings) == (128, 65536)
        assert wide.rms_norm_eps == pytest.approx(config.rms_norm_eps * config.hidden_size / shape.hidden)
        assert config.hidden_size == 160, "the small model's config is unchanged"


def test_sizes_map_to_the_settings_of_each_family() -> None:
    shape = SHAPES["deepseek-v2-lite"]
    qwen = wide_config(seeded(qwen2_moe, 0).config, shape)
    assert (qwen.moe_intermediate_size, qwen.shared_expert_intermediate_size) == (1408, 2816)
    assert wide_config(mistral().config, shape).intermediate_size == 10944
    assert wide_config(mixtral().config, shape).intermediate_size == 1408
    assert wide_config(mistral().config, SHAPES["mixtral-8x7b"]).intermediate_size == 14336


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 64}, "hidden_size is 64, but this model needs at least 80"),
        ({"ffn": 40}, "intermediate_size is 40, but this model needs at least 48"),
        ({"heads": 4}, "num_attention_heads is 4, but this model needs at least 5"),
        ({"heads": 8, "kv_heads": 3}, "8 heads, which 3 KV heads cannot share"),
        ({"head_dim": 8}, "head_dim is 8, but this model needs at least 16"),
        ({"head_dim": 40}, "rotary frequencies"),
    ],
)
def test_shape_that_is_too_small_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        widened(seeded(mixtral, 0), replace(GROUPED, **changes))


def test_too_few_kv_heads_are_rejected() -> None:
    small = seeded(mistral, 0, num_key_value_heads=5)
    with pytest.raises(UsageError, match="num_key_value_heads is 2, but this model needs at least 5"):
        widened(small, GROUPED)


def test_unsupported_family_is_rejected() -> None:
    with pytest.raises(UsageError, match="cannot widen a qwen3_moe model; choose one of these kinds: mistral"):
        widened(qwen3_moe(), GROUPED)


def test_unknown_parameter_is_rejected() -> None:
    small = seeded(mistral, 0)
    small.model.layers[1].self_attn.q_norm = torch.nn.RMSNorm(16)
    with pytest.raises(UsageError, match=r"how to widen model\.layers\.1\.self_attn\.q_norm\.weight"):
        widened(small, GROUPED)


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "sigmoid"}, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}]
)
def test_unsupported_activation_and_rope_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="SiLU feed-forwards and plain rotary positions"):
        widened(seeded(mistral, 0, **changes), GROUPED)
