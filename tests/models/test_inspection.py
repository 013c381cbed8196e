"""Inspection finds norms, routers and experts, and gates called alone select the same experts as in a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoints import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    Pair,
    byte_tokenizer,
    qwen3,
    qwen3_moe,
    reference,
    save,
    seeded,
    upcycle,
)
from spmoe import LLM
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.families import families, tiny_config, tiny_model
from spmoe.models.inspection import inspect_model
from spmoe.models.load import load_dense, load_skeleton, load_without_experts
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target

TOKENS = [(23 * i + 3) % 251 for i in range(9)]


def target_of(directory: Path) -> Target:
    return Target(load_without_experts(Checkpoint.find(str(directory)), torch.float32))


def decoder_layers(runner: ModelRunner) -> Any:
    return runner.model.model.layers


# ---- structure


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_norms_routers_and_experts_are_found(family: str, mixtral_pair: Pair, qwen_pair: Pair) -> None:
    target = target_of({"mixtral": mixtral_pair, "qwen3_moe": qwen_pair}[family].target)
    layers = decoder_layers(target)
    assert target.depth_count == len(layers) == LAYERS
    assert target.layer_depths == list(range(LAYERS))
    assert target.top_k == TOP_K
    assert target.gates_found
    assert target.has_hidden_states
    for depth, (moe_layer, layer, norm) in enumerate(zip(target.moe, layers, target.inspection.norms, strict=True)):
        assert moe_layer.depth == depth
        assert moe_layer.experts is layer.mlp.experts
        assert target.model.get_submodule(moe_layer.path) is layer.mlp.experts
        assert moe_layer.norm is norm is layer.post_attention_layernorm
        assert moe_layer.router is not None
        assert moe_layer.router.router is layer.mlp.gate
        assert moe_layer.top_k == TOP_K
        assert moe_layer.experts.num_experts == EXPERTS[family]


def test_dense_layers_are_not_moe_layers(partly_dense_pair: Pair) -> None:
    target = target_of(partly_dense_pair.target)
    layers = decoder_layers(target)
    assert target.depth_count == 4
    assert target.layer_depths == [1, 3]
    assert [moe_layer.experts for moe_layer in target.moe] == [layers[1].mlp.experts, layers[3].mlp.experts]
    assert [moe_layer.norm for moe_layer in target.moe] == [layers[d].post_attention_layernorm for d in (1, 3)]
    assert list(target.inspection.norms) == [layer.post_attention_layernorm for layer in layers], "of dense layers too"
    assert target.has_hidden_states


def test_top_k_is_that_of_the_router(tmp_path: Path) -> None:
    directory = save(seeded(qwen3_moe, 1, num_experts_per_tok=3, num_hidden_layers=2), tmp_path / "three")
    target = target_of(directory)
    assert target.top_k == 3
    assert [moe_layer.top_k for moe_layer in target.moe] == [3, 3]


def test_scores_sum_to_one_if_router_weights_do_not(tmp_path: Path) -> None:
    target = target_of(save(seeded(qwen3_moe, 1, norm_topk_prob=False), tmp_path / "unnormalized"))
    states = torch.randn(LAYERS, 20, HIDDEN, generator=torch.Generator().manual_seed(0))
    _, weights, _ = decoder_layers(target)[0].mlp.gate(decoder_layers(target)[0].post_attention_layernorm(states[0]))
    assert float(weights.sum(dim=-1).max()) < 0.99
    scores = target.route(range(LAYERS), states).scores
    assert torch.allclose(scores.sum(dim=-1), torch.ones(LAYERS, 20), atol=1e-6)
    assert torch.allclose(scores[0], weights / weights.sum(dim=-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("draft", ["mistral", "qwen3", "llama"])
def test_dense_model_has_norms_and_no_experts(
    draft: str, mixtral_pair: Pair, qwen_pair: Pair, llama_draft: Path
) -> None:
    directory = {"mistral": mixtral_pair.good, "qwen3": qwen_pair.good, "llama": llama_draft}[draft]
    runner = ModelRunner(load_dense(Checkpoint.find(str(directory)), torch.float32))
    assert runner.inspection.moe == ()
    assert list(runner.inspection.norms) == [layer.post_attention_layernorm for layer in decoder_layers(runner)]
    assert runner.has_hidden_states
    assert runner.hidden_size == HIDDEN


def test_recurrent_model_is_inspected(recurrent_target: Path) -> None:
    target = target_of(recurrent_target)
    layers = decoder_layers(target)
    assert not target.can_rewind
    assert target.layer_depths == [0, 1, 2, 3]
    assert [moe_layer.experts for moe_layer in target.moe] == [layer.mlp.experts for layer in layers]
    assert [moe_layer.norm for moe_layer in target.moe] == [layer.post_attention_layernorm for layer in layers]
    assert target.gates_found


def test_meta_model_has_the_same_structure(pair: Pair) -> None:
    checkpoint = Checkpoint.find(str(pair.target))
    meta, loaded = (
        inspect_model(load_skeleton(checkpoint)),
        inspect_model(load_without_experts(checkpoint, torch.float32)),
    )
    assert all(p.is_meta for moe_layer in meta.moe for p in moe_layer.norm.parameters())  # type: ignore[union-attr]
    assert meta.depth_count == loaded.depth_count
    assert meta.kv_bytes_per_token == loaded.kv_bytes_per_token > 0
    for a, b in zip(meta.moe, loaded.moe, strict=True):
        assert (a.path, a.depth, a.top_k) == (b.path, b.depth, b.top_k)
        assert type(a.norm) is type(b.norm)
        assert a.router is not None


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
        ("qwen4_exp_text", {}),
    ],
)
def test_meta_model_may_look_at_values(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Positions and masks have no values on the meta device."""
    model = tiny_model(family, **settings)
    model.save_pretrained(tmp_path)
    skeleton = load_skeleton(Checkpoint.find(str(tmp_path)))
    found, expected = inspect_model(skeleton), inspect_model(model)
    assert [(one.path, one.depth, one.top_k) for one in found.moe] == [
        (one.path, one.depth, one.top_k) for one in expected.moe
    ]
    assert [one.router is None for one in found.moe] == [one.router is None for one in expected.moe]
    assert found.kv_bytes_per_token == expected.kv_bytes_per_token
    rope_types = [getattr(one, "rope_type", None) for one in skeleton.modules()]
    assert rope_types == [getattr(one, "rope_type", None) for one in model.modules()], "left as it was"


