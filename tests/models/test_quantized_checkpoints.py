"""Quantized checkpoints: every kind is read as the weights that its publishers' formula gives, packed and dense."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import byte_tokenizer, greedy_tokens, mixtral, qwen3_moe, require_family, save, seeded
from quantized_checkpoints import (
    KINDS,
    QuantizedPair,
    auto_round,
    change,
    compressed,
    declare,
    gptq_config,
    is_expert,
    is_linear,
    modelopt,
    write_pair,
)
from spmoe import LLM, SamplingParams
from spmoe.errors import CheckpointError
from spmoe.formats.base import weight_format
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_formats import is_lossless, own_format
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.families import tiny_draft, tiny_model
from spmoe.models.inspection import inspect_model
from spmoe.models.load import load_dense, load_without_experts
from spmoe.models.tensors import CheckpointTensors
from spmoe.system.headers import QUANTIZATION_FILES
from spmoe.types import ExpertKey

PROMPT, COUNT = [5, 9, 3, 17, 60, 2], 12
LAYERS, EXPERTS = 2, 4
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": LAYERS}  # several groups of 32 inputs
MAKE: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: seeded(qwen3_moe, 3, moe_intermediate_size=96, num_experts=EXPERTS, **SIZES),
    "mixtral": lambda: seeded(mixtral, 4, intermediate_size=96, **SIZES),
    "gpt_oss": lambda: tiny_model("gpt_oss", hidden_size=64),
    "granitemoe": lambda: tiny_model("granitemoe", hidden_size=64, intermediate_size=32),
    "inkling2_text": lambda: tiny_model("inkling2_text"),
}
LINEAR_KINDS = [kind for kind in KINDS if kind != "mxfp4"]
FUSED_KINDS = ["fp8-block", "ct-fp8-tensor", "ct-int4-asym", "ct-int8-group", "ct-nvfp4", "gptq-asym", "awq"]
# one kind per weight format, and one whose experts become dense
TOKEN_KINDS = [*("fp8-block", "ct-fp8-channel", "ct-int4", "ct-int4-asym", "ct-int8", "ct-int8-group", "ct-int8-asym")]
TOKEN_KINDS += [*("ct-mxfp4", "ct-nvfp4", "gptq", "awq")]

Make = Callable[..., QuantizedPair]


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that writes, once, a quantized checkpoint and the dense one of its dequantized weights."""
    root, made = tmp_path_factory.mktemp("quantized"), dict[tuple[str, ...], QuantizedPair]()

    def make(kind: str, family: str = "qwen3_moe", layout: str = "per-expert") -> QuantizedPair:
        source = root / f"{family}-{layout}"
        if not source.exists():
            tokenizer = byte_tokenizer() if family in ("qwen3_moe", "mixtral") else None
            save(MAKE[family](), source, tokenizer, layout)
        if (key := (kind, family, layout)) not in made:
            select = is_expert if family == "gpt_oss" else is_linear
            made[key] = write_pair(source, root / "-".join(key), kind, select, transposed=family == "gpt_oss")
        return made[key]

    return make


def equal(found: Tensor, expected: Tensor, exact: bool) -> bool:
    return torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=1e-6, atol=0)


def check_tensors(pair: QuantizedPair, kind: str) -> None:
    """Compare every tensor with that of the dense checkpoint."""
    expected = load_file(pair.dense / "model.safetensors")
    with CheckpointTensors(Checkpoint.find(str(pair.packed))) as tensors:
        assert sorted(tensors.names) == sorted(expected)
        for name, tensor in expected.items():
            assert equal(tensors.read(name), tensor, KINDS[kind].exact), name


def experts_of(directory: Path, dtype: torch.dtype) -> tuple[str, str | None, list[dict[str, Tensor]]]:
    """Fill every expert's blob in the checkpoint's own format; return its name, the notice and dequantized tensors."""
    checkpoint = Checkpoint.find(str(directory))
    model = load_without_experts(checkpoint, dtype)
    paths = [moe_layer.path for moe_layer in inspect_model(model).moe]
    format, notice = own_format(checkpoint, model, paths, dtype)
    found = []
    with ExpertReader(checkpoint, model, paths, format) as reader:
        for layer, path in enumerate(paths):
            shapes = model.get_submodule(path).spmoe_shapes
            layout = format.layout({name: shape[1:] for name, shape in shapes.items()})
            for expert in range(next(iter(shapes.values()))[0]):
                views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
                reader.fill(ExpertKey(layer, expert), views)
                found.append(format.dequantize(views))
    return format.name, notice, found


