"""Tiny checkpoints for the command-line tests: an MoE pair, a dense target, and functions to damage copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, CONTEXT = 3, 4, 2, 32, 48, 512
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"  # its name in the checkpoint
DENSE = "model.layers.1.self_attn.q_proj.weight"
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "initializer_range": 0.3,
    "dtype": "float32",
}


def byte_tokenizer(first: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and an end-of-text token; `first` replaces token 0."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>"]
    if first is not None:
        symbols[0] = first
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", chat_template=_TEMPLATE)


def build_all(root: Path) -> None:
    """Write `target`, `draft`, `sharded`, `dense` and `padded` (a draft with a padded vocabulary) under `root`."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    tokenizer = byte_tokenizer()
    shape = {**_SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        mixtral = MixtralForCausalLM(
            MixtralConfig(**shape, sliding_window=None, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
        )
        _save(mixtral, tokenizer, root / "target")
        _save(mixtral, tokenizer, root / "sharded", max_shard_size="40KB")
        _save(MistralForCausalLM(MistralConfig(**shape, sliding_window=None)), tokenizer, root / "draft")
        _save(LlamaForCausalLM(LlamaConfig(**shape)), tokenizer, root / "dense")
        padded = {**shape, "vocab_size": len(tokenizer) + 63}
        _save(MistralForCausalLM(MistralConfig(**padded, sliding_window=None)), tokenizer, root / "padded")
    if bars:
        transformers_logging.enable_progress_bar()


def copy_of(source: Path, place: Path) -> Path:
    """Copy a checkpoint into `place`, to be damaged there."""
    return Path(shutil.copytree(source, place / source.name))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to the tensors of a checkpoint that is one file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def _save(model: Any, tokenizer: PreTrainedTokenizerFast, directory: Path, **options: Any) -> None:
    model.save_pretrained(directory, **options)
    tokenizer.save_pretrained(directory)
