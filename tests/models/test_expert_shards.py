"""Experts read in place, from the checkpoint's own files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import Pair, byte_tokenizer, greedy_tokens, qwen3_moe, seeded
from checkpoints import save as save_checkpoint
from quantized_checkpoints import change, is_expert, is_linear, write_pair
from spmoe import LLM, SamplingParams
from spmoe.errors import CheckpointError, StoreError
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.shards import ShardedExperts
from spmoe.formats.dense import Dense
from spmoe.formats.expert import ExpertFormat
from spmoe.formats.int4 import Int4
from spmoe.models import expert_shards
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_formats import own_format
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.expert_shards import find_shards, open_shards
from spmoe.models.families import save, tiny_model
from spmoe.models.load import load_skeleton, store_spec
from spmoe.models.target import Target
from spmoe.types import ExpertKey

PROMPT = list(b"def f(x):")
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


class Model:
    """A checkpoint's skeleton and everything that `find_shards` takes."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32, *, packed: bool = False) -> None:
        self.checkpoint = Checkpoint.find(str(directory))
        target = Target(load_skeleton(self.checkpoint))
        self.model, self.paths = target.model, [layer.path for layer in target.moe]
        transposed: Any = target.moe[0].experts.is_transposed
        self.format = ExpertFormat(Dense(dtype), dtype, transposed)
        if packed:
            self.format, _ = own_format(self.checkpoint, self.model, self.paths, dtype)
        self.spec = store_spec(self.checkpoint, self.model, self.paths, dtype, self.format)

    def open(self) -> ShardedExperts | None:
        with ExpertReader(self.checkpoint, self.model, self.paths, self.format) as reader:
            return open_shards(self.checkpoint, self.model, self.paths, self.spec, self.format, reader.fill)

    def converted(self, key: ExpertKey) -> torch.Tensor:
        blob = torch.zeros(self.spec.layout.nbytes, dtype=torch.uint8)
        with ExpertReader(self.checkpoint, self.model, self.paths, self.format) as reader:
            reader.fill(key, self.spec.layout.views(blob))
        return blob


def read(shards: ShardedExperts, key: ExpertKey) -> torch.Tensor:
    blob = torch.zeros(shards.spec.layout.nbytes, dtype=torch.uint8)
    shards.read(key, memoryview(blob.numpy()))  # type: ignore[arg-type]
    return blob


def assert_blobs_are_converted_ones(model: Model) -> None:
    """Compare every expert that is read in place with its conversion."""
    shards = model.open()
    assert shards is not None
    for key in list(model.spec.keys()):
        assert torch.equal(read(shards, key), model.converted(key))
    shards.close()


