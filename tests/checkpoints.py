"""Tiny checkpoints: built by transformers, saved as the hub has them, and run by transformers for comparison.

A *good* draft is the dense model that the target was upcycled from: same attention, embeddings, norms and output head,
each expert its feed-forward plus a little noise. A *random* draft shares nothing with the target but the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from spmoe.experts.store import BlobLayout
from spmoe.formats.base import weight_format
from spmoe.formats.expert import ExpertFormat
from spmoe.models.experts_seam import experts_modules
from spmoe.models.families import families

HIDDEN = 32
FEED_FORWARD = 48
LAYERS = 3
EXPERTS = {"mixtral": 4, "qwen3_moe": 8}
TOP_K = 2
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

NORM_SPREAD = 0.25  # weights of norms differ from 1, so that tests detect a missing norm


@dataclass(frozen=True)
class Pair:
    """Paths of a target, of the dense draft that it was upcycled from, and of a random draft."""

    target: Path
    good: Path
    random: Path


# ---- tokenizers


def byte_tokenizer(end: str = END, swap: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and an EOS token; `swap` exchanges two tokens."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), end]
    if swap:
        symbols[swap[0]], symbols[swap[1]] = symbols[swap[1]], symbols[swap[0]]
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, chat_template=CHAT_TEMPLATE)


VOCABULARY = len(byte_tokenizer())


# ---- configurations


def _shape(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - 1,
        "initializer_range": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
        **changes,
    }


def mistral(**changes: Any) -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**_shape(**{"sliding_window": None, **changes})))


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**_shape(**changes)))


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**_shape(**changes)))


def mixtral(**changes: Any) -> MixtralForCausalLM:
    changes = {
        "sliding_window": None,
        "num_local_experts": EXPERTS["mixtral"],
        "num_experts_per_tok": TOP_K,
        **changes,
    }
    return MixtralForCausalLM(MixtralConfig(**_shape(**changes)))


def qwen3_moe(**changes: Any) -> Qwen3MoeForCausalLM:
    changes = {
        "num_experts": EXPERTS["qwen3_moe"],
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": FEED_FORWARD,
        "norm_topk_prob": True,
        **changes,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_shape(**changes)))


def phimoe(**changes: Any) -> PhimoeForCausalLM:
    """Make a model of a family that computes its rotary embeddings on the host in every forward."""
    changes = {"num_local_experts": EXPERTS["mixtral"], "num_experts_per_tok": TOP_K, **changes}
    shape = _shape(**changes)
    return PhimoeForCausalLM(PhimoeConfig(**{name: value for name, value in shape.items() if name != "head_dim"}))


def longrope(switch: int) -> dict[str, Any]:
    """Return RoPE parameters that differ strongly before and after `switch` positions."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [5.0, 4.0, 3.0, 2.0],
        "short_mscale": 1.0,
        "long_mscale": 1.7,
        "factor": 2.0,
        "original_max_position_embeddings": switch,
    }


def require_family(family: str) -> None:
    """Skip a test of a family that this version of transformers does not have."""
    if family not in families():
        pytest.skip(f"this version of transformers has no {family}")


def require_longrope_reference() -> None:
    """Skip a test that compares phimoe's text behind the switch of LongRoPE with that of an older transformers.

    It drops the KV cache at the switch and does not read the text again.
    """
    if "next_sequence_length" not in PhimoeForCausalLM.prepare_inputs_for_generation.__code__.co_consts:
        pytest.skip("this version of transformers drops the text at the switch of LongRoPE")


def qwen3_next(**changes: Any) -> Qwen3NextForCausalLM:
    """Make a model with linear-attention layers, whose state cannot be rolled back by positions."""
    changes = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        **changes,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_shape(**changes)))


TARGETS: Mapping[str, Callable[..., Any]] = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}
DRAFTS: Mapping[str, Callable[..., Any]] = {"mistral": mistral, "llama": llama, "qwen3": qwen3}
DENSE_FAMILY = {"mixtral": "mistral", "qwen3_moe": "qwen3"}  # equal to the target but for the experts


# ---- models and checkpoints


