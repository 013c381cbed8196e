"""`--load-format dummy`: models of random weights, from config.json alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.backends.cpu import expert_shapes
from spmoe.config import RANDOM_WEIGHTS_NOTE
from spmoe.errors import BudgetError, CheckpointError, UsageError
from spmoe.files import SHIPPED_CONFIGS, shipped_configs
from spmoe.models.checkpoint import Checkpoint, quiet
from spmoe.models.dummy import byte_tokenizer, declared_format
from spmoe.types import ExpertKey

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPT = list(b"def f(x):")
BASE = {"dtype": "float32", "max_position_embeddings": 256, "num_hidden_layers": 3, "vocab_size": 600}
ATTENTION = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "gpt_oss": {  # biases of experts, matrices [in, out], attention sinks
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
PUBLISHED = {  # parameters in billions
    "mixtral-8x7b": 46.7,
    "qwen3-30b-a3b": 30.5,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "deepseek-v2-lite": 15.7,
    "glm-4.5-air": 106.9,
}


def write_config(directory: Path, family: str, **changes: Any) -> Path:
    """Write a directory that holds nothing but a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, **BASE, **ATTENTION, **CONFIGS[family], **changes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path | str, **options: Any) -> LLM:
    return LLM(directory, load_format="dummy", device="cpu", progress=False, **options)


def dense_twin(llm: LLM) -> Any:
    """Return transformers' own model with the weights of an engine, experts included."""
    models = llm.engine.parts.models
    twin = AutoModelForCausalLM.from_config(models.checkpoint.config, dtype=models.dtype).eval()
    missing, unexpected = twin.load_state_dict(models.target.model.state_dict(), strict=False)
    assert not unexpected
    filled = set()
    with models.experts() as fill:
        for layer, moe in enumerate(models.target.moe):
            module = twin.get_submodule(moe.path)
            for expert in range(models.spec.experts[layer]):
                views = models.spec.layout.views(torch.zeros(models.spec.layout.nbytes, dtype=torch.uint8))
                fill(ExpertKey(layer, expert), views)
                own = models.expert_format.views(views, expert_shapes(moe.experts))
                for name, tensor in models.expert_format.dequantize(own).items():
                    getattr(module, name).data[expert] = tensor
                    filled.add(f"{moe.path}.{name}")
    assert {*missing} == filled
    return twin


@pytest.mark.parametrize(
    ("family", "expert_format"),
    [*((family, "auto") for family in CONFIGS), ("mixtral", "int4-g32"), ("gpt_oss", "int8-channel")],
)
def test_tokens_are_those_of_transformers_with_these_weights(family: str, expert_format: str, tmp_path: Path) -> None:
    directory = write_config(tmp_path / family, family)
    options = {"num_speculative_tokens": 3, "draft": "ngram", "expert_memory": "30%", "expert_format": expert_format}
    with load(directory, **options) as llm:
        assert llm.engine.parts.models.lossless == (expert_format == "auto")
        tokens = llm.generate([PROMPT], GREEDY)[0].token_ids
        twin = dense_twin(llm)
    with torch.inference_mode():
        expected = twin.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert tokens == expected[0, len(PROMPT) :].tolist()
    assert all(torch.isfinite(tensor).all() for tensor in twin.state_dict().values() if tensor.is_floating_point())