def test_inspection_removes_its_hooks(mixtral_pair: Pair) -> None:
    model = load_without_experts(Checkpoint.find(str(mixtral_pair.target)), torch.float32)
    inspect_model(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- gates and hidden states


@contextmanager
def collect(modules: list[nn.Module], *, inputs: bool) -> Iterator[list[Any]]:
    """Collect the inputs or the outputs of these modules, in order."""
    found: list[Any] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: found.append(args[0].clone()))
        if inputs
        else module.register_forward_hook(lambda _, args, output: found.append(output))
        for module in modules
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "partly_dense"])
def test_route_matches_the_routers_in_a_forward(
    family: str, mixtral_pair: Pair, qwen_pair: Pair, partly_dense_pair: Pair
) -> None:
    pair = {"mixtral": mixtral_pair, "qwen3_moe": qwen_pair, "partly_dense": partly_dense_pair}[family]
    with LLM(str(pair.target), None, progress=False, expert_memory="50%") as llm:
        target = llm.engine.target
        gates = [decoder_layers(target)[depth].mlp.gate for depth in target.layer_depths]
        residuals: dict[int, Tensor] = {}
        with collect(gates, inputs=False) as routed:
            target.forward(TOKENS, target.new_kv(20), 1, lambda depth, r: residuals.update({depth: r.clone()}))
        assert sorted(residuals) == list(range(target.depth_count))
        states = torch.stack([residuals[depth] for depth in target.layer_depths])
        layers = range(len(target.moe))
        routing = target.route(layers, states)
        assert routing.experts.shape == routing.scores.shape == (len(target.moe), len(TOKENS), TOP_K)
        for layer, output in enumerate(routed):
            assert torch.equal(routing.experts[layer], output[2].reshape(len(TOKENS), TOP_K))
            weights = output[1].reshape(len(TOKENS), TOP_K)
            assert torch.allclose(routing.scores[layer], weights / weights.sum(dim=-1, keepdim=True), atol=1e-6)
        assert torch.allclose(routing.scores.sum(dim=-1), torch.ones(len(target.moe), len(TOKENS)), atol=1e-6)
        # any subset of layers, in any order
        part = target.route([len(target.moe) - 1, 0], states[[-1, 0]])
        assert torch.equal(part.experts, routing.experts[[-1, 0]])


