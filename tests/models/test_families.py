"""MoE families: a dozen pass the checks, and the checks detect errors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.olmoe import modeling_olmoe

from checkpoints import require_family
from spmoe import LLM, SamplingParams
from spmoe.backends import cpu
from spmoe.bench import families as family_checks
from spmoe.bench.families import (
    NO_LAYOUT,
    OK,
    FamilyResult,
    FormatsResult,
    check_families,
    check_family,
    check_formats,
    formats_page,
    markdown_page,
    short,
)
from spmoe.cli.main import main
from spmoe.errors import UsageError
from spmoe.models import inspection, kv, loaded, packed_experts, quantized_matrices
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.experts_seam import experts_modules
from spmoe.models.families import HIDDEN, families, reference_tokens, save, tiny_config, tiny_model
from spmoe.models.runner import ModelRunner
from spmoe.models.tiny_quantized import write_quantized
from spmoe.types import PrefetchRequests

SELECTED = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "lfm2_moe",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_next",
)


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_checks, "MAX_NEW_TOKENS", 12)


@pytest.mark.parametrize("family", [*SELECTED, "gemma4_text"])
def test_family_passes_all_checks(family: str, tmp_path: Path) -> None:
    assert check_family(family, tmp_path) == FamilyResult(family, OK, OK, OK, OK)


@pytest.mark.parametrize("family", ["jamba", "nemotron_h"])
def test_family_that_cannot_extend_its_state_by_several_tokens_decodes_without_speculation(
    family: str, tmp_path: Path
) -> None:
    """With several tokens, Jamba drops its state, and Nemotron-H clamps its time steps, which it else does not."""
    result = check_family(family, tmp_path)
    assert (result.loads, result.plain) == (OK, OK)
    assert f"{family} keeps a state" in result.speculation
    assert "without speculation" in result.speculation


def test_positions_where_the_first_layer_keeps_no_keys(tmp_path: Path) -> None:
    """The cache cannot tell positions then; MiniMax-Text-01 has seven linear-attention layers first."""
    model = tiny_model("minimax", layer_types=["linear_attention", "full_attention", "linear_attention"])
    model.save_pretrained(tmp_path)
    expected = reference_tokens(tmp_path, family_checks.PROMPT, 8)
    with LLM(str(tmp_path), "ngram", expert_memory="50%", prefill_chunk=3, dtype="float32", progress=False) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        assert llm.generate(family_checks.PROMPT, params)[0].token_ids == expected


def test_only_layers_with_gates_are_prefetched(tmp_path: Path) -> None:
    """DeepSeek-V4 selects the experts of its first layers by token id, so those layers have no gate."""
    result = check_family("deepseek_v4", tmp_path)
    assert result == FamilyResult("deepseek_v4", OK, OK, OK, "partly: no router was found for 1 of 3 MoE layers")
    assert short(result.prediction) == "partly"
    target = next(path for path in sorted(tmp_path.glob("target-*")))
    options = {"num_speculative_tokens": 3, "cutoff": "all", "dtype": "float32", "progress": False}
    for prefetch in ("draft-gate", "next-gate", "draft-gate+next-gate"):
        requested: set[int] = set()
        with LLM(str(target), str(tmp_path / "draft"), device="cpu", prefetch=prefetch, **options) as llm:  # type: ignore[arg-type]
            engine = llm.engine
            gated, own = set(engine.target.gated), engine.loop.policy.on_chunk
            assert 0 < len(gated) < len(engine.target.moe)
            assert any("1 of 3 MoE layers have no gate" in notice for notice in llm.notices)

            def on_chunk(chunk: Any, requested: set[int] = requested, own: Any = own) -> PrefetchRequests:
                prefetches: PrefetchRequests = own(chunk)
                requested |= set(prefetches.layers.tolist())
                return prefetches

            engine.loop.policy.on_chunk = on_chunk  # type: ignore[method-assign]
            llm.generate(family_checks.PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
        assert requested == gated


def test_layers_may_differ_in_size_and_number_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family does this, so the model is built with another configuration for its second layer."""
    original, made = modeling_olmoe.OlmoeSparseMoeBlock.__init__, []

    def make(self: Any, config: Any) -> None:
        made.append(self)
        own = deepcopy(config)
        if len(made) % 3 == 2:
            own.intermediate_size, own.num_local_experts, own.num_experts = 56, 5, 5
        original(self, own)
        self.experts.config = config

    monkeypatch.setattr(modeling_olmoe.OlmoeSparseMoeBlock, "__init__", make)
    shapes = [tuple(experts.gate_up_proj.shape) for _, experts in experts_modules(tiny_model("olmoe"))]
    assert shapes == [(8, 80, HIDDEN), (5, 112, HIDDEN), (8, 80, HIDDEN)]
    assert check_family("olmoe", tmp_path) == FamilyResult("olmoe", OK, OK, OK, OK)


