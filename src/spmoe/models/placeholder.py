"""A stand-in for the pair that will ship with the package: small, random weights, built at first use.

The target is upcycled from the draft (each expert is the draft's feed-forward plus noise), so that drafts are accepted
and routing is predictable, as they are in a trained pair. What it writes is noise.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from spmoe.config import home
from spmoe.errors import StoreError, reason
from spmoe.models.checkpoint import quiet

VERSION = "placeholder-1"
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def placeholder_pair() -> tuple[str, str]:
    """Directories of the target and the draft."""
    root = home() / VERSION
    try:
        if not root.is_dir():
            _build_at(root)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"cannot write the model that ships to {root} ({reason(error)}); free some space or point SPMOE_HOME at a "
            "writable directory"
        ) from error
    return str(root / "target"), str(root / "draft")


def _build_at(root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{VERSION}-", dir=root.parent))
    try:
        with quiet():
            _build(partial)
        partial.rename(root)
    except OSError:
        if not root.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sample_text() -> str:
    """Text to measure on when none is given: this package's own source, which no model was trained on."""
    package = Path(__file__).resolve().parent.parent
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))


def is_placeholder(model: str) -> bool:
    """Whether this is the stand-in, whose text means nothing."""
    return model == str(home() / VERSION / "target")


def _build(root: Path) -> None:
    tokenizer = _byte_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.1,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = MistralForCausalLM(MistralConfig(**shape))
        target = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=8, num_experts_per_tok=2))
        target.load_state_dict(draft.state_dict(), strict=False)
        for ours, theirs in zip(target.model.layers, draft.model.layers, strict=True):
            fused = torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight]).detach()
            for expert in range(8):
                for parameter, weight in (
                    (ours.mlp.experts.gate_up_proj, fused),
                    (ours.mlp.experts.down_proj, theirs.mlp.down_proj.weight.detach()),
                ):
                    parameter.data[expert] = weight + 0.05 * weight.std() * torch.randn_like(weight)
    for model, name in ((target, "target"), (draft, "draft")):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>"]
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", chat_template=_TEMPLATE)
