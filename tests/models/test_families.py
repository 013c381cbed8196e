"""Families: what the proof says of a dozen, and that it can say no."""

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

from spmoe import LLM, SamplingParams
from spmoe.backends import cpu
from spmoe.bench import families as proof
from spmoe.bench.families import OK, VerifyResult, prove, prove_all
from spmoe.bench.families_page import markdown, short
from spmoe.cli.main import main
from spmoe.engine import loading
from spmoe.errors import UsageError
from spmoe.models import inspection, kv
from spmoe.models.experts_seam import experts_modules
from spmoe.models.families import HIDDEN, families, reference_tokens, tiny_config, tiny_model
from spmoe.models.runner import ModelRunner
from spmoe.types import PrefetchRequests

CHOSEN = (
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
def _shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "COUNT", 12)


@pytest.mark.parametrize("family", CHOSEN)
def test_a_family_is_exact_and_predictable(family: str, tmp_path: Path) -> None:
    assert prove(family, tmp_path) == VerifyResult(family, OK, OK, OK, OK)


@pytest.mark.parametrize("family", ["jamba", "nemotron_h"])
def test_a_family_that_makes_something_else_of_several_tokens_at_once_decodes_plainly(
    family: str, tmp_path: Path
) -> None:
    """Jamba forgets its state then, and Nemotron-H bounds its time steps only then."""
    result = prove(family, tmp_path)
    assert (result.loads, result.plain) == (OK, OK)
    assert f"{family} keeps a state" in result.speculation
    assert "without speculation" in result.speculation


def test_layers_with_gates_predict_where_others_have_none(tmp_path: Path) -> None:
    """DeepSeek-V4 picks the experts of its first layers by token: there is no gate to ask about a hidden state."""
    result = prove("deepseek_v4", tmp_path)
    assert result == VerifyResult("deepseek_v4", OK, OK, OK, "in part: no router was found for 1 of 3 MoE layers")
    assert short(result.prediction) == "in part"
    target = next(path for path in sorted(tmp_path.glob("target-*")))
    options = {"num_speculative_tokens": 3, "cutoff": "all", "dtype": "float32", "progress": False}
    for prefetch in ("draft-gate", "next-gate", "draft-gate+next-gate"):
        wished: set[int] = set()
        with LLM(str(target), str(tmp_path / "draft"), device="cpu", prefetch=prefetch, **options) as llm:  # type: ignore[arg-type]
            engine = llm.engine
            gated, sound = set(engine.target.gated), engine.loop.policy.on_chunk
            assert 0 < len(gated) < len(engine.target.moe)
            assert any("1 of 3 MoE layers have no gate" in notice for notice in llm.notices)

            def on_chunk(seen: Any, wished: set[int] = wished, sound: Any = sound) -> PrefetchRequests:
                prefetches: PrefetchRequests = sound(seen)
                wished |= set(prefetches.layers.tolist())
                return prefetches

            engine.loop.policy.on_chunk = on_chunk  # type: ignore[method-assign]
            llm.generate(proof.PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
        assert wished == gated


def test_layers_may_have_experts_of_other_sizes_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family is like that; a model built with another configuration for its second layer is."""
    sound, made = modeling_olmoe.OlmoeSparseMoeBlock.__init__, []

    def make(self: Any, config: Any) -> None:
        made.append(self)
        own = deepcopy(config)
        if len(made) % 3 == 2:
            own.intermediate_size, own.num_local_experts, own.num_experts = 56, 5, 5
        sound(self, own)
        self.experts.config = config

    monkeypatch.setattr(modeling_olmoe.OlmoeSparseMoeBlock, "__init__", make)
    shapes = [tuple(experts.gate_up_proj.shape) for _, experts in experts_modules(tiny_model("olmoe"))]
    assert shapes == [(8, 80, HIDDEN), (5, 112, HIDDEN), (8, 80, HIDDEN)]
    assert prove("olmoe", tmp_path) == VerifyResult("olmoe", OK, OK, OK, OK)


def test_the_text_model_of_a_checkpoint_that_also_sees(tmp_path: Path) -> None:
    text = tiny_config("qwen3_5_moe_text")
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
    config = Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config={**eyes, "num_position_embeddings": 16})
    torch.manual_seed(0)
    Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path)
    expected = reference_tokens(tmp_path, proof.PROMPT, 6)
    with LLM(str(tmp_path), expert_memory="50%", dtype="float32", progress=False) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        assert llm.generate(proof.PROMPT, params)[0].token_ids == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2", "stablelm"])
def test_drafts_of_many_families_can_be_tapped(family: str) -> None:
    """The tap is the residual stream between attention and feed-forward, wherever a family puts its norms."""
    config = tiny_config(family)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    runner, taps, outputs = ModelRunner(model), [], []
    assert runner.has_hidden_states
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()  # then a layer adds nothing more, and its output is the tap
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    runner.forward([3, 1, 4], runner.new_kv(3), keep=1, on_hidden_states=lambda depth, residual: taps.append(residual))
    assert len(taps) == config.num_hidden_layers
    assert all(torch.equal(tap, output.reshape(tap.shape)) for tap, output in zip(taps, outputs, strict=True))
    assert not torch.equal(taps[0], taps[1])


# ---- the list and the tiny configurations


def test_the_list_is_that_of_transformers() -> None:
    found = families()
    assert set(CHOSEN) | {"mixtral", "qwen3_moe"} <= found.keys()
    assert not {"llama", "mistral", "qwen3", "gpt2"} & found.keys(), "dense models have no experts"
    with pytest.raises(UsageError, match="llama is no MoE family"):
        tiny_model("llama")


@pytest.mark.parametrize("family", CHOSEN)
def test_a_tiny_model_is_tiny_and_has_every_kind_of_layer(family: str) -> None:
    config, whole = tiny_config(family), type(tiny_config(family))()
    assert config.hidden_size == HIDDEN
    assert config.num_hidden_layers <= 5
    kinds = {kind for name in ("layer_types", "mlp_layer_types") for kind in getattr(whole, name, None) or ()}
    assert kinds <= {kind for name in ("layer_types", "mlp_layer_types") for kind in getattr(config, name, None) or ()}
    model = tiny_model(family)
    assert sum(p.numel() for p in model.parameters()) < 2e5
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_model(family).parameters(), strict=True))
    assert any(True for _ in experts_modules(model))


# ---- the proof fails where something is wrong


def _spoil_model(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[nn.Module], None]) -> None:
    """Change the target as the engine loads it, and not as transformers does."""
    sound = loading.load_without_experts

    def load(*args: Any) -> Any:
        model = sound(*args)
        for module in model.modules():
            spoil(module)
        return model

    monkeypatch.setattr(loading, "load_without_experts", load)


def drop_the_routers_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: nn.Module) -> None:
        for name, tensor in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
            if name == "e_score_correction_bias":
                tensor.zero_()

    _spoil_model(monkeypatch, spoil)


def normalise_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: Any) -> None:
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = not module.norm_topk_prob

    _spoil_model(monkeypatch, spoil)


def swap_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = cpu.run_expert

    def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        gate, up = tensors["gate_up_proj"].chunk(2)
        return sound(experts, {**tensors, "gate_up_proj": torch.cat([up, gate])}, x)

    monkeypatch.setattr(cpu, "run_expert", run_expert)


def drop_the_experts_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = cpu.run_expert

    def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        kept = {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
        return sound(experts, kept, x)

    monkeypatch.setattr(cpu, "run_expert", run_expert)


@pytest.mark.parametrize(
    ("family", "sabotage"),
    [
        ("deepseek_v3", drop_the_routers_bias),
        ("qwen3_moe", normalise_otherwise),
        ("qwen2_moe", swap_gate_and_up),
        ("gpt_oss", drop_the_experts_bias),
    ],
)
def test_a_wrong_router_or_expert_is_found_out(
    family: str, sabotage: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    result = prove(family, tmp_path)
    assert result.loads == OK
    assert "differs from what transformers writes" in result.plain
    assert "differs from what transformers writes" in result.speculation
    assert not result.holds


def test_a_rollback_to_a_state_that_went_on_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: when the model is loaded, and by the proof if that had passed."""
    monkeypatch.setattr(kv, "_copy", lambda value: value)
    (tmp_path / "one").mkdir()
    result = prove("qwen3_next", tmp_path / "one")
    assert result.plain == OK
    assert "or cannot be rolled back" in result.speculation
    monkeypatch.setattr(inspection, "_resumes", lambda model: True)
    assert "differs from what transformers writes" in prove("qwen3_next", tmp_path).speculation


def test_gates_that_name_other_experts_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        inspection, "_before_router", lambda calls, given: nn.LayerNorm(HIDDEN, elementwise_affine=False)
    )
    monkeypatch.setattr(proof, "_speculation", lambda llm, expected: OK)
    assert prove("olmoe", tmp_path).prediction != OK


