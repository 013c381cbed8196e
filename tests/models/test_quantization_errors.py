"""Quantization that is not supported, damaged or contradictory: one clear error before anything is generated."""

from __future__ import annotations

import copy
import random
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import byte_tokenizer, qwen3_moe, save, seeded
from quantized_checkpoints import (
    AWQ,
    FLOAT4,
    FP8,
    KINDS,
    NVFP4,
    auto_round,
    change,
    compressed,
    declare,
    gptq_config,
    integers,
    modelopt,
    write_pair,
)
from spmoe import LLM
from spmoe.errors import CheckpointError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.families import save as save_family
from spmoe.models.families import tiny_draft
from spmoe.models.quantization import UnreadableError, read_quantization
from spmoe.models.quantized_matrices import find_matrices

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
DENSE = "model.layers.0.self_attn.q_proj"


def group(**weights: Any) -> dict[str, Any]:
    return compressed(
        "pack-quantized", **{"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, **weights}
    )


UNSUPPORTED: list[tuple[Any, str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "exl3"}, "exl3"),
    ({}, "an unknown method"),
    ("fp8", "not an object"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"block size \[128\]"),
    ({"quant_method": "fp8", "weight_block_size": "128"}, "block size '128'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ({**gptq_config(4, 128, True), "desc_act": True}, "act-order"),
    (gptq_config(3, 128, True), "3 bits"),
    (gptq_config(4, 128, True, "marlin"), "marlin"),
    ({**gptq_config(4, 128, True), "bits": "four"}, "bits 'four'"),
    ({**gptq_config(4, 128, True), "dynamic": {"+:.*down.*": {"bits": 3}}}, "down.* with 3 bits"),
    ({**gptq_config(4, 128, True), "dynamic": {"+:.*down.*": {"desc_act": True}}}, "down.* with act-order"),
    ({**gptq_config(4, 128, True), "dynamic": {".*down.*": 8}}, "down.* that are not an object"),
    ({**gptq_config(4, 128, True), "dynamic": {"+:(": {"bits": 8}}}, "no regular expression"),
    (auto_round("auto_round:auto_gptq", True, data_type="mx_fp"), "auto-round with mx_fp weights"),
    (auto_round("mlx", True), "the layout mlx"),
    (auto_round("auto_round:auto_gptq", True, bits=2), "auto-round with 2 bits"),
    (auto_round("auto_round:auto_awq", True, extra_config={"lm_head": {"bits": 8}}), "auto-round with 8 bits"),
    (auto_round("auto_round", True, extra_config={"a": 8}), "extra_config"),
    ({**AWQ, "version": "gemv"}, "gemv"),
    ({**AWQ, "bits": 8}, "8 bits"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ({**NVFP4, "group_size": 32}, "groups of 32"),
    (modelopt("MIXED_PRECISION"), "without quantized_layers"),
    (modelopt("MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": "W4A8_AWQ"}}), "W4A8_AWQ"),
    ({"quant_method": "compressed-tensors"}, "config_groups"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "config_groups"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}, "settings for weights"),
    (compressed("marlin-24", type="int", num_bits=4), "marlin-24"),
    (group(num_bits=3), "3 bits"),
    (group(actorder="group"), "act-order"),
    (group(group_size=None), "group_size None"),
    (compressed("naive-quantized", type="float", num_bits=6), "6-bit float"),
    (compressed("nvfp4-pack-quantized", **FLOAT4, strategy="group", group_size=64), "groups of 64"),
    ({**group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({**group(), "ignore": ["re:("]}, "no regular expression"),
    ({**group(), "ignore": "lm_head"}, "ignore"),
    ({**gptq_config(4, 128, True), "dynamic": {"-:(": {}}}, "no regular expression"),
]


@pytest.mark.parametrize(("declared", "words"), UNSUPPORTED, ids=str)
def test_unsupported_declarations_are_refused(declared: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=words):
        read_quantization({"quantization_config": declared})
    save_family(tiny_draft(32, 96), tmp_path)
    declare(tmp_path, declared)
    with pytest.raises(CheckpointError, match=rf"is quantized by .*{words}.*use the 16-bit checkpoint, or one in fp8"):
        Checkpoint.find(str(tmp_path))


def test_no_declaration_is_dense() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None, "text_config": {}}) is None
    assert read_quantization({}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}) is None


