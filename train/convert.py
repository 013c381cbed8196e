"""Conversion between the models for training and transformers: Mistral, Mixtral or, with a shared expert, Qwen2-MoE."""

from __future__ import annotations

from pathlib import Path

import torch
from network import Decoder, Shape
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

END_OF_TEXT = 0


def to_transformers(model: Decoder) -> PreTrainedModel:
    """Return the equivalent transformers model, in bfloat16."""
    s = model.shape
    common = {
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": s.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
        "dtype": "bfloat16",
    }
    if not s.experts:
        out = MistralForCausalLM(MistralConfig(**common, intermediate_size=s.ffn, sliding_window=None))
    elif s.shared:
        config = Qwen2MoeConfig(
            **common,
            intermediate_size=s.shared,
            moe_intermediate_size=s.ffn,
            shared_expert_intermediate_size=s.shared,
            num_experts=s.experts,
            num_experts_per_tok=s.top_k,
            norm_topk_prob=s.renormalise,
            decoder_sparse_step=1,
            use_sliding_window=False,
        )
        out = Qwen2MoeForCausalLM(config)
    else:
        config = MixtralConfig(
            **common,
            intermediate_size=s.ffn,
            num_local_experts=s.experts,
            num_experts_per_tok=s.top_k,
            sliding_window=None,
        )
        out = MixtralForCausalLM(config)
    state = {name: torch.cat(views, dim=1) if len(views) > 1 else views[0] for name, views in _views(model).items()}
    missing, unexpected = out.load_state_dict(state, strict=False)
    if unexpected or any(name != "lm_head.weight" for name in missing):
        raise SystemExit(f"the architectures do not match: missing {missing}, unexpected {unexpected}")
    out.tie_weights()
    out.generation_config = GenerationConfig(eos_token_id=END_OF_TEXT, pad_token_id=END_OF_TEXT, do_sample=False)
    return out.to(torch.bfloat16).eval()


def from_transformers(directory: Path) -> Decoder:
    """Read a checkpoint that `export.py` wrote, in float32."""
    if not (directory / "config.json").is_file():
        raise SystemExit(f"{directory} is neither a stage nor a checkpoint: there is no {directory / 'config.json'}")
    source = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = Decoder(_shape(source.config))
    state = source.state_dict()
    for name, views in _views(model).items():
        parts = state.pop(name).chunk(len(views), dim=1) if len(views) > 1 else [state.pop(name)]
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
    if unknown := state.keys() - {"lm_head.weight"}:
        raise SystemExit(f"{directory} has tensors that the models for training lack: {', '.join(sorted(unknown))}")
    return model


def _shape(config: PretrainedConfig) -> Shape:
    """Return the sizes that a checkpoint's configuration names."""
    common = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_theta": config.rope_parameters["rope_theta"],
        "eps": config.rms_norm_eps,
    }
    if config.model_type == "mistral":
        return Shape(**common, ffn=config.intermediate_size)
    if config.model_type == "mixtral":
        return Shape(
            **common, ffn=config.intermediate_size, experts=config.num_local_experts, top_k=config.num_experts_per_tok
        )
    if config.model_type == "qwen2_moe":
        return Shape(
            **common,
            ffn=config.moe_intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            shared=config.shared_expert_intermediate_size,
            renormalise=config.norm_topk_prob,
            attention_bias=config.qkv_bias,
        )
    raise SystemExit(f"cannot read a checkpoint of type {config.model_type}; use mistral, mixtral or qwen2_moe")


def _views(model: Decoder) -> dict[str, list[Tensor]]:
    """Return views of a model's parameters by their names in transformers; several make up one tensor, along dim 1."""
    s = model.shape
    views = {"model.embed_tokens.weight": [model.embed.weight.data], "model.norm.weight": [model.norm.weight.data]}
    for index, layer in enumerate(model.layers):
        at = f"model.layers.{index}"
        for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "o_proj")):
            for kind, value in getattr(layer.attention, ours).named_parameters():
                views[f"{at}.self_attn.{theirs}.{kind}"] = [value.data]
        views[f"{at}.input_layernorm.weight"] = [layer.norm1.weight.data]
        views[f"{at}.post_attention_layernorm.weight"] = [layer.norm2.weight.data]
        gate, up, down = layer.ffn.gate.data, layer.ffn.up.data, layer.ffn.down.data.transpose(1, 2)
        if not s.experts:
            for name, value in (("gate", gate), ("up", up), ("down", down)):
                views[f"{at}.mlp.{name}_proj.weight"] = [value[0]]
            continue
        views[f"{at}.mlp.gate.weight"] = [layer.ffn.router.data]
        views[f"{at}.mlp.experts.gate_up_proj"] = [gate, up]
        views[f"{at}.mlp.experts.down_proj"] = [down]
        if s.shared:
            views[f"{at}.mlp.shared_expert.gate_proj.weight"] = [layer.ffn.shared_gate.data[0]]
            views[f"{at}.mlp.shared_expert.up_proj.weight"] = [layer.ffn.shared_up.data[0]]
            views[f"{at}.mlp.shared_expert.down_proj.weight"] = [layer.ffn.shared_down.data[0].T]
            views[f"{at}.mlp.shared_expert_gate.weight"] = [layer.ffn.shared_weight.data]
    return views