def test_gates_of_different_layers_select_different_experts(mixtral_pair: Pair) -> None:
    """Otherwise the test above would pass with a gate of the wrong layer or without the norm."""
    target = target_of(mixtral_pair.target)
    states = torch.randn(1, 200, HIDDEN, generator=torch.Generator().manual_seed(0)).expand(LAYERS, -1, -1)
    experts = target.route(range(LAYERS), states).experts
    assert not torch.equal(experts[0], experts[1])
    without_norm = torch.stack([moe_layer.router.router(states[0])[2] for moe_layer in target.moe])  # type: ignore[union-attr]
    assert not torch.equal(experts, without_norm)


@pytest.mark.parametrize("draft", ["mistral", "qwen3", "llama"])
def test_hidden_states_are_the_inputs_of_the_pre_ffn_norms(
    draft: str, mixtral_pair: Pair, qwen_pair: Pair, llama_draft: Path
) -> None:
    """Compares with a model that transformers loaded."""
    directory = {"mistral": mixtral_pair.good, "qwen3": qwen_pair.good, "llama": llama_draft}[draft]
    model = reference(directory)
    norms = [layer.post_attention_layernorm for layer in model.model.layers]
    with collect(norms, inputs=True) as given, torch.no_grad():
        model(torch.tensor([TOKENS]))
    runner = ModelRunner(load_dense(Checkpoint.find(str(directory)), torch.float32))
    found: list[tuple[int, Tensor]] = []
    runner.forward(TOKENS, runner.new_kv(20), 1, lambda depth, residual: found.append((depth, residual.clone())))
    assert [depth for depth, _ in found] == list(range(LAYERS))
    for (_, residual), wanted in zip(found, given, strict=True):
        assert torch.equal(residual, wanted[0])


def test_callback_is_only_used_in_its_own_forward(mixtral_pair: Pair) -> None:
    runner = ModelRunner(load_dense(Checkpoint.find(str(mixtral_pair.good)), torch.float32))
    depths: list[int] = []
    kv = runner.new_kv(20)
    runner.forward(TOKENS, kv, 1, lambda depth, _: depths.append(depth))
    runner.forward([1], kv, 1)
    assert depths == list(range(LAYERS))
    with pytest.raises(ZeroDivisionError):
        runner.forward([1], kv, 1, lambda depth, _: 1 // 0)  # type: ignore[arg-type, return-value]
    runner.model(torch.tensor([[1]]))
    assert depths == list(range(LAYERS))


def test_draft_predicts_the_target_upcycled_from_it(tmp_path: Path) -> None:
    """All experts equal the draft's MLP, so the draft's hidden states give exactly the target's routing."""
    draft, target = seeded(qwen3, 1), seeded(qwen3_moe, 2)
    upcycle(target, draft, noise=0.0)
    tokenizer = byte_tokenizer()
    directory = save(target, tmp_path / "target", tokenizer)
    runner = ModelRunner(load_dense(Checkpoint.find(str(save(draft, tmp_path / "draft", tokenizer))), torch.float32))
    states: list[Tensor] = []
    runner.forward(TOKENS, runner.new_kv(20), 1, lambda depth, residual: states.append(residual.clone()))
    with LLM(str(directory), None, progress=False, expert_memory="100%") as llm:
        gates = [layer.mlp.gate for layer in decoder_layers(llm.engine.target)]
        with collect(gates, inputs=False) as routed:
            llm.engine.target.forward(TOKENS, llm.engine.target.new_kv(20), 1)
        predicted = llm.engine.target.route(range(LAYERS), torch.stack(states)).experts
    actual = torch.stack([output[2].reshape(len(TOKENS), TOP_K) for output in routed])
    assert torch.equal(predicted.sort(dim=-1).values, actual.sort(dim=-1).values)


def test_callback_may_call_the_hooked_norms(mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False) as llm:
        target, depths = llm.engine.target, []

        def on_hidden_states(depth: int, residual: Tensor) -> None:
            depths.append(depth)
            for layer in range(len(target.moe)):
                target.route([layer], residual[None])

        target.forward(TOKENS, target.new_kv(20), 1, on_hidden_states)
        assert depths == list(range(target.depth_count))


def test_per_layer_inputs_are_not_taken_for_the_feed_forward() -> None:
    """Gemma 4 ends a layer with a projection of another width, after its feed-forward block."""
    config = tiny_config("gemma4_text")
    assert config.hidden_size_per_layer_input not in (0, config.hidden_size)
    for moe, name in ((True, "pre_feedforward_layernorm_2"), (False, "pre_feedforward_layernorm")):
        config.enable_moe_block = moe
        model = families()["gemma4_text"](config).eval()
        layers = model.model.layers
        assert list(inspect_model(model).norms) == [getattr(layer, name) for layer in layers]