def seeded(make: Callable[..., Any], seed: int, **changes: Any) -> Any:
    """Make a model with weights that depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(**changes)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("norm.weight"):
                parameter.data += NORM_SPREAD * torch.randn_like(parameter)
        return model.eval()


def upcycle(target: Any, draft: Any, noise: float, seed: int = 0) -> None:
    """Copy the draft's weights to the target; its experts become the draft's feed-forward plus noise."""
    generator = torch.Generator().manual_seed(seed)
    own = target.state_dict()
    shared = {name: w for name, w in draft.state_dict().items() if name in own and own[name].shape == w.shape}
    target.load_state_dict(shared, strict=False)
    for ours, theirs in zip(target.model.layers, draft.model.layers, strict=True):
        if not hasattr(ours.mlp, "experts"):
            continue
        gate_up = torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight]).detach()
        down = theirs.mlp.down_proj.weight.detach()
        experts = ours.mlp.experts
        for expert in range(experts.gate_up_proj.shape[0]):
            for parameter, weight in ((experts.gate_up_proj, gate_up), (experts.down_proj, down)):
                parameter.data[expert] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)


def save(
    model: Any, directory: Path, tokenizer: PreTrainedTokenizerFast | None = None, layout: str = "per-expert"
) -> Path:
    """Write a checkpoint with the layout `per-expert` (as on the hub), `fused` or `sharded`."""
    options = {
        "per-expert": {},
        "fused": {"save_original_format": False},
        "sharded": {"max_shard_size": "40KB"},
    }[layout]
    model.save_pretrained(directory, **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


def save_pair(
    directory: Path, family: str, *, noise: float = 0.15, seed: int = 0, target: Any = None, draft: Any = None
) -> Pair:
    """Write a target of this family with a good and a random draft."""
    tokenizer = byte_tokenizer()
    dense = DRAFTS[DENSE_FAMILY[family]]
    draft = draft or seeded(dense, seed)
    target = target or seeded(TARGETS[family], seed + 1)
    upcycle(target, draft, noise, seed)
    return Pair(
        save(target, directory / "target", tokenizer),
        save(draft, directory / "good", tokenizer),
        save(seeded(dense, seed + 2), directory / "random", tokenizer),
    )


def expert_count(directory: Path) -> int:
    """Return the number of experts per layer of a checkpoint that `save_pair` wrote."""
    return EXPERTS[json.loads((directory / "config.json").read_text())["model_type"]]


# ---- reference results of transformers


def reference(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Load a checkpoint with transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options).eval()


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return exactly `count` tokens of transformers' greedy search; EOS does not end it."""
    config = model.generation_config
    eos, config.eos_token_id = config.eos_token_id, None
    try:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
    finally:
        config.eos_token_id = eos
    return output[0, len(prompt) :].tolist()


def greedy_tokens(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens of `greedy` for a checkpoint in float32; the same request is computed once per process."""
    files = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(directory.iterdir()))
    return list(_greedy_tokens(directory, files, tuple(prompt), count))


@cache
def _greedy_tokens(
    directory: Path, files: tuple[tuple[str, int], ...], prompt: tuple[int, ...], count: int
) -> list[int]:
    return greedy(reference(directory), prompt, count)


def submodules_with(model: nn.Module, attribute: str) -> list[Any]:
    """Return the modules that have this attribute, in order."""
    return [module for module in model.modules() if hasattr(module, attribute)]


def expert_tensors(model: Any) -> list[dict[str, Tensor]]:
    """Return the fused expert parameters of each MoE layer of a transformers model."""
    return [
        {"gate_up_proj": m.gate_up_proj.detach(), "down_proj": m.down_proj.detach()}
        for m in submodules_with(model, "gate_up_proj")
    ]


# ---- engines


def memory_for(slots: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of expert memory that hold exactly this many of the experts above."""
    shapes = {"gate_up_proj": (2 * FEED_FORWARD, HIDDEN), "down_proj": (HIDDEN, FEED_FORWARD)}
    return slots * BlobLayout.of(shapes, dtype).nbytes


def dense_model(directory: Path, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a checkpoint with transformers and replace every expert by its dequantized conversion."""
    model = reference(directory, dtype)
    for _, module in experts_modules(model):
        format = ExpertFormat(weight_format(name), dtype, bool(module.is_transposed))
        parameters = dict(module.named_parameters(recurse=False))
        for expert in range(len(next(iter(parameters.values())))):
            found = format.round_trip({key: tensor.data[expert] for key, tensor in parameters.items()})
            for key, tensor in found.items():
                parameters[key].data[expert] = tensor
    return model