def check_experts(pair: QuantizedPair, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """Compare every expert, after `dequantize`, with the dense checkpoint's."""
    name, notice, found = experts_of(pair.packed, dtype)
    _, _, expected = experts_of(pair.dense, dtype)
    assert name == (KINDS[kind].format or str(dtype).removeprefix("torch."))
    assert (notice is None) == (KINDS[kind].format is not None)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for part in one:
            assert one[part].dtype == other[part].dtype
            assert equal(one[part], other[part], KINDS[kind].exact), part


@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_every_kind_is_read_per_expert(kind: str, make_pair: Make) -> None:
    pair = make_pair(kind)
    assert len(pair.quantized) == LAYERS * (4 + 3 * EXPERTS)  # attention, and three matrices of every expert
    check_tensors(pair, kind)
    check_experts(pair, kind)


@pytest.mark.parametrize("kind", ["gptq-asym", "awq", "ct-int4-asym"])
def test_words_may_be_unsigned(kind: str, make_pair: Make, tmp_path: Path) -> None:
    pair = make_pair(kind)
    copy = Path(shutil.copytree(pair.packed, tmp_path / "packed"))
    words = ("qweight", "qzeros", "weight_packed", "weight_zero_point")
    stored = load_file(copy / "model.safetensors")
    change(copy, **{name: one.view(torch.uint32) for name, one in stored.items() if name.endswith(words)})
    check_tensors(QuantizedPair(copy, pair.dense), kind)


@pytest.mark.parametrize("kind", FUSED_KINDS)
def test_kinds_are_read_from_fused_tensors(kind: str, make_pair: Make) -> None:
    pair = make_pair(kind, layout="fused")
    assert len(pair.quantized) == LAYERS * (4 + 2)
    check_tensors(pair, kind)
    check_experts(pair, kind)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("mxfp4", "gpt_oss"), ("ct-int4", "mixtral"), ("ct-fp8-channel", "granitemoe"), ("gptq-asym", "granitemoe")),
        *(("ct-int8", "inkling2_text"), ("gptq-asym", "inkling2_text")),  # its parameters are called `w13_weight`
    ],
)
def test_families_with_other_layouts(kind: str, family: str, make_pair: Make) -> None:
    require_family(family)
    pair = make_pair(kind, family)
    check_tensors(pair, kind)
    for dtype in (torch.float32, torch.bfloat16):
        check_experts(pair, kind, dtype)


def generate(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, SamplingParams(max_tokens=COUNT, ignore_eos=True))[0].token_ids


def check_tokens(pair: QuantizedPair, kind: str) -> None:
    """Compare tokens with transformers' on the dense model: 30% and all of the experts, with and without a draft."""
    expected = greedy_tokens(pair.dense, PROMPT, COUNT)
    assert len(set(expected)) > 3
    for memory in ("30%", "100%"):
        options: dict[str, Any] = {"device": "cpu", "expert_memory": memory, "progress": False}
        with LLM(str(pair.packed), draft="ngram", dtype="float32", num_speculative_tokens=3, **options) as llm:
            assert llm.engine.spec.layout.format == (KINDS[kind].format or "float32")
            assert any("expanded" in notice for notice in llm.notices) == (KINDS[kind].format is None)
            assert (llm.engine.slots == llm.engine.spec.count) == (memory == "100%")
            assert generate(llm) == expected
            llm.engine.reconfigure(num_speculative_tokens=0)
            assert generate(llm) == expected


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_tokens_equal_those_of_the_dequantized_model(kind: str, make_pair: Make) -> None:
    check_tokens(make_pair(kind), kind)


def test_tokens_of_gpt_oss(make_pair: Make) -> None:
    check_tokens(make_pair("mxfp4", "gpt_oss"), "mxfp4")


def test_conversion_of_a_quantized_checkpoint_says_whether_it_is_lossless(make_pair: Make, tmp_path: Path) -> None:
    """Its dequantized weights are those of the run's dtype, also where most of its bytes are bfloat16."""
    directory = Path(shutil.copytree(make_pair("ct-int4").packed, tmp_path / "copy"))
    stored = load_file(directory / "model.safetensors")
    wide = {n: t.bfloat16() for n, t in stored.items() if t.dtype == torch.float32}
    wide["model.embed_tokens.weight"] = torch.zeros(4096, 64, dtype=torch.bfloat16)
    change(directory, **wide)
    checkpoint = Checkpoint.find(str(directory))
    for name, dtype, expected in (
        ("bfloat16", torch.float32, False),
        ("bfloat16", torch.bfloat16, True),
        ("bf16-packed", torch.bfloat16, True),
        ("int4-g128", torch.bfloat16, False),
    ):
        own, format = (ExpertFormat(weight_format(one), dtype) for one in ("int4-g32", name))
        assert is_lossless(format, own, checkpoint) == expected
        assert is_lossless(own, own, checkpoint)