def test_declarations_in_other_places_are_found() -> None:
    declared = KINDS["ct-int4"].config
    for config in ({"compression_config": declared}, {"text_config": {"quantization_config": declared}}):
        found = read_quantization(config)
        assert found is not None
        assert found.scheme("model.layers.0.mlp.experts.0.up_proj").group == 32


def test_groups_choose_schemes_by_target() -> None:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    config = compressed("mixed-precision", type="float", num_bits=8, strategy="channel")
    config["config_groups"]["group_1"] = {"targets": ["re:.*experts.*"], "weights": weights}
    found = read_quantization({"quantization_config": config})
    assert found is not None
    assert str(found.scheme("model.layers.0.mlp.experts.0.up_proj")) == "int4 in groups of 32"
    assert str(found.scheme("model.layers.0.self_attn.q_proj")) == "fp8"
    with pytest.raises(ValueError, match="lm_head is quantized, but"):
        found.scheme("lm_head")
    config["config_groups"]["group_2"] = {"targets": ["lm_head"], "weights": {"type": "int", "num_bits": 8}}
    config["ignore"] = []
    found = read_quantization({"quantization_config": config})
    assert found is not None
    assert [str(found.scheme(name)) for name in ("lm_head", "model.layers.0.self_attn.q_proj")] == ["int8", "fp8"]


def schemes(declared: Any, *modules: str) -> list[str]:
    found = read_quantization({"quantization_config": declared})
    assert found is not None
    return [str(found.scheme(module)) for module in modules]


EXPERTS = "model.layers.1.mlp.experts"


def test_gptq_has_other_settings_for_some_modules() -> None:
    dynamic = {
        "-:.*gate$": {},
        r"+:.*\.experts\..*": {"group_size": 64},
        ".*_proj": {"bits": 8},
        "lm_head": {"bits": 4},
    }
    declared = {**gptq_config(4, 32, True), "dynamic": dynamic}
    found = schemes(declared, f"{EXPERTS}.0.up_proj", "model.layers.0.self_attn.q_proj", "lm_head")
    assert found == ["int4 in groups of 64", "int8 in groups of 32", "int4 in groups of 32"]
    with pytest.raises(ValueError, match="gate is quantized, but"):
        schemes(declared, "model.layers.0.mlp.gate")


def test_auto_round_has_other_settings_for_some_modules() -> None:
    extra = {
        f"{EXPERTS}.0.up_proj": {"group_size": 64},
        r".*self_attn\.[qk]_proj": {"bits": 8},
        "lm_head": {"bits": 16},
    }
    declared = auto_round("auto_round:auto_gptq", True, extra_config=extra)
    found = schemes(declared, f"{EXPERTS}.0.up_proj", f"{EXPERTS}.1.up_proj", "model.layers.0.self_attn.q_proj")
    assert found == ["int4 in groups of 64", "int4 in groups of 32", "int8 in groups of 32"]
    with pytest.raises(ValueError, match="lm_head is quantized, but"):
        schemes(declared, "lm_head")


FP8_WEIGHTS = {"type": "float", "num_bits": 8, "dynamic": False}
FP4_WEIGHTS = {"type": "float", "num_bits": 4, "dynamic": False, "group_size": 16}


@pytest.mark.parametrize(
    "mixed",
    [
        {"quantized_layers": {EXPERTS: {"quant_algo": "NVFP4", "group_size": 16}, DENSE: {"quant_algo": "FP8"}}},
        {
            "config_groups": {
                "group_0": {"weights": FP8_WEIGHTS, "targets": [DENSE]},
                "group_1": {"weights": FP4_WEIGHTS, "targets": [EXPERTS]},
            }
        },
    ],
)
def test_modelopt_may_mix_algorithms(mixed: dict[str, Any]) -> None:
    """A name may be that of a module that holds others, such as all experts of a layer."""
    declared = modelopt("MIXED_PRECISION", **mixed)
    assert schemes(declared, f"{EXPERTS}.0.up_proj", EXPERTS, DENSE) == [*["nvfp4 in groups of 16"] * 2, "fp8"]
    with pytest.raises(ValueError, match="no group of the configuration"):
        schemes(declared, "model.layers.0.self_attn.k_proj")


