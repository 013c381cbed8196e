"""Checkpoints that change while they are used, lead out of their directory or choose code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import Pair, byte_tokenizer, greedy, greedy_tokens, mixtral, qwen3_moe, save, seeded
from spmoe import LLM, SamplingParams
from spmoe.errors import CheckpointError, StoreError
from spmoe.experts.store import ExpertFile
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.load import expert_file_path, load_skeleton, load_without_experts
from spmoe.models.loaded import compare_with_checkpoint
from spmoe.models.target import Target
from spmoe.models.tensors import CheckpointTensors
from spmoe.system.headers import INDEX
from spmoe.system.origin import converter
from spmoe.types import ExpertKey

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = [1, 2, 3]


@pytest.fixture
def own_checkpoint(tmp_path: Path, mixtral_pair: Pair) -> Path:
    return shutil.copytree(mixtral_pair.target, tmp_path / "own")


def tokens_of(directory: Path, **options: Any) -> list[int]:
    with LLM(str(directory), None, progress=False, **options) as llm:
        return llm.generate(PROMPT, GREEDY)[0].token_ids


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- weights that are replaced


def test_weights_of_the_same_size_and_time_are_converted_again(
    own_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = own_checkpoint / "model.safetensors"
    before = weights.stat()
    first = tokens_of(own_checkpoint)
    other = seeded(mixtral, 77)
    save(other, own_checkpoint, byte_tokenizer())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    capfd.readouterr()
    with LLM(str(own_checkpoint), None, progress=True) as llm:
        found = llm.generate(PROMPT, GREEDY)[0].token_ids
    assert found == greedy(other, PROMPT, 6) != first
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "of experts to" in line]
    assert "(again: the checkpoint has changed)" in line


def test_experts_converted_by_another_version_of_transformers_are_converted_again(
    own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = tokens_of(own_checkpoint)
    used, newer = converter(), "transformers 99.0"
    monkeypatch.setattr("spmoe.models.load.converter", lambda: newer)
    for announced in (True, False):
        with LLM(str(own_checkpoint), None, progress=True) as llm:
            assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
        assert (f"(again: it was made with {used}, and this is {newer})" in capfd.readouterr().err) == announced


def test_file_is_compared_with_its_checkpoint(own_checkpoint: Path) -> None:
    tokens_of(own_checkpoint)
    file = ExpertFile.open(expert_file_path(Checkpoint.find(str(own_checkpoint)), torch.float32))
    try:
        assert compare_with_checkpoint(file, lambda done, total: None) == []
        tensors = load_file(own_checkpoint / "model.safetensors")
        tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"].view(-1)[7] += 1.0
        save_file(tensors, own_checkpoint / "model.safetensors", {"format": "pt"})
        assert compare_with_checkpoint(file, lambda done, total: None) == [ExpertKey(1, 2)]
    finally:
        file.close()


def test_experts_that_change_on_disk_are_noticed_at_the_next_read(own_checkpoint: Path) -> None:
    expected = tokens_of(own_checkpoint)
    path = expert_file_path(Checkpoint.find(str(own_checkpoint)), torch.float32)
    with LLM(str(own_checkpoint), None, progress=False, expert_memory="25%", verify_experts="always") as llm:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
        data = bytearray(path.read_bytes())
        for offset in range(8192, len(data), 256):  # of every expert
            data[offset] ^= 4
        path.write_bytes(data)
        with pytest.raises(StoreError, match=r"expert \d of layer \d in .* fails its checksum; the file was deleted"):
            llm.generate([4, 5, 6], GREEDY)
    assert not path.exists()
    assert tokens_of(own_checkpoint) == expected


# ---- files that change while they are read


def test_file_truncated_during_the_conversion_is_one_error(own_checkpoint: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    checkpoint = Checkpoint.find(str(own_checkpoint))
    target = Target(load_skeleton(checkpoint))
    shapes = target.model.get_submodule(target.moe[0].path).spmoe_shapes
    views = {name: torch.empty(shape[1:]) for name, shape in shapes.items()}
    with ExpertReader(checkpoint, target.model, [moe.path for moe in target.moe]) as reader:
        reader.fill(ExpertKey(0, 0), views)
        os.truncate(own_checkpoint / "model.safetensors", 20_000)
        with pytest.raises(
            CheckpointError, match=r"cannot be read from .*model\.safetensors \(the file ends \d+ bytes"
        ):
            reader.fill(ExpertKey(2, 3), views)


def test_file_truncated_while_dense_weights_load_is_one_error(
    own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CheckpointTensors.read

    def truncate_and_read(self: CheckpointTensors, name: str, expert: int | None = None) -> torch.Tensor:
        tensor = read(self, name, expert)
        os.truncate(own_checkpoint / "model.safetensors", 20_000)
        return tensor

    monkeypatch.setattr(CheckpointTensors, "read", truncate_and_read)
    with pytest.raises(CheckpointError, match=r"cannot be read from .* truncated meanwhile\); download it again"):
        load_without_experts(Checkpoint.find(str(own_checkpoint)), torch.float32)


def test_file_replaced_between_check_and_load_is_one_error(own_checkpoint: Path) -> None:
    checkpoint = Checkpoint.find(str(own_checkpoint))
    save(seeded(mixtral, 7, vocab_size=300), own_checkpoint)
    with pytest.raises(CheckpointError, match="replaced by another file meanwhile"):
        load_without_experts(checkpoint, torch.float32)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_closed(own_checkpoint: Path) -> None:
    before = open_files()
    with CheckpointTensors(Checkpoint.find(str(own_checkpoint))) as tensors:
        for name in tensors.names:
            tensors.read(name)
        assert open_files() == before + 1
    assert open_files() == before


def test_every_dtype_is_read_as_safetensors_reads_it(tmp_path: Path, own_checkpoint: Path) -> None:
    bits = torch.arange(64, dtype=torch.uint8).view(4, 16)
    names = ["uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "float16", "bfloat16"]
    names += ["int32", "float32", "int64", "float64"]
    tensors = {name: bits.clone().view(getattr(torch, name)) for name in names}
    tensors["bool"] = bits % 2 == 0
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 5)}
    save_file(tensors, own_checkpoint / "model.safetensors", {"format": "pt"})
    with CheckpointTensors(Checkpoint.find(str(own_checkpoint))) as reader:
        for name, tensor in tensors.items():
            found = reader.read(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else found == tensor
        found = reader.read("int16", 2)
        assert torch.equal(found, tensors["int16"][2:3])


# ---- names and keys that a checkpoint must not choose


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/tmp/elsewhere.safetensors"])
def test_index_that_leads_out_of_the_directory_is_refused(own_checkpoint: Path, name: str) -> None:
    weights = own_checkpoint / "model.safetensors"
    shutil.move(weights, own_checkpoint.parent / "elsewhere.safetensors")
    tensors = load_file(own_checkpoint.parent / "elsewhere.safetensors")
    (own_checkpoint / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with pytest.raises(
        CheckpointError, match=r"names '.*elsewhere\.safetensors', which is no file inside its directory"
    ):
        Checkpoint.find(str(own_checkpoint))


def test_snapshot_of_links_is_loaded(own_checkpoint: Path, mixtral_pair: Pair) -> None:
    blobs = own_checkpoint.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(own_checkpoint.iterdir())):
        shutil.move(path, blobs / str(number))
        path.symlink_to(f"../blobs/{number}")
    assert tokens_of(own_checkpoint) == greedy_tokens(mixtral_pair.target, PROMPT, 6)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["eager", "acme/kernel-from-the-hub", "flash_attention_2", {"": "eager"}])
def test_attention_of_config_json_is_not_honoured(own_checkpoint: Path, key: str, value: object) -> None:
    edit_json(own_checkpoint / "config.json", **{key: value})
    model = load_without_experts(Checkpoint.find(str(own_checkpoint)), torch.float32)
    assert model.config._attn_implementation == "sdpa"


def test_keys_that_choose_code_have_no_effect(own_checkpoint: Path, mixtral_pair: Pair) -> None:
    edit_json(
        own_checkpoint / "config.json",
        experts_implementation="acme/kernel-from-the-hub",
        _experts_implementation="grouped_mm",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        return_dict=False,
        output_attentions=True,
        output_hidden_states=True,
        configuration_files=["config.999.json"],
    )
    assert tokens_of(own_checkpoint) == greedy_tokens(mixtral_pair.target, PROMPT, 6)


def test_code_keys_of_nested_configurations_are_left_out(tmp_path: Path) -> None:
    text = {**qwen3_moe().config.to_dict(), "model_type": "qwen3_vl_moe_text", "_attn_implementation": "eager"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    nested = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"attn_implementation": "eager"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = Checkpoint.find(str(tmp_path)).config
    for one in (config, config.text_config, config.vision_config):
        assert one._attn_implementation is None
        assert one.name_or_path in ("", str(tmp_path))
    assert config.text_config.hidden_size == text["hidden_size"]


def test_deeply_nested_config_is_refused(own_checkpoint: Path) -> None:
    (own_checkpoint / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        Checkpoint.find(str(own_checkpoint))


# ---- a single expert per layer


@pytest.mark.parametrize("layout", ["per-expert", "fused"])
@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_one_expert_per_layer(tmp_path: Path, make: Any, layout: str) -> None:
    name = "num_local_experts" if make is mixtral else "num_experts"
    model = seeded(make, 3, **{name: 1, "num_experts_per_tok": 1})
    directory = save(model, tmp_path / "target", byte_tokenizer(), layout)
    assert tokens_of(directory, expert_memory="50%") == greedy_tokens(directory, PROMPT, 6)


def test_single_remaining_expert_is_counted_in_the_error(own_checkpoint: Path) -> None:
    tensors = load_file(own_checkpoint / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".layers.1." not in n or not any(f".experts.{e}." in n for e in "123")}
    save_file(kept, own_checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has 1 expert for model\.layers\.1\..* but config\.json says 4"):
        tokens_of(own_checkpoint)