def test_quantized_draft(tmp_path: Path) -> None:
    save(tiny_draft(64, 96), tmp_path / "source")
    pair = write_pair(tmp_path / "source", tmp_path, "gptq-asym")
    (pair.packed / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    model = load_dense(Checkpoint.find(str(pair.packed)), torch.float32)
    expected = load_file(pair.dense / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in pair.quantized)
    assert model.generation_config.eos_token_id == [7, 8]


def test_experts_in_several_formats_become_dense(make_pair: Make, tmp_path: Path) -> None:
    """Experts of the last layer are not quantized, as in some uploads."""
    pair = make_pair("ct-int4")
    shutil.copytree(pair.packed, tmp_path / "mixed")
    dense = load_file(pair.dense / "model.safetensors")
    last = {n: t for n, t in dense.items() if f"layers.{LAYERS - 1}.mlp.experts." in n}
    stored = load_file(pair.packed / "model.safetensors")
    gone = {n: None for n in stored if f"layers.{LAYERS - 1}.mlp.experts." in n}
    change(tmp_path / "mixed", **gone, **last)
    name, notice, found = experts_of(tmp_path / "mixed", torch.float32)
    _, _, expected = experts_of(pair.dense, torch.float32)
    assert name == "float32"
    assert notice is not None
    assert "several formats" in notice
    assert "int4-g32" in notice
    assert all(torch.equal(one[part], other[part]) for one, other in zip(found, expected, strict=True) for part in one)


LAYER_NAMES = [f"model.layers.{layer}" for layer in range(LAYERS)]
MIXED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {  # experts, others, config.json, own file
    "gptq": ("gptq", "gptq-8bit", {**gptq_config(4, 32, True), "dynamic": {"+:.*self_attn.*": {"bits": 8}}}, None),
    "auto-round": (
        "gptq",
        "gptq-8bit",
        auto_round("auto_round:auto_gptq", True, extra_config={r".*self_attn\.[qkvo]_proj": {"bits": 8}}),
        None,
    ),
    "modelopt": (
        "modelopt-nvfp4",
        "modelopt-fp8",
        modelopt("MIXED_PRECISION"),
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                **{f"{layer}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for layer in LAYER_NAMES},
                **{f"{layer}.self_attn.{x}_proj": {"quant_algo": "FP8"} for layer in LAYER_NAMES for x in "qkvo"},
            },
        },
    ),
    "compressed-tensors": (
        "ct-int4",
        "ct-mxfp8",
        {
            **compressed("mixed-precision", type="float", num_bits=8, strategy="group", group_size=32),
            "config_groups": {
                "group_0": {
                    "targets": ["re:.*self_attn.*"],
                    "weights": {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32},
                    "format": "mxfp8-quantized",
                },
                "group_1": {
                    "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"],
                    "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32},
                    "format": "pack-quantized",
                },
            },
        },
        None,
    ),
}


@pytest.mark.parametrize("method", MIXED)
def test_attention_and_experts_may_be_quantized_differently(method: str, make_pair: Make, tmp_path: Path) -> None:
    experts, others, declared, own_file = MIXED[method]
    source = make_pair(experts).packed.parent.parent / "qwen3_moe-per-expert"
    pair = write_pair(source, tmp_path, experts, others=others)
    declare(pair.packed, declared)
    if own_file is not None:
        (pair.packed / "hf_quant_config.json").write_text(json.dumps({"quantization": own_file}))
    check_tensors(pair, experts)
    check_experts(pair, experts)


