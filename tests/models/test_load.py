"""Loading: every checkpoint layout gives the same expert file, and a load never holds all experts in memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import (
    EXPERTS,
    LAYERS,
    TARGETS,
    Pair,
    byte_tokenizer,
    expert_tensors,
    greedy,
    mixtral,
    reference,
    save,
    seeded,
)
from spmoe import LLM, SamplingParams
from spmoe.errors import CheckpointError, UsageError
from spmoe.experts.store import ExpertFile, ensure_expert_file
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.experts_seam import experts_modules
from spmoe.models.families import reference_tokens, tiny_model
from spmoe.models.families import save as save_family
from spmoe.models.load import expert_file_path, load_without_experts, store_spec
from spmoe.models.target import Target
from spmoe.types import ExpertKey

LAYOUTS = ("per-expert", "fused", "sharded")
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def load(directory: Path, dtype: torch.dtype) -> tuple[Target, dict[ExpertKey, dict[str, Tensor]], bytes]:
    """Return the target, every expert in its expert file, and the bytes of all blobs."""
    checkpoint = Checkpoint.find(str(directory))
    target = Target(load_without_experts(checkpoint, dtype))
    paths = [moe_layer.path for moe_layer in target.moe]
    with ExpertReader(checkpoint, target.model, paths) as reader:
        spec = store_spec(checkpoint, target.model, paths, dtype)
        file = ensure_expert_file(expert_file_path(checkpoint, dtype), spec, reader.fill)
    try:
        experts, blobs = {}, []
        for key in list(file.spec.keys()):
            blob = os.pread(file.fd, file.spec.layout.nbytes, file.offset(key))
            file.check(key, memoryview(blob))
            blobs.append(blob)
            experts[key] = file.spec.layout.views(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        return target, experts, b"".join(blobs)
    finally:
        file.close()


def assert_experts(experts: dict[ExpertKey, dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    """Check that every expert equals its slice of the fused parameters in transformers."""
    assert len(experts) == sum(next(iter(layer.values())).shape[0] for layer in wanted)
    for key, tensors in experts.items():
        assert set(tensors) == set(wanted[key.layer])
        for name, tensor in tensors.items():
            assert torch.equal(tensor, wanted[key.layer][name][key.expert])


# ---- checkpoint layouts


@pytest.mark.parametrize("family", TARGETS)
def test_every_layout_gives_equal_bytes(tmp_path: Path, family: str) -> None:
    model = seeded(TARGETS[family], 3)
    wanted = expert_tensors(model)
    found = {}
    for layout in LAYOUTS:
        directory = save(model, tmp_path / layout, byte_tokenizer(), layout)
        names = Checkpoint.find(str(directory)).files
        assert any(name.endswith("experts.gate_up_proj") for name in names) == (layout == "fused")
        assert (len(set(names.values())) > 1) == (layout == "sharded")
        _, experts, found[layout] = load(directory, torch.float32)
        assert_experts(experts, wanted)
    assert found["per-expert"] == found["fused"] == found["sharded"]
    assert len(found["fused"]) >= LAYERS * EXPERTS[family] * 3 * 32 * 48 * 4


def test_more_than_ten_experts_keep_their_order(tmp_path: Path) -> None:
    """Expert 2 comes before expert 10, although names sort otherwise."""
    model = seeded(mixtral, 4, num_local_experts=12, num_hidden_layers=1)
    for layout in LAYOUTS:
        _, experts, _ = load(save(model, tmp_path / layout, None, layout), torch.float32)
        assert_experts(experts, expert_tensors(model))


def test_layers_with_one_expert(tmp_path: Path) -> None:
    """One tensor of a single expert and one that holds all experts are told apart."""
    model = seeded(mixtral, 4, num_local_experts=1, num_experts_per_tok=1)
    for layout in LAYOUTS:
        _, experts, _ = load(save(model, tmp_path / layout, None, layout), torch.float32)
        assert_experts(experts, expert_tensors(model))


def test_layers_are_counted_among_moe_layers(partly_dense_pair: Pair) -> None:
    target, experts, _ = load(partly_dense_pair.target, torch.float32)
    assert {key.layer for key in experts} == {0, 1}
    assert_experts(experts, expert_tensors(reference(partly_dense_pair.target)))
    assert target.layer_depths == [1, 3]


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    """Its config.json names an architecture of its own, and its code is that of DeepSeek-V3."""
    save_family(tiny_model("deepseek_v3"), tmp_path / "deepseek")
    shutil.copytree(tmp_path / "deepseek", tmp_path / "kimi")
    path = tmp_path / "kimi" / "config.json"
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2", "auto_map": code}))
    expected = reference_tokens(tmp_path / "deepseek", [5, 9, 3], GREEDY.max_tokens)
    with LLM(str(tmp_path / "kimi"), dtype="float32", device="cpu", progress=False) as llm:
        assert llm.generate([5, 9, 3], GREEDY)[0].token_ids == expected


def test_fused_parameters_are_never_allocated(pair: Pair) -> None:
    target, experts, _ = load(pair.target, torch.float32)
    modules = dict(experts_modules(target.model))
    assert len(modules) == LAYERS
    for module in modules.values():
        assert module._parameters["gate_up_proj"] is None
        assert module._parameters["down_proj"] is None
    assert all(parameter.ndim < 3 for parameter in target.model.parameters())
    assert not any(parameter.is_meta for parameter in target.model.parameters())
    assert {name for name, _ in reference(pair.target).named_parameters()} - {
        name for name, _ in target.model.named_parameters()
    } == {f"{path}.{name}" for path in modules for name in ("gate_up_proj", "down_proj")}
    expert_bytes = sum(tensor.nbytes for tensor in experts[ExpertKey(0, 0)].values()) * len(experts)
    assert target.resident_bytes + expert_bytes == sum(p.nbytes for p in reference(pair.target).parameters())


def test_dense_weights_equal_those_of_transformers(pair: Pair) -> None:
    model = reference(pair.target)
    target, _, _ = load(pair.target, torch.float32)
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
        assert not parameter.requires_grad
    assert not target.model.training


# ---- dtypes


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["auto", "float32", "bfloat16", "float16"])
def test_experts_and_dense_weights_are_converted_to_the_dtype(tmp_path: Path, stored: torch.dtype, wanted: str) -> None:
    model = seeded(mixtral, 5, num_hidden_layers=1).to(stored)
    model.config.dtype = stored
    directory = save(model, tmp_path / "target")
    dtype = Checkpoint.find(str(directory)).dtype(wanted)
    assert dtype == (stored if wanted == "auto" else getattr(torch, wanted))
    target, experts, _ = load(directory, dtype)
    assert_experts(experts, [{n: t.to(dtype) for n, t in layer.items()} for layer in expert_tensors(model)])
    assert {tensor.dtype for tensors in experts.values() for tensor in tensors.values()} == {dtype}
    assert {parameter.dtype for parameter in target.model.parameters()} == {dtype}
    weight = target.model.lm_head.weight
    assert torch.equal(weight, model.lm_head.weight.to(dtype))


def test_overflow_of_the_dtype_is_rejected(tmp_path: Path) -> None:
    model = seeded(mixtral, 5, num_hidden_layers=1)
    model.model.layers[0].mlp.experts.down_proj.data[1, 0, 0] = 1e30
    directory = save(model, tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"down_proj \(expert 1\).*not finite in float16"):
        load(directory, torch.float16)
    _, experts, _ = load(directory, torch.float32)
    assert_experts(experts, expert_tensors(model))


# ---- the expert file


@pytest.fixture
def own_checkpoint(tmp_path: Path, mixtral_pair: Pair) -> Path:
    directory = tmp_path / "own"
    shutil.copytree(mixtral_pair.target, directory)
    return directory


def state_of(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


def test_expert_file_is_built_once(own_checkpoint: Path, spmoe_home: Path) -> None:
    checkpoint = Checkpoint.find(str(own_checkpoint))
    path = expert_file_path(checkpoint, torch.float32)
    assert spmoe_home in path.parents
    assert not path.exists()
    with LLM(str(own_checkpoint), None, progress=False) as llm:
        first = llm.generate([1, 2, 3], GREEDY)[0].token_ids
        before = state_of(path)
    with LLM(str(own_checkpoint), None, progress=False) as llm:
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == first
    assert state_of(path) == before
    assert list(path.parent.glob("*.partial")) == []


def test_conversion_is_announced_once(
    own_checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.experts.store.ANNOUNCED_BYTES", 1)
    path = expert_file_path(Checkpoint.find(str(own_checkpoint)), torch.float32)
    LLM(str(own_checkpoint), progress=True).close()
    announced = [line for line in capfd.readouterr().err.splitlines() if "of experts to" in line]
    assert [f"to {path} (once); " in line for line in announced] == [True]
    LLM(str(own_checkpoint), progress=True).close()
    assert "of experts to" not in capfd.readouterr().err
    path.unlink()
    LLM(str(own_checkpoint), progress=False).close()
    assert "of experts to" not in capfd.readouterr().err


def test_second_load_reads_no_experts(own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(own_checkpoint, torch.float32)
    reads: list[Any] = []
    monkeypatch.setattr("spmoe.models.expert_reader.ExpertReader.fill", lambda *args: reads.append(args))
    load(own_checkpoint, torch.float32)
    assert reads == []


def test_each_dtype_has_its_own_file(own_checkpoint: Path) -> None:
    checkpoint = Checkpoint.find(str(own_checkpoint))
    paths = [expert_file_path(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert len(set(paths)) == 2
    states = []
    for dtype, path in zip((torch.float32, torch.bfloat16), paths, strict=True):
        load(own_checkpoint, dtype)
        states.append(state_of(path))
    for dtype in (torch.float32, torch.bfloat16):
        load(own_checkpoint, dtype)
    assert [state_of(path) for path in paths] == states
    assert states[0][2] > states[1][2]


def test_changed_checkpoint_rebuilds_the_expert_file(own_checkpoint: Path) -> None:
    checkpoint = Checkpoint.find(str(own_checkpoint))
    path = expert_file_path(checkpoint, torch.float32)
    load(own_checkpoint, torch.float32)
    before = state_of(path)
    other = seeded(mixtral, 77)
    save(other, own_checkpoint, byte_tokenizer())
    assert expert_file_path(Checkpoint.find(str(own_checkpoint)), torch.float32) == path
    with LLM(str(own_checkpoint), None, progress=False) as llm:
        tokens = llm.generate([1, 2, 3], GREEDY)[0].token_ids
    assert tokens == greedy(other, [1, 2, 3], 6)
    assert state_of(path) != before
    file = ExpertFile.open(path)
    file.close()
    assert file.spec.fingerprint == Checkpoint.find(str(own_checkpoint)).fingerprint != checkpoint.fingerprint


def test_checkpoints_of_the_same_name_do_not_share_a_file(tmp_path: Path) -> None:
    found = []
    for seed in (1, 2):
        directory = save(seeded(mixtral, seed, num_hidden_layers=1), tmp_path / str(seed) / "model")
        found.append(expert_file_path(Checkpoint.find(str(directory)), torch.float32))
    assert found[0] != found[1]


# ---- damaged checkpoints


def edit_weights(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_expert_is_rejected(own_checkpoint: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    edit_weights(own_checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"3 experts for model\.layers\.1\.mlp\.experts\.down_proj"):
        load(own_checkpoint, torch.float32)


def test_all_experts_but_one_missing_is_rejected(own_checkpoint: Path) -> None:
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in (0, 1, 3)]
    edit_weights(own_checkpoint, lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(CheckpointError, match=r"1 expert for model\.layers\.1\.mlp\.experts\.down_proj"):
        load(own_checkpoint, torch.float32)


def test_expert_with_nan_is_rejected(own_checkpoint: Path) -> None:
    name = "model.layers.2.block_sparse_moe.experts.3.w1.weight"
    edit_weights(own_checkpoint, lambda tensors: tensors[name].view(-1)[5].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.gate_up_proj \(expert 3\).*not finite"):
        load(own_checkpoint, torch.float32)


def test_wrong_number_of_experts_is_rejected(own_checkpoint: Path) -> None:
    config = json.loads((own_checkpoint / "config.json").read_text())
    (own_checkpoint / "config.json").write_text(json.dumps({**config, "num_local_experts": 5}))
    with pytest.raises(CheckpointError, match=r"disagree|has 4 experts"):
        load(own_checkpoint, torch.float32)


def test_dense_model_is_rejected_as_target(mixtral_pair: Pair) -> None:
    with pytest.raises(UsageError, match="dense model"):
        load(mixtral_pair.good, torch.float32)


# ---- memory

WIDE, INNER, WIDE_EXPERTS = 512, 512, 13
WIDE_EXPERT = 3 * WIDE * INNER * 4  # bytes
WIDE_LAYERS = {"per-expert": 2, "fused": 1}
SLACK = 16 * 2**20  # for imports, the allocator and threads

MEASURE = """
import gc, json, sys, threading, time
import torch
from spmoe import LLM, SamplingParams
from transformers import AutoModelForCausalLM, MixtralForCausalLM