def test_text_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    text = tiny_config("qwen3_5_moe_text")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
    config = Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config={**vision, "num_position_embeddings": 16})
    torch.manual_seed(0)
    Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path)
    expected = reference_tokens(tmp_path, family_checks.PROMPT, 6)
    with LLM(str(tmp_path), None, expert_memory="50%", dtype="float32", progress=False) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        assert llm.generate(family_checks.PROMPT, params)[0].token_ids == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2", "stablelm"])
def test_hidden_states_of_many_draft_families(family: str) -> None:
    """Hidden states are the residual stream between attention and feed-forward, wherever a family has its norms."""
    config = tiny_config(family)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    runner, states, outputs = ModelRunner(model), [], []
    assert runner.has_hidden_states
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()  # the feed-forward adds nothing
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    runner.forward(
        [3, 1, 4], runner.new_kv(3), num_logits=1, on_hidden_states=lambda depth, residual: states.append(residual)
    )
    assert len(states) == config.num_hidden_layers
    assert all(torch.equal(a, b.reshape(a.shape)) for a, b in zip(states, outputs, strict=True))
    assert not torch.equal(states[0], states[1])


# ---- the list of families and their tiny configurations


def test_families_are_those_of_transformers() -> None:
    found = families()
    assert set(SELECTED) | {"mixtral", "qwen3_moe"} <= found.keys()
    assert not {"llama", "mistral", "qwen3", "gpt2"} & found.keys(), "dense models have no experts"
    with pytest.raises(UsageError, match="llama is not an MoE family"):
        tiny_model("llama")


def test_tiny_models_of_all_families_are_small() -> None:
    sizes = {}
    for family, model_class in families().items():
        with torch.device("meta"):
            sizes[family] = sum(p.numel() for p in model_class(tiny_config(family)).parameters())
    assert {family: size for family, size in sizes.items() if size > 1e6} == {}


@pytest.mark.parametrize("family", SELECTED)
def test_tiny_model_is_small_and_has_every_kind_of_layer(family: str) -> None:
    config, default = tiny_config(family), type(tiny_config(family))()
    assert config.hidden_size == HIDDEN
    assert config.num_hidden_layers <= 5
    kinds = {kind for name in ("layer_types", "mlp_layer_types") for kind in getattr(default, name, None) or ()}
    assert kinds <= {kind for name in ("layer_types", "mlp_layer_types") for kind in getattr(config, name, None) or ()}
    model = tiny_model(family)
    assert sum(p.numel() for p in model.parameters()) < 2e5
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_model(family).parameters(), strict=True))
    assert any(True for _ in experts_modules(model))


# ---- the checks detect errors


def _change_target(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], None]) -> None:
    """Change every module of the target that the engine loads, but not of the one that transformers loads."""
    original = loaded.load_without_experts

    def load(*args: Any) -> Any:
        model = original(*args)
        for module in model.modules():
            change(module)
        return model

    monkeypatch.setattr(loaded, "load_without_experts", load)