def test_tensors_of_tools_are_ignored(make_pair: Make, tmp_path: Path) -> None:
    """Scales of activations and KV caches, and the state of modules, are no weights."""
    pair, layer = make_pair("fp8-block"), "model.layers.0"
    shutil.copytree(pair.packed, tmp_path / "copy")
    ends = ("k_scale", "v_scale", "q_scale", "k_proj.k_scale", "v_proj.output_scale", "q_proj.input_scale")
    extra = {f"{layer}.self_attn.{end}": torch.ones(()) for end in ends}
    for module in (f"{layer}.self_attn.q_proj", f"{layer}.mlp.experts.0.up_proj"):
        extra[f"{module}._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    change(tmp_path / "copy", **extra)
    check_tensors(QuantizedPair(tmp_path / "copy", pair.dense), "fp8-block")
    check_experts(QuantizedPair(tmp_path / "copy", pair.dense), "fp8-block")


@pytest.mark.parametrize("kind", ["gptq-own-file", "modelopt-nvfp4-file"])
def test_a_changed_declaration_changes_the_fingerprint(kind: str, make_pair: Make, tmp_path: Path) -> None:
    """Experts that were read by another declaration are not used again."""
    copy = Path(shutil.copytree(make_pair(kind).packed, tmp_path / "copy"))
    before = Checkpoint.find(str(copy)).fingerprint
    (path,) = (path for path in copy.iterdir() if path.name in QUANTIZATION_FILES)
    path.write_text(path.read_text() + " ")
    assert Checkpoint.find(str(copy)).fingerprint != before


def test_a_file_of_another_tool_declares_nothing(make_pair: Make, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(make_pair("fp8-block").dense, tmp_path / "copy"))
    (copy / "quant_config.json").write_text('{"name": "q4"}')
    assert Checkpoint.find(str(copy)).quantization is None


def test_symmetric_gptq_may_have_zero_points_of_version_2(make_pair: Make, tmp_path: Path) -> None:
    """Some uploads are declared as version 1, and store the middle of the codes as it is."""
    pair = make_pair("gptq")
    shutil.copytree(pair.packed, tmp_path / "copy")
    stored = load_file(pair.packed / "model.safetensors")
    change(tmp_path / "copy", **{n: t + 0x11111111 for n, t in stored.items() if n.endswith("qzeros")})
    changed, expected = (experts_of(directory, torch.float32)[2] for directory in (tmp_path / "copy", pair.dense))
    assert all(torch.equal(a[part], b[part]) for a, b in zip(changed, expected, strict=True) for part in a)


@pytest.mark.parametrize("kind", ["fp8-block", "modelopt-nvfp4", "gptq"])
def test_scales_do_not_choose_the_dtype(kind: str, make_pair: Make, tmp_path: Path) -> None:
    """config.json declares no dtype; weights that are not quantized are bfloat16, scales float32 or float16."""
    pair, directory = make_pair(kind), tmp_path / "copy"
    shutil.copytree(pair.packed, directory)
    stored, dense = load_file(directory / "model.safetensors"), load_file(pair.dense / "model.safetensors")
    change(directory, **{n: stored[n].bfloat16() for n in stored.keys() & dense.keys() - set(pair.quantized)})
    config = json.loads((directory / "config.json").read_text())
    config.pop("dtype", None)
    (directory / "config.json").write_text(json.dumps(config))
    assert Checkpoint.find(str(directory)).dtype("auto") == torch.bfloat16


def test_gate_and_up_in_blocks_of_other_sizes_are_joined(tmp_path: Path) -> None:
    """Blocks of fp8 that would span gate and up are divided; the values stay."""
    save(seeded(qwen3_moe, 3, moe_intermediate_size=40, num_experts=EXPERTS, **SIZES), tmp_path / "source")
    pair = write_pair(tmp_path / "source", tmp_path, "fp8-block")
    name, notice, found = experts_of(pair.packed, torch.float32)
    _, _, expected = experts_of(pair.dense, torch.float32)
    assert (name, notice) == ("fp8-block8x20", None)
    assert all(torch.equal(one[part], other[part]) for one, other in zip(found, expected, strict=True) for part in one)


def test_scales_of_several_dtypes_are_joined(make_pair: Make, tmp_path: Path) -> None:
    """Experts of the last layer have scales in bfloat16, the others in float32."""
    pair = make_pair("fp8-block")
    shutil.copytree(pair.packed, tmp_path / "copy")
    stored = load_file(pair.packed / "model.safetensors")
    scales = {n: t for n, t in stored.items() if f"layers.{LAYERS - 1}.mlp.experts." in n and n.endswith("scale_inv")}
    change(tmp_path / "copy", **{name: scale.bfloat16() for name, scale in scales.items()})
    name, notice, found = experts_of(tmp_path / "copy", torch.float32)
    assert (name, notice) == ("fp8-block16x20", None)
    assert len(found) == len(experts_of(pair.dense, torch.float32)[2])


def test_biases_of_zeros_that_some_tools_add_are_ignored(make_pair: Make, tmp_path: Path) -> None:
    pair, name = make_pair("gptq"), "model.layers.0.self_attn.q_proj.bias"
    shutil.copytree(pair.packed, tmp_path / "copy")
    checkpoint = Checkpoint.find(str(change(tmp_path / "copy", **{name: torch.zeros(32)})))
    load_without_experts(checkpoint, torch.float32)
    checkpoint = Checkpoint.find(str(change(tmp_path / "copy", **{name: torch.ones(32)})))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias .*no place for"):
        load_without_experts(checkpoint, torch.float32)