torch.set_num_threads(1)


def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


peak, start, done = 0, anonymous(), threading.Event()


def sample():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)


def growth(work):
    global peak
    gc.collect()  # free the memory of an earlier engine
    peak = 0
    result = work()
    return max(peak, anonymous()) - start, result


def run(directory):
    with LLM(directory, None, expert_memory=int(sys.argv[1]), progress=False) as llm:
        tokens = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
        return {"tokens": tokens, "resident": llm.engine.target.resident_bytes, "slots": llm.engine.slots}


threading.Thread(target=sample, daemon=True).start()
for directory in sys.argv[2:]:
    grown, figures = growth(lambda: run(directory))
    print(json.dumps({"grown": grown, **figures}))
grown, model = growth(lambda: AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32))
print(json.dumps({"grown": grown}))
done.set()
"""


def save_wide(directory: Path, layout: str) -> Path:
    """Write a checkpoint of about 40 MB per layer, mostly experts, without building a model of that size."""
    layers = WIDE_LAYERS[layout]
    model = seeded(
        mixtral, 6, hidden_size=WIDE, intermediate_size=8, num_hidden_layers=layers, num_local_experts=WIDE_EXPERTS
    )
    model.config.intermediate_size = INNER
    dense = {n: t.contiguous() for n, t in model.state_dict().items() if ".experts." not in n}
    model.config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    base = 0.02 * torch.randn(WIDE, INNER, generator=generator)
    for layer in range(layers):
        experts = {}
        if layout == "fused":
            prefix = f"model.layers.{layer}.mlp.experts"
            experts[f"{prefix}.gate_up_proj"] = torch.cat([base.T, base.T]).expand(WIDE_EXPERTS, -1, -1).contiguous()
            experts[f"{prefix}.down_proj"] = base.expand(WIDE_EXPERTS, -1, -1).contiguous()
        else:
            for expert in range(WIDE_EXPERTS):
                prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                scaled = base * (1 + expert / WIDE_EXPERTS)
                for name in ("w1", "w3"):
                    experts[f"{prefix}.{name}.weight"] = scaled.T.contiguous()
                experts[f"{prefix}.w2.weight"] = scaled
        save_file(experts, directory / f"layer-{layer}.safetensors", metadata={"format": "pt"})
    renamed = {
        n.replace(".mlp.gate.", ".block_sparse_moe.gate.") if layout != "fused" else n: t for n, t in dense.items()
    }
    save_file(renamed, directory / "dense.safetensors", metadata={"format": "pt"})
    files = {n: p.name for n, p in Checkpoint.find(str(directory)).files.items()}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure memory")
def test_load_never_holds_all_experts(tmp_path: Path) -> None:
    """Loading and generating needs memory for the dense weights, the slots and two blobs."""
    directories = [save_wide(tmp_path / layout, layout) for layout in WIDE_LAYERS]
    all_experts = [layers * WIDE_EXPERTS * WIDE_EXPERT for layers in WIDE_LAYERS.values()]
    memory = 3 * WIDE_EXPERT
    environment = {
        **os.environ,
        "SPMOE_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # freed memory goes back to the system at once, so the measurement is exact
    }
    command = [sys.executable, "-c", MEASURE, str(memory), *map(str, directories)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    for used in tmp_path.iterdir():
        shutil.rmtree(used)
    assert found.returncode == 0, found.stderr
    *engines, plain = (json.loads(line) for line in found.stdout.splitlines())
    for figures in engines:
        assert figures["slots"] == 3
        assert len(figures["tokens"]) == 4
        bound = figures["resident"] + memory + 2 * WIDE_EXPERT + SLACK
        assert bound < all_experts[0] / 2, "the bound is far below all experts"
        assert bound < min(all_experts)
        assert figures["grown"] < bound
        assert figures["grown"] > memory / 2, "the sampling works"
    assert len(engines) == len(WIDE_LAYERS)
    assert plain["grown"] > all_experts[0], "the sampling detects a load of all experts"
