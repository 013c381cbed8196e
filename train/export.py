"""Write trained stages as Hugging Face checkpoints: `python train/export.py --out DIR`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from network import Decoder, Shape
from torch import Tensor
from train import load
from transformers import (
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

END_OF_TEXT = 0


def to_transformers(model: Decoder) -> PreTrainedModel:
    """Convert to the equivalent transformers model: Mistral, Mixtral or, with a shared expert, Qwen2-MoE."""
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
    missing, unexpected = out.load_state_dict(_state(model, s), strict=False)
    if unexpected or any(name != "lm_head.weight" for name in missing):
        raise SystemExit(f"the architectures do not match: missing {missing}, unexpected {unexpected}")
    out.tie_weights()
    out.generation_config = GenerationConfig(eos_token_id=END_OF_TEXT, pad_token_id=END_OF_TEXT, do_sample=False)
    return out.to(torch.bfloat16).eval()


def _state(model: Decoder, s: Shape) -> dict[str, Tensor]:
    state = {"model.embed_tokens.weight": model.embed.weight.data, "model.norm.weight": model.norm.weight.data}
    for index, layer in enumerate(model.layers):
        at = f"model.layers.{index}"
        for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "o_proj")):
            for kind, value in getattr(layer.attention, ours).named_parameters():
                state[f"{at}.self_attn.{theirs}.{kind}"] = value.data
        state[f"{at}.input_layernorm.weight"] = layer.norm1.weight.data
        state[f"{at}.post_attention_layernorm.weight"] = layer.norm2.weight.data
        gate, up, down = layer.ffn.gate.data, layer.ffn.up.data, layer.ffn.down.data.transpose(1, 2)
        if not s.experts:
            for name, value in (("gate", gate), ("up", up), ("down", down)):
                state[f"{at}.mlp.{name}_proj.weight"] = value[0]
            continue
        state[f"{at}.mlp.gate.weight"] = layer.ffn.router.data
        state[f"{at}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        state[f"{at}.mlp.experts.down_proj"] = down
        if s.shared:
            state[f"{at}.mlp.shared_expert.gate_proj.weight"] = layer.ffn.shared_gate.data[0]
            state[f"{at}.mlp.shared_expert.up_proj.weight"] = layer.ffn.shared_up.data[0]
            state[f"{at}.mlp.shared_expert.down_proj.weight"] = layer.ffn.shared_down.data[0].T
            state[f"{at}.mlp.shared_expert_gate.weight"] = layer.ffn.shared_weight.data
    return {name: value.contiguous() for name, value in state.items()}


def main() -> None:
    """Export every stage that is complete, with the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "runs")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent / "data" / "tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name in args.stages:
        to_transformers(load(name, args.runs, "cpu")).save_pretrained(args.out / name)
        for file in args.tokenizer.iterdir():
            shutil.copy(file, args.out / name)


if __name__ == "__main__":
    main()
