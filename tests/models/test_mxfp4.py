"""Experts stored in mxfp4, as gpt-oss is published: dequantized one by one as they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints import greedy
from spmoe import LLM, SamplingParams
from spmoe.errors import CheckpointError

PROMPT, COUNT = [5, 9, 3, 17], 16


@pytest.fixture(scope="module")
def mxfp4_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Write a tiny mxfp4 checkpoint, and generate with transformers from the same experts dequantized."""
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=128,
        pad_token_id=None,
        eos_token_id=63,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rng, tensors = torch.Generator().manual_seed(1), {}
    for index, layer in enumerate(model.model.layers):
        for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            blocks = torch.randint(256, (4, rows, columns // 32, 16), generator=rng, dtype=torch.uint8)
            scales = torch.randint(121, 126, (4, rows, columns // 32), generator=rng, dtype=torch.uint8)
            path = f"model.layers.{index}.mlp.experts.{name}"
            tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
            getattr(layer.mlp.experts, name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    expected = greedy(model, PROMPT, COUNT)
    directory = tmp_path_factory.mktemp("gpt-oss")
    model.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    dense = {name: t for name, t in stored.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    save_file(dense | tensors, directory / "model.safetensors", metadata={"format": "pt"})
    declared = json.loads((directory / "config.json").read_text())
    declared["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(declared))
    return directory, expected


def generate(directory: Path, **options: object) -> list[int]:
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    with LLM(str(directory), dtype="float32", device="cpu", progress=False, **options) as llm:
        return llm.generate(PROMPT, params)[0].token_ids


@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_tokens_equal_those_of_the_dequantized_model(mxfp4_checkpoint: tuple[Path, list[int]], memory: str) -> None:
    directory, expected = mxfp4_checkpoint
    assert len(set(expected)) > 3
    assert generate(directory, expert_memory=memory) == expected
    assert generate(directory, expert_memory=memory, draft="ngram") == expected


def test_wrong_scales_change_the_output(mxfp4_checkpoint: tuple[Path, list[int]], tmp_path: Path) -> None:
    directory, expected = mxfp4_checkpoint
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.experts.down_proj_scales"] += 3
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert generate(tmp_path) != expected


def test_missing_scales_are_rejected(mxfp4_checkpoint: tuple[Path, list[int]], tmp_path: Path) -> None:
    directory, _ = mxfp4_checkpoint
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.gate_up_proj_scales"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks .*gate_up_proj"):
        generate(tmp_path)