def test_many_targets_are_found_quickly() -> None:
    """Large checkpoints list every expert of every layer."""
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(60) for e in range(256)]
    layers = {name: {"quant_algo": "NVFP4" if number % 2 else "FP8"} for number, name in enumerate(names)}
    start = time.perf_counter()
    found = schemes(modelopt("MIXED_PRECISION", quantized_layers=layers), *names)
    assert found == ["fp8", "nvfp4 in groups of 16"] * (len(names) // 2)
    assert time.perf_counter() - start < 10


def test_block_sizes_may_be_written_as_one_word() -> None:
    for block in ([16, 20], "16x20"):
        weights = compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=block)
        found = read_quantization({"quantization_config": weights})
        assert found is not None
        assert found.schemes[0].block == (16, 20)


# ---- damaged or contradictory files


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a quantized checkpoint once per kind."""
    root = tmp_path_factory.mktemp("quantized")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2, "num_experts": 4}
    source = save(seeded(qwen3_moe, 3, **sizes), root / "source", byte_tokenizer())

    def make(kind: str) -> Path:
        if not (root / kind).exists():
            write_pair(source, root / kind, kind)
        return root / kind / "packed"

    return make


Damage = Callable[[Path, dict[str, Tensor]], Any]


def drop(suffix: str) -> Damage:
    return lambda path, stored: change(path, **{f"{module}{suffix}": None for module in (EXPERT, DENSE)})


def put(suffix: str, tensor: Callable[[Tensor], Tensor]) -> Damage:
    """Replace a tensor of one expert."""
    return lambda path, stored: change(path, **{f"{EXPERT}{suffix}": tensor(stored[f"{EXPERT}{suffix}"])})


def add(name: str, tensor: Tensor) -> Damage:
    return lambda path, stored: change(path, **{name: tensor})


def config(declared: Any) -> Damage:
    return lambda path, stored: declare(path, declared)


def both(first: Damage, second: Damage) -> Damage:
    return lambda path, stored: (first(path, stored), second(path, load_file(path / "model.safetensors")))


# damage that headers show: kind of the checkpoint, damage, words of the error
IN_HEADERS: dict[str, tuple[str, Damage, str]] = {
    "fp8 without scales": ("fp8-block", drop(".weight_scale_inv"), "lacks the scale of .*q_proj.weight"),
    "fp8 with few scales": ("fp8-block", put(".weight_scale_inv", lambda t: t[1:]), r"shape \[5, 4\]"),
    "fp8 in another type": ("fp8-block", put(".weight", lambda t: t.view(torch.float8_e5m2)), "stored as F8_E5M2"),
    "fp8 with bytes instead": ("fp8-block", put(".weight", lambda t: t.view(torch.uint8)), "stored as U8"),
    "gptq without scales": ("gptq", drop(".scales"), "lacks the scale of .*q_proj.qweight"),
    "gptq without zero points": ("gptq-asym", drop(".qzeros"), "no zero points"),
    "gptq in other groups": ("gptq", config(gptq_config(4, 64, True)), "3 scales for 96 inputs, as groups of 32"),
    "gptq with other bits": ("gptq", config(gptq_config(8, 32, True)), "scales for 48 inputs"),
    "gptq with short zero points": ("gptq-asym", put(".qzeros", lambda t: t[:, :-1].contiguous()), "qzeros has shape"),
    "gptq codes that are floats": ("gptq", put(".qweight", lambda t: t.float()), "stored as F32"),
    "gptq zero points that are floats": ("gptq", put(".qzeros", lambda t: t.float()), "qzeros is stored as F32"),
    "gptq groups that are floats": ("gptq", put(".g_idx", lambda t: t.float()), "g_idx is stored as F32"),
    "gptq codes beside weights": ("gptq", add(f"{EXPERT}.weight", torch.ones(96, 64)), "both .*weight and .*qweight"),
    "gptq scales without codes": ("gptq", drop(".qweight"), "no quantized weight that it belongs to"),
    "gptq without rows": ("gptq", put(".qweight", lambda t: t[:0]), r"has shape \[0, 96\]"),
    "awq without scales": ("awq", drop(".scales"), "lacks the scale"),
    "awq with another group size": ("awq", config({**AWQ, "group_size": 64}), "groups of 32"),
    "awq zero points that are floats": ("awq", put(".qzeros", lambda t: t.float()), "qzeros is stored as F32"),
    "int4 without scales": ("ct-int4", drop(".weight_scale"), "lacks the scale"),
    "int4 with another group size": ("ct-int4", config(integers("pack-quantized", 4, 64)), "as groups of 32 have"),
    "int4 declared asymmetric": ("ct-int4", config(integers("pack-quantized", 4, 32, False)), "no zero points"),
    "int4 declared symmetric": ("ct-int4-asym", config(integers("pack-quantized", 4, 32)), "has zero points, but"),
    "int4 zero points that are floats": (
        "ct-int4-asym", put(".weight_zero_point", lambda t: t.float()), "zero_point is stored as F32"
    ),
    "int4 declared as floats": ("ct-int4", config(KINDS["ct-fp8-channel"].config), "stored as integers"),
    "int4 in an ignored module": (
        "ct-int4", config({**KINDS["ct-int4"].config, "ignore": [DENSE]}), f"{re.escape(DENSE)} is quantized, but"
    ),
    "int8 without scales": ("ct-int8", drop(".weight_scale"), "lacks the scale"),
    "int8 with few scales": ("ct-int8", put(".weight_scale", lambda t: t[::2].contiguous()), "_scale has shape"),
    "int8 with unsigned zero points": (
        "ct-int8-asym", put(".weight_zero_point", lambda t: t.view(torch.uint8)), "zero_point is stored as U8"
    ),
    "mxfp4 with scales of nvfp4": (
        "ct-mxfp4", put(".weight_scale", lambda t: t.view(torch.float8_e4m3fn)), "stored as F8_E4M3"
    ),
    "mxfp4 with few scales": ("ct-mxfp4", put(".weight_scale", lambda t: t[:, :1].contiguous()), "belongs to mxfp4"),
    "nvfp4 without its global scale": ("modelopt-nvfp4", drop(".weight_scale_2"), "lacks the scale"),
    "nvfp4 declared as mxfp4": ("ct-nvfp4", config(KINDS["ct-mxfp4"].config), "stored as nvfp4"),
    "a declaration of another method": ("gptq", config(FP8), "no tensor is quantized"),
    "no declaration": ("gptq", config(None), "has no quantization_config"),
    "no declaration of fp8": ("fp8-block", config(None), "has no quantization_config"),
}  # fmt: skip


@pytest.mark.parametrize("damage", IN_HEADERS)
def test_contradictions_are_found_in_headers(damage: str, packed: Callable[[str], Path], tmp_path: Path) -> None:
    kind, damage_it, words = IN_HEADERS[damage]
    directory = Path(shutil.copytree(packed(kind), tmp_path / "copy"))
    Checkpoint.find(str(directory))
    damage_it(directory, load_file(directory / "model.safetensors"))
    with pytest.raises(CheckpointError, match=words) as error:
        Checkpoint.find(str(directory))
    assert "\n" not in str(error.value)


def act_order(index: Tensor) -> Tensor:
    return index.flip(0).contiguous()


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


def renumber(path: Path, stored: dict[str, Tensor]) -> None:
    """Give an expert another number."""
    renamed = {name: tensor for name, tensor in stored.items() if "layers.1.mlp.experts.2." in name}
    change(path, **dict.fromkeys(renamed), **{name.replace("s.2.", "s.7."): t for name, t in renamed.items()})


# damage that only values or the sizes of the model show
IN_VALUES: dict[str, tuple[str, Damage, str]] = {
    "gptq in act-order": ("gptq", put(".g_idx", act_order), "act-order"),
    "gptq declared symmetric": ("gptq-asym", config(gptq_config(4, 32, True)), "other zero points than the symmetric"),
    "int4 of another shape": ("ct-int4", put(".weight_shape", lambda t: t + 8), r"says \[104, 72\]"),
    "a scale that is not finite": ("ct-int4", put(".weight_scale", with_first(float("nan"))), "finite"),
    "an fp8 scale that is infinite": ("fp8-block", put(".weight_scale_inv", with_first(float("inf"))), "finite"),
    "an fp8 weight that is no number": (
        "fp8-block",
        put(".weight", lambda t: with_first(0x7F)(t.view(torch.uint8)).view(torch.float8_e4m3fn)),
        "finite|not a number",
    ),
    "an mxfp4 scale that is no number": ("ct-mxfp4", put(".weight_scale", with_first(255)), "255|finite"),
    "a global scale of zero": ("ct-nvfp4", put(".weight_global_scale", torch.zeros_like), "is 0, and is divided by"),
    "an expert with another number": (
        "ct-int4",
        renumber,
        r"lacks expert 2 of .*gate_up_proj, though it holds .*experts\.7\.",
    ),
    "experts that are there twice": (
        "ct-int4",
        add("model.layers.1.mlp.experts.down_proj", torch.zeros(4, 64, 96)),
        "holds .*down_proj twice",
    ),
    "a bias of an expert": ("gptq", add(f"{EXPERT}.bias", torch.ones(96)), r"2\.up_proj\.bias .*no place for"),
    "an expert of another size": (
        "ct-fp8-channel",
        both(put(".weight", lambda t: t[:64].contiguous()), put(".weight_scale", lambda t: t[:64].contiguous())),
        r"an expert of .*gate_up_proj is \[160, 64\] in the file",
    ),
}


@pytest.mark.parametrize("damage", IN_VALUES)
def test_contradictions_in_values_end_the_conversion(
    damage: str, packed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))
    kind, damage_it, words = IN_VALUES[damage]
    directory = Path(shutil.copytree(packed(kind), tmp_path / "copy"))
    damage_it(directory, load_file(directory / "model.safetensors"))
    with pytest.raises(CheckpointError, match=words) as error:
        LLM(str(directory), dtype="float32", device="cpu", progress=False)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "home").rglob("*.safetensors"))


# ---- anything at all


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from(["int", "float", "group", "re:(", "4", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "a", "format"]), inner),
    max_leaves=6,
)
DECLARED = [kind.config for kind in KINDS.values() if kind.config]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(DECLARED), st.data())
def test_declarations_are_parsed_or_refused(declared: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(declared)
    place = changed
    while isinstance(inner := place.get(data.draw(st.sampled_from(sorted(place)))), dict) and inner:
        place = inner
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    with suppress(UnreadableError):
        found = read_quantization({"quantization_config": changed})
        assert found is None or found.schemes


@pytest.mark.parametrize("kind", ["fp8-block", "ct-int4-asym", "ct-int8", "ct-nvfp4", "ct-mxfp4", "gptq", "awq"])
def test_any_header_is_read_or_refused(kind: str, packed: Callable[[str], Path]) -> None:
    """Change dtypes and shapes of random tensors: matrices are found, or ValueError says what is wrong."""
    checkpoint = Checkpoint.find(str(packed(kind)))
    quantization = checkpoint.quantization
    assert quantization is not None
    rng, refused = random.Random(5), 0
    names = [name for name in checkpoint.tensors if EXPERT in name or DENSE in name]
    for _ in range(60):
        tensors = dict(checkpoint.tensors)
        name = rng.choice(names)
        shape = list(tensors[name].shape) or [1]
        match rng.randrange(4):
            case 0:
                shape[rng.randrange(len(shape))] = rng.choice([0, 1, 7, 1000])
            case 1:
                shape = [2, *shape]
            case 2:
                shape = shape[1:]
            case 3:
                tensors[name] = replace(tensors[name], dtype=rng.choice(["F8_E4M3", "U8", "I8", "I32", "F64", "BOOL"]))
        tensors[name] = replace(tensors[name], shape=tuple(shape))
        try:
            find_matrices(quantization, tensors)
        except ValueError:
            refused += 1
    assert refused > 20


def test_weights_beyond_float16_are_refused_only_there(packed: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed("ct-int8"), tmp_path / "copy"))
    name = f"{EXPERT}.weight_scale"
    change(directory, **{name: load_file(directory / "model.safetensors")[name] * 1e7})
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    with LLM(str(directory), dtype="bfloat16", **options):
        pass
    with pytest.raises(CheckpointError, match=r"not finite in float16; .* needs --dtype bfloat16"):
        LLM(str(directory), dtype="float16", **options)