def test_experts_have_the_format_that_the_configuration_declares(tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    directory = write_config(tmp_path / "model", "gpt_oss", **quantized)
    with load(directory, num_speculative_tokens=0) as llm:
        output = llm.generate([PROMPT], GREEDY)[0]
        assert llm.engine.spec.layout.format == "mxfp4"
    assert output.stats is not None
    assert (output.stats.expert_format, output.stats.lossless) == ("mxfp4", True)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8-block128"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8-channel"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "int4-g32"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4-asym-g64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, "int8-channel"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": False}, None),  # no format has these values
    ],
)
def test_formats_that_configurations_declare(declared: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", "mixtral", quantization_config=declared)
    assert declared_format(Checkpoint.find(str(directory), load_format="dummy")) == expected


def test_weights_depend_on_the_configuration_alone(tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        torch.manual_seed(len(texts))
        state = torch.get_rng_state()
        with load(write_config(tmp_path / name, "mixtral"), num_speculative_tokens=0) as llm:
            texts.append(llm.generate([PROMPT], GREEDY)[0].token_ids)
        assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers"
    assert texts[0] == texts[1]


def test_nothing_is_written(tmp_path: Path, spmoe_home: Path) -> None:
    directory = write_config(tmp_path / "model", "mixtral")
    before = sorted(spmoe_home.rglob("*.safetensors"))
    with load(directory, num_speculative_tokens=0) as llm:
        llm.generate([PROMPT], GREEDY)
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    assert sorted(spmoe_home.rglob("*.safetensors")) == before


def test_log_says_how_long_filling_the_store_took(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "spmoe"), load(write_config(tmp_path / "model", "mixtral")):
        assert re.search(r"filled the store with \d+\.\d GB of experts in \d+\.\d s", caplog.text)


def test_every_report_says_that_weights_are_random(tmp_path: Path) -> None:
    with load(write_config(tmp_path / "model", "mixtral"), num_speculative_tokens=0) as llm:
        assert RANDOM_WEIGHTS_NOTE in llm.notices
        assert any("a token is a byte" in notice for notice in llm.notices)
        assert not any("repeat" in notice for notice in llm.notices)
        output = llm.generate("text", GREEDY)[0]
    found = output.to_dict()
    assert (found["stats"]["weights"], found["stats"]["weights_note"]) == ("random", RANDOM_WEIGHTS_NOTE)
    assert output.prompt_token_ids is not None
    assert len(output.prompt_token_ids) == 4
    assert output.text


def test_experts_that_repeat_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmoe.models.dummy._DISTINCT_VALUES", 5 * 3 * 32 * 48)
    with load(write_config(tmp_path / "model", "mixtral"), num_speculative_tokens=0) as llm:
        assert "5 of 18 experts are drawn; the others repeat them" in llm.notices
        first, second = dense_twin(llm), llm.generate([PROMPT], GREEDY)[0].token_ids
    experts = first.model.layers[0].mlp.experts.gate_up_proj
    assert len({tuple(one.flatten().tolist()) for one in experts}) == 5
    assert len(second) == 16


def test_routing_of_greedy_text_is_nearly_uniform(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "num_experts": 32, "num_experts_per_tok": 4}
    directory = write_config(tmp_path / "model", "qwen3_moe", **sizes, vocab_size=20000, dtype="bfloat16")
    options = {"draft": "none", "prefetch": "on-demand", "eviction": "lru", "expert_memory": "25%"}
    with load(directory, **options) as llm:
        output = llm.generate("The quick brown fox. " * 4, SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert output.stats is not None
    hits = output.stats.decode_counters.hit_rate
    assert hits is not None
    assert 0.15 < hits < 0.35, "a quarter of the experts is resident"
    assert len({*output.token_ids}) > 40


def test_draft_is_random_too(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", "mixtral")
    draft = write_config(tmp_path / "draft", "mixtral", num_hidden_layers=1)
    with load(target, draft=draft, num_speculative_tokens=2) as llm:
        drafted = llm.generate([PROMPT], GREEDY)[0]
    with load(target, num_speculative_tokens=0) as llm:
        assert drafted.token_ids == llm.generate([PROMPT], GREEDY)[0].token_ids
    assert drafted.stats is not None
    assert drafted.stats.counters.drafted


def test_target_drafts_for_itself(tmp_path: Path, spmoe_home: Path) -> None:
    target, before = write_config(tmp_path / "target", "mixtral"), sorted(spmoe_home.rglob("*.safetensors"))
    with load(target, draft="self:int8", num_speculative_tokens=2) as llm:
        drafted = llm.generate([PROMPT], GREEDY)[0]
    with load(target, num_speculative_tokens=0) as llm:
        assert drafted.token_ids == llm.generate([PROMPT], GREEDY)[0].token_ids
    assert drafted.stats is not None
    assert drafted.stats.counters.accepted, "experts in eight bits are nearly the target's own"
    assert sorted(spmoe_home.rglob("*.safetensors")) == before


def test_weights_of_a_checkpoint_are_not_read(mixtral_pair: Pair, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(mixtral_pair.target, directory)
    for file in directory.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    with load(directory, num_speculative_tokens=0) as llm:
        assert llm.generate("def f(x):", GREEDY)[0].token_ids
        assert not any("tokenizer" in notice for notice in llm.notices)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_format": "dumy"}, "load_format must be one of auto, dummy, not 'dumy'"),
        ({"load_format": "dummy", "shape": "mixtral-8x7b"}, "widens a trained pair"),
        ({"load_format": "dummy", "model": "mixtral-8x7"}, "did you mean mixtral-8x7b?"),
        ({"load_format": "dummy", "model": "llama"}, "give one that ships: deepseek-v2-lite"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(**{"model": write_config(tmp_path / "model", "mixtral"), "progress": False, **options})


def test_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(tmp_path)


def test_more_experts_than_host_memory_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("spmoe.engine.build.available_memory", lambda: 2**10)
    monkeypatch.setattr("spmoe.engine.build.load_target", lambda *args: pytest.fail("weights are drawn"))
    with pytest.raises(BudgetError, match=r"of host memory, .* but only 1\.0 KiB are free; free some memory"):
        load(write_config(tmp_path / "model", "mixtral"))


# ---- tokenizer


def test_byte_tokenizer_reads_text_and_shows_every_token() -> None:
    tokenizer = byte_tokenizer(300)
    assert tokenizer is not None
    text = "naïve\n\t\U0001f600 <299>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([299]) == "<299>"
    assert byte_tokenizer(255) is None


def test_small_vocabulary_takes_token_ids_alone(tmp_path: Path) -> None:
    with load(write_config(tmp_path / "model", "mixtral", vocab_size=100), num_speculative_tokens=0) as llm:
        assert any("only 100 tokens, so prompts must be token ids" in notice for notice in llm.notices)
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 16


# ---- configurations that ship


def test_published_parameter_counts() -> None:
    assert shipped_configs() == sorted(PUBLISHED)
    for name, billions in PUBLISHED.items():
        checkpoint = Checkpoint.find(name.upper(), load_format="dummy")
        with torch.device("meta"), quiet():
            model = AutoModelForCausalLM.from_config(checkpoint.config)
        assert round(sum(one.numel() for one in model.parameters()) / 1e9, 1) == billions, name
        assert checkpoint.dtype("auto") is torch.bfloat16


def test_shipped_configurations_say_what_transformers_reads() -> None:
    for name in shipped_configs():
        declared = json.loads((SHIPPED_CONFIGS / name / "config.json").read_text())
        config = Checkpoint.find(name, load_format="dummy").config
        assert config.rope_parameters["rope_theta"] == declared.pop("rope_theta")
        scaling = declared.pop("rope_scaling", None) or {}
        assert scaling.items() <= config.rope_parameters.items()
        factor = declared.pop("partial_rotary_factor", None)
        assert factor in (None, config.rope_parameters.get("partial_rotary_factor"))
        assert declared.pop("dtype") == "bfloat16"
        declared.pop("quantization_config", None)  # read by spmoe
        assert {key: getattr(config, key, None) for key in declared} == declared, name
