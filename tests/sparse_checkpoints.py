"""Checkpoints of real sizes that occupy no disk: configuration files, and sparse safetensors files with headers."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, VOCABULARY, KV = 4096, 14336, 32, 8, 32000, 1024  # of Mixtral-8x7B
SHARD_BYTES = 4_900_000_000
_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def mixtral_8x7b(place: Path) -> Path:
    """Write a checkpoint with the configuration and the tensors of Mixtral-8x7B."""
    tensors = _common_tensors()
    for layer in range(LAYERS):
        moe = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{moe}.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("w1", (INTERMEDIATE, HIDDEN)), ("w2", (HIDDEN, INTERMEDIATE))):
                tensors[f"{moe}.experts.{expert}.{name}.weight"] = shape
            tensors[f"{moe}.experts.{expert}.w3.weight"] = (INTERMEDIATE, HIDDEN)
    config = {**_SHAPE, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return _write(place, {**config, "architectures": ["MixtralForCausalLM"]}, tensors)


def mistral_7b(place: Path) -> Path:
    """Write a checkpoint with the configuration and the tensors of Mistral-7B."""
    tensors = _common_tensors()
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate_proj.weight"] = tensors[f"{mlp}.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        tensors[f"{mlp}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    config = {**_SHAPE, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return _write(place, config, tensors)


def _common_tensors() -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for name, outputs in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN)):
            tensors[f"{path}.self_attn.{name}_proj.weight"] = (outputs, HIDDEN)
        tensors[f"{path}.input_layernorm.weight"] = tensors[f"{path}.post_attention_layernorm.weight"] = (HIDDEN,)
    return tensors


def _write(place: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        if end + size > SHARD_BYTES:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = json.dumps(shard).encode()
        length = 8 + len(header) + max(entry["data_offsets"][1] for entry in shard.values())
        with (place / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(header)) + header)
            opened.truncate(length)  # a hole: it occupies no disk
        weight_map |= dict.fromkeys(shard, file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return place