@pytest.fixture
def directory(pair: Pair, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint that may be changed."""
    return Path(shutil.copytree(pair.target, tmp_path / "model"))


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny experts count as large."""
    monkeypatch.setattr(expert_shards, "_IN_PLACE_BYTES", 0)


def test_blobs_are_those_of_the_conversion(directory: Path) -> None:
    model = Model(directory)
    shards = model.open()
    assert shards is not None
    for key in list(model.spec.keys()):
        assert torch.equal(read(shards, key), model.converted(key))
    store = MemoryStore(model.spec)
    store.load(shards, lambda done, total: None)
    assert all(torch.equal(store.blob(key), model.converted(key)) for key in list(model.spec.keys()))
    shards.close()
    shards.close()


@pytest.mark.usefixtures("_large")
def test_no_expert_file_is_written(directory: Path, spmoe_home: Path) -> None:
    before = sorted(spmoe_home.rglob("*.safetensors"))
    with LLM(directory, device="cpu", num_speculative_tokens=0, expert_memory="30%", progress=False) as llm:
        tokens = llm.generate([PROMPT], GREEDY)[0].token_ids
    assert tokens == greedy_tokens(directory, PROMPT, 8)
    assert sorted(spmoe_home.rglob("*.safetensors")) == before


@pytest.mark.usefixtures("_large")
def test_checksums_on_request_need_an_expert_file(mixtral_pair: Pair, tmp_path: Path, spmoe_home: Path) -> None:
    directory = Path(shutil.copytree(mixtral_pair.target, tmp_path / "model"))
    before = {*spmoe_home.rglob("*.safetensors")}
    options = {"device": "cpu", "num_speculative_tokens": 0, "progress": False}
    with LLM(directory, verify_experts="sample", **options) as llm:
        llm.generate([PROMPT], GREEDY)
    assert len({*spmoe_home.rglob("*.safetensors")} - before) == 1


def test_another_dtype_needs_a_conversion(directory: Path) -> None:
    model = Model(directory, torch.bfloat16)
    assert find_shards(model.checkpoint, model.model, model.paths, model.format) is None


def test_rule_that_transposes_needs_a_conversion(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.models.expert_sources import ExpertSources

    convert = ExpertSources.convert
    monkeypatch.setattr(ExpertSources, "convert", lambda *args: convert(*args).mT.contiguous())
    model = Model(directory)
    assert find_shards(model.checkpoint, model.model, model.paths, model.format) is None


def test_wrong_index_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = expert_shards.find_shards
    swapped = lambda *args: {  # noqa: E731
        key: tuple(replace(piece, offset=pieces[-1].offset) for piece in pieces)
        for key, pieces in (found(*args) or {}).items()
    }
    monkeypatch.setattr(expert_shards, "find_shards", swapped)
    assert Model(directory).open() is None


def test_file_that_is_written_to_fails_the_read(directory: Path) -> None:
    shards = Model(directory).open()
    assert shards is not None
    (file,) = directory.glob("*.safetensors")
    os.utime(file, ns=(1, 1))
    with pytest.raises(StoreError, match="was written to while experts are read from it"):
        read(shards, ExpertKey(0, 0))
    os.truncate(file, 100)
    with pytest.raises(OSError, match=r"ends \d+ bytes early"):
        read(shards, ExpertKey(1, 1))
    shards.close()


def test_replaced_file_is_refused(directory: Path) -> None:
    model = Model(directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "aaa": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match="replaced by another file meanwhile"):
        model.open()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite_is_an_error(directory: Path, value: float) -> None:
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    name = max(name for name in tensors if "experts" in name)  # of the last expert: not the one that is compared
    tensors[name][-1, -1] = value
    save_file(tensors, file, {"format": "pt"})
    shards = Model(directory).open()
    assert shards is not None
    with pytest.raises(CheckpointError, match="not finite"):
        MemoryStore(shards.spec).load(shards, lambda done, total: None)
    shards.close()


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss", "phimoe", "qwen2_moe"])
def test_families_have_the_blobs_of_their_conversion(family: str, tmp_path: Path) -> None:
    save(tiny_model(family), tmp_path / family)
    model = Model(tmp_path / family)
    assert_blobs_are_converted_ones(model)


def test_index_is_found_from_headers(directory: Path) -> None:
    model = Model(directory)
    (file,) = directory.glob("*.safetensors")
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)
    index = find_shards(model.checkpoint, model.model, model.paths, model.format)
    assert index is not None
    assert {*index} == {*model.spec.keys()}
    used = sum(field.nbytes for field in model.spec.layout.fields)
    assert all(sum(piece.nbytes for piece in pieces) == used for pieces in index.values())


# ---- quantized experts


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a quantized checkpoint, once per kind."""
    root = tmp_path_factory.mktemp("quantized")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2, "num_experts": 4}
    save_checkpoint(seeded(qwen3_moe, 3, **sizes), root / "source", byte_tokenizer())
    save(tiny_model("gpt_oss", hidden_size=64), root / "gpt_oss")

    def write(kind: str) -> Path:
        transposed = kind == "mxfp4"
        source, select = (root / "gpt_oss", is_expert) if transposed else (root / "source", is_linear)
        if not (root / kind).exists():
            write_pair(source, root / kind, kind, select, transposed)
        return root / kind / "packed"

    return write


@pytest.mark.parametrize(
    "kind", ["ct-fp8-channel", "ct-int4", "ct-int8", "ct-int8-group", "ct-mxfp4", "fp4-deepseek", "fp8-block", "mxfp4"]
)
def test_blobs_of_quantized_experts_are_those_of_the_conversion(kind: str, quantized: Callable[[str], Path]) -> None:
    model = Model(quantized(kind), packed=True)
    assert model.format.is_packed
    assert_blobs_are_converted_ones(model)


@pytest.mark.parametrize("kind", ["awq", "gptq", "ct-int4-asym", "ct-int4-channel", "ct-fp8-tensor", "modelopt-nvfp4"])
def test_parts_that_are_computed_need_a_conversion(kind: str, quantized: Callable[[str], Path]) -> None:
    model = Model(quantized(kind), packed=True)
    assert model.format.is_packed
    assert find_shards(model.checkpoint, model.model, model.paths, model.format) is None


def test_experts_that_are_not_quantized_are_read_in_place(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """Only attention is quantized."""
    source = quantized("fp8-block").parents[1] / "source"
    pair = write_pair(source, tmp_path, "fp8-block", lambda name, tensor: is_linear(name, tensor) and "attn" in name)
    model = Model(pair.packed, packed=True)
    assert not model.format.is_packed
    assert model.checkpoint.matrices
    assert_blobs_are_converted_ones(model)


def test_quantized_experts_in_another_format_need_a_conversion(quantized: Callable[[str], Path]) -> None:
    model = Model(quantized("ct-int4"))
    for format in (model.format, replace(model.format, weight=Int4(64))):
        assert find_shards(model.checkpoint, model.model, model.paths, format) is None


@pytest.mark.usefixtures("_large")
def test_no_expert_file_of_quantized_experts_is_written(quantized: Callable[[str], Path], spmoe_home: Path) -> None:
    packed, before = quantized("ct-int4"), sorted(spmoe_home.rglob("*.safetensors"))
    with LLM(packed, device="cpu", num_speculative_tokens=0, expert_memory="30%", progress=False) as llm:
        tokens = llm.generate([PROMPT], GREEDY)[0].token_ids
    assert tokens == greedy_tokens(packed.parent / "dense", PROMPT, 8)
    assert sorted(spmoe_home.rglob("*.safetensors")) == before


@pytest.mark.parametrize(("kind", "name"), [("ct-int4", "3.up_proj.weight_scale"), ("mxfp4", ".down_proj_bias")])
def test_damaged_quantized_expert_is_an_error(
    kind: str, name: str, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(quantized(kind), tmp_path / "copy"))
    name, tensor = next((n, t) for n, t in load_file(copy / "model.safetensors").items() if n.endswith(name))
    tensor[-1, -1] = float("nan")
    shards = Model(change(copy, **{name: tensor}), packed=True).open()
    assert shards is not None  # the first experts of layers are not damaged
    with pytest.raises(CheckpointError, match="finite"):
        MemoryStore(shards.spec).load(shards, lambda done, total: None)
    shards.close()
