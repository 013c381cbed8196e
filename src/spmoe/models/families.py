"""Every MoE architecture of the installed transformers, each as a tiny model with random weights.

The list comes from transformers' registries. A tiny configuration is the family's default with small sizes, chosen by
rules for each setting's name, and with one layer of each kind that the default has.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spmoe.errors import UsageError
from spmoe.models.checkpoint import quiet
from spmoe.models.experts_seam import experts_modules

__all__ = ["families", "reference_tokens", "save", "tiny_config", "tiny_draft", "tiny_model", "transformers_version"]

HIDDEN = 32
VOCABULARY = 96
WINDOW = 8  # shorter than the generated text, so that a rollback reaches beyond it
_MIN_LAYERS = 3

# tiny value of each setting that is a number in the default
_SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "max_position_embeddings": 256,
    "model_max_length": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "num_nextn_predict_layers": 0,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    # indexed attention
    "index_n_heads": 32,  # with few heads, several tokens can score 0, and such ties are broken at random
    "index_head_dim": 16,
    "index_topk": 16,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "n_groups": 2,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "block_size": 16,
}
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_REPLACE_NONE = {
    **dict.fromkeys(_NUM_EXPERTS, 8),
    **dict.fromkeys(_TOP_K, 2),
    "moe_intermediate_size": 24,
    "head_dim": 8,
}

_SLIDING_WINDOW = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}

# settings that no rule covers
_OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        **{"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8},
        **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gpt_oss": {"intermediate_size": 32},  # mxfp4 has blocks of 32 inputs
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 32},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "laguna": {"num_attention_heads_per_layer": [4, 4, 4], **_SLIDING_WINDOW},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mellum": _SLIDING_WINDOW,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 4,  # one per attention head
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "rotary_dim": 8,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "zaya": {
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": WINDOW,
    },
}


def families() -> dict[str, Any]:
    """Return the causal language models with replaceable experts of the installed transformers, by model type."""
    found: dict[str, Any] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        module = model_type_to_module_name(model_type)
        spec = importlib.util.find_spec(f"transformers.models.{module}")
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin).parent / f"modeling_{module}.py"
        if not source.is_file() or "use_experts_implementation" not in source.read_text():
            continue
        config_class: Any = CONFIG_MAPPING[model_type]
        if "text_config" in getattr(config_class, "sub_configs", {}):
            continue  # the text model is listed under its own model type
        found[model_type] = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return found


def tiny_config(model_type: str, **settings: Any) -> Any:
    """Return the family's default configuration with small sizes; `settings` replace any of them."""
    config_class: Any = CONFIG_MAPPING[model_type]
    default = config_class()
    defaults = default.to_dict()
    changes = _layers(defaults)
    for name, value in defaults.items():
        if name not in changes and (size := _size(name, value)) is not None:
            changes[name] = size
    if defaults.get("num_key_value_heads") == defaults.get("num_attention_heads"):
        changes["num_key_value_heads"] = changes["num_attention_heads"]  # latent attention needs equal numbers
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return config_class(**{**changes, **tokens, **_OVERRIDES.get(model_type, {}), "dtype": "float32", **settings})


def _size(name: str, value: Any) -> int | None:
    """Return the tiny value of a setting; None keeps the default."""
    if value is None:  # a feature that is off stays off, except experts
        return _REPLACE_NONE.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return None
    if name in _NUM_EXPERTS:
        return 8
    if name in _TOP_K:
        return min(2, value)
    if name.endswith("intermediate_size"):
        return 24 if "shared" in name or "moe" in name else 40
    return _SIZES.get(name)


def _layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keep one layer of each kind; a kind is a combination of the settings that are lists with one entry per layer."""
    count = settings.get("num_hidden_layers")
    if not isinstance(count, int):
        return {}
    lists = {
        name: value
        for name, value in settings.items()
        if isinstance(value, (list, tuple)) and len(value) == count and count > 2
    }
    if not lists:
        return {"num_hidden_layers": _MIN_LAYERS}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))
    while len(kinds) < _MIN_LAYERS:
        kinds.append(kinds[-1])
    values = zip(*kinds, strict=True)
    return {"num_hidden_layers": len(kinds), **{n: list(v) for n, v in zip(lists, values, strict=True)}}


def tiny_model(model_type: str, seed: int = 0, **settings: Any) -> Any:
    """Build a tiny model of a family, with random weights that depend only on the seed and all affect the output.

    `settings` replace those of its tiny configuration.
    """
    try:
        cls = families()[model_type]
    except KeyError as error:
        raise UsageError(f"{model_type} is not an MoE family whose experts transformers lets spmoe replace") from error
    model = _random(cls, tiny_config(model_type, **settings), seed)
    if not any(True for _ in experts_modules(model)):
        raise UsageError(f"the tiny {model_type} model has no experts, since its default configuration has none")
    return model


def tiny_draft(hidden: int, vocabulary: int, seed: int = 1) -> Any:
    """Build a dense draft with random weights, of the target's hidden size and vocabulary."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    return _random(LlamaForCausalLM, config, seed)


def _random(cls: Any, config: Any, seed: int) -> Any:
    """Build a model with random weights, at a scale where tokens, positions and experts all affect the output."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = cls(config).eval()
        biases = ((n, b) for n, b in model.named_buffers() if "bias" in n)  # of routers; other buffers are derived
        tensors = [*model.named_parameters(), *biases]
        for name, tensor in tensors:
            if not tensor.is_floating_point():
                continue
            if tensor.ndim >= 2:
                tensor.normal_(std=0.3 if "embed" in name else 1.4 / tensor.shape[-1] ** 0.5)
            else:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model


def save(model: Any, directory: Path) -> None:
    """Save a model as a checkpoint directory."""
    with quiet():
        model.save_pretrained(directory)


def reference_tokens(directory: Path, prompt: Sequence[int], count: int, device: str = "cpu") -> list[int]:
    """Generate `count` tokens greedily with transformers itself, ignoring end-of-text tokens."""
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
        model.set_experts_implementation("eager")  # the other implementations reject float32 on some devices
        model.generation_config.eos_token_id = None
        ids = torch.tensor([list(prompt)], device=device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