def drop_router_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(module: nn.Module) -> None:
        for name, tensor in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
            if name == "e_score_correction_bias":
                tensor.zero_()

    _change_target(monkeypatch, change)


def flip_weight_normalization(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(module: Any) -> None:
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = not module.norm_topk_prob

    _change_target(monkeypatch, change)


def swap_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cpu.run_expert

    def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        gate, up = tensors["gate_up_proj"].chunk(2)
        return original(experts, {**tensors, "gate_up_proj": torch.cat([up, gate])}, x)

    monkeypatch.setattr(cpu, "run_expert", run_expert)


def drop_expert_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cpu.run_expert

    def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        kept = {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
        return original(experts, kept, x)

    monkeypatch.setattr(cpu, "run_expert", run_expert)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("deepseek_v3", drop_router_bias),
        ("qwen3_moe", flip_weight_normalization),
        ("qwen2_moe", swap_gate_and_up),
        ("gpt_oss", drop_expert_bias),
    ],
)
def test_wrong_router_or_expert_is_detected(
    family: str, fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    result = check_family(family, tmp_path)
    assert result.loads == OK
    assert "differs from transformers" in result.plain
    assert "differs from transformers" in result.speculation
    assert not result.exact


def test_rollback_without_copies_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detect the fault when the model is loaded; the checks would also detect it."""
    monkeypatch.setattr(kv, "_copy", lambda value: value)
    (tmp_path / "one").mkdir()
    result = check_family("qwen3_next", tmp_path / "one")
    assert result.plain == OK
    assert "or cannot be rolled back" in result.speculation
    monkeypatch.setattr(inspection, "_resumes", lambda model: True)
    assert "differs from transformers" in check_family("qwen3_next", tmp_path).speculation


def test_gates_that_select_other_experts_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_router_norm", lambda calls, given: nn.LayerNorm(HIDDEN, elementwise_affine=False))
    monkeypatch.setattr(family_checks, "_speculation", lambda llm, expected: OK)
    assert check_family("olmoe", tmp_path).prediction != OK


# ---- many families


def test_crash_and_hang_affect_one_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(family: str, directory: Path, device: str) -> FamilyResult:
        if family == "crashes":
            os._exit(7)
        if family == "hangs":
            time.sleep(60)
        return FamilyResult(family, OK, OK, OK, OK)

    monkeypatch.setattr(family_checks, "check_family", check)
    monkeypatch.setattr(family_checks, "TIMEOUT", 1.0)
    done: list[str] = []
    results = check_families(
        ["fine", "crashes", "hangs", "fine too"], 2, lambda result, seconds: done.append(result.family)
    )
    assert [result.family for result in results] == ["fine", "crashes", "hangs", "fine too"]
    assert sorted(done) == sorted(result.family for result in results)
    assert [result.exact for result in results] == [True, False, False, True]
    assert results[1].loads == "its process ended with exit code 7"
    assert results[2].loads == "not finished after 1 s"


@pytest.mark.parametrize(("names", "code"), [([], 0), (["olmoe"], 0), (["olmoe", "mixtral"], 1)])
def test_command_fails_only_if_a_named_family_fails(
    names: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def check(family: str, directory: Path, device: str) -> FamilyResult:
        return FamilyResult(family, OK, OK, "wrong token" if family == "mixtral" else OK, OK)

    monkeypatch.setattr(family_checks, "check_family", check)
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["spmoe", "families", *names, "--json", "--markdown", str(page)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    answer = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in answer["families"]] == (names or list(families()))
    assert page.read_text().startswith("# Model families")


def test_command_rejects_unknown_family(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["spmoe", "families", "llama"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "has no MoE family llama" in capsys.readouterr().err


def test_command_rejects_unknown_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["spmoe", "families", "--device", "tpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "cpu or cuda, not 'tpu'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_family_passes_all_checks_on_cuda() -> None:
    assert check_families(["mixtral"], device="cuda") == [FamilyResult("mixtral", OK, OK, OK, OK, OK)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_formats_of_a_family_on_cuda() -> None:
    (result,) = check_families(["qwen3_moe"], device="cuda", formats=True)
    assert result == FormatsResult("qwen3_moe", dict.fromkeys(family_checks.FORMATS, OK))


def test_page_names_version_counts_and_reasons() -> None:
    page = markdown_page([FamilyResult("good", OK, OK, OK, OK), FamilyResult("bad", OK, OK, "wrong token", OK)], "5.99")
    assert "transformers 5.99" in page
    assert "2 loads, 2 plain, 1 speculation, 2 prediction" in " ".join(page.split())
    assert all(len(line) <= 100 for line in page.splitlines() if not line.startswith("|"))
    assert "| bad | ok | ok | no | ok |" in page
    assert "- bad, speculation: wrong token" in page


# ---- quantized formats


def only(*names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check only some formats."""
    formats = {name: family_checks.FORMATS[name] for name in names}
    monkeypatch.setattr(family_checks, "FORMATS", formats)


def test_formats_of_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only("gptq", "mxfp4", monkeypatch=monkeypatch)
    assert check_formats("gpt_oss", tmp_path) == FormatsResult("gpt_oss", {"gptq": NO_LAYOUT, "mxfp4": OK})


def test_fused_parameters_that_are_called_weight_are_quantized(tmp_path: Path) -> None:
    require_family("inkling2_text")
    save(tiny_model("inkling2_text"), tmp_path / "source")
    assert write_quantized(tmp_path / "source", tmp_path / "packed", tmp_path / "dense", "int8")
    source, packed = (Checkpoint.find(str(tmp_path / name)) for name in ("source", "packed"))
    experts = {name for name in source.tensors if ".experts.w" in name}
    assert experts
    assert experts <= packed.matrices.keys()


def test_wrong_zero_points_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only("gptq", monkeypatch=monkeypatch)
    assert check_formats("olmoe", tmp_path / "right").exact
    monkeypatch.setattr(quantized_matrices.Gptq1Matrix, "subtracted", 0)
    assert "differs from transformers" in check_formats("olmoe", tmp_path / "wrong").formats["gptq"]


def test_experts_that_do_not_stay_packed_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only("int8", monkeypatch=monkeypatch)
    monkeypatch.setattr(packed_experts.PackedExperts, "_find_format", lambda self: (None, "expanded, as tests want"))
    assert check_formats("olmoe", tmp_path).formats["int8"].startswith("expanded")


def test_formats_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def check(family: str, directory: Path, device: str) -> FormatsResult:
        if family == "mixtral":
            os._exit(7)
        return FormatsResult(family, dict.fromkeys(family_checks.FORMATS, OK))

    monkeypatch.setattr(family_checks, "check_formats", check)
    page = tmp_path / "page.md"
    for options in (["--json", "--markdown", str(page)], []):
        monkeypatch.setattr("sys.argv", ["spmoe", "families", "olmoe", "mixtral", "--formats", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        shown = capsys.readouterr().out
        if options:
            rows = json.loads(shown)["families"]
            assert rows[0] == {"family": "olmoe", "formats": dict.fromkeys(family_checks.FORMATS, OK)}
            assert rows[1]["formats"]["awq"] == "its process ended with exit code 7"
        else:
            assert "mixtral, awq: its process ended with exit code 7" in shown
            assert "1 of 2" in shown
    assert "| mixtral | no |" in page.read_text()


def test_formats_page() -> None:
    formats = dict.fromkeys(family_checks.FORMATS, OK)
    results = [FormatsResult("good", formats), FormatsResult("bad", {**formats, "awq": "wrong", "int4": NO_LAYOUT})]
    page = formats_page(results, "5.99")
    assert "transformers 5.99" in page
    assert "2 gptq, 1 awq" in " ".join(page.split())
    assert all(len(line) <= 100 for line in page.splitlines() if not line.startswith("|"))
    assert "| bad | ok | ok | - | ok | no | ok | ok |" in page
    assert "- bad, awq: wrong" in page
    assert "int4: -" not in page