# ---- many at once


def test_a_crash_and_a_hang_cost_one_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(family: str, directory: Path, device: str) -> VerifyResult:
        if family == "crashes":
            os._exit(7)
        if family == "hangs":
            time.sleep(60)
        return VerifyResult(family, OK, OK, OK, OK)

    monkeypatch.setattr(proof, "prove", act)
    monkeypatch.setattr(proof, "TIMEOUT", 1.0)
    seen: list[str] = []
    verdicts = prove_all(
        ["fine", "crashes", "hangs", "fine too"], 2, lambda result, seconds: seen.append(result.family)
    )
    assert [v.family for v in verdicts] == ["fine", "crashes", "hangs", "fine too"]
    assert sorted(seen) == sorted(v.family for v in verdicts)
    assert [v.holds for v in verdicts] == [True, False, False, True]
    assert verdicts[1].loads == "its process ended with exit code 7"
    assert verdicts[2].loads == "not done after 1 s"


@pytest.mark.parametrize(("names", "code"), [([], 0), (["olmoe"], 0), (["olmoe", "mixtral"], 1)])
def test_the_command_fails_only_where_a_family_asked_for_by_name_does(
    names: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def act(family: str, directory: Path, device: str) -> VerifyResult:
        return VerifyResult(family, OK, OK, "it did not" if family == "mixtral" else OK, OK)

    monkeypatch.setattr(proof, "prove", act)
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["spmoe", "families", *names, "--json", "--markdown", str(page)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    answer = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in answer["families"]] == (names or list(families()))
    assert page.read_text().startswith("# Families")


def test_the_command_refuses_what_is_no_family(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["spmoe", "families", "llama"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "has no MoE family llama" in capsys.readouterr().err


def test_the_command_refuses_a_device_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["spmoe", "families", "--device", "tpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "cpu or cuda, not 'tpu'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_family_is_exact_on_a_device_too() -> None:
    assert prove_all(["mixtral"], device="cuda") == [VerifyResult("mixtral", OK, OK, OK, OK, OK)]


def test_the_page_says_what_made_it_and_why_not() -> None:
    page = markdown([VerifyResult("good", OK, OK, OK, OK), VerifyResult("bad", OK, OK, "it did not", OK)], "5.99")
    assert "transformers 5.99" in page
    assert "2 loads, 2 plain, 1 speculation, 2 prediction" in page
    assert "| bad | ok | ok | no | ok |" in page
    assert "- bad, speculation: it did not" in page
