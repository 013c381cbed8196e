"""The reference: transformers with one layer in memory at a time equals transformers with the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_mxfp4 import PROMPT as MXFP4_PROMPT
from test_mxfp4 import mxfp4_checkpoint  # noqa: F401  # a fixture
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralAttention

from checkpoints import greedy, longrope, mixtral, phimoe, qwen3_moe, qwen3_next, save, seeded
from checkpoints import reference as load_stock
from quantized_checkpoints import write_pair
from spmoe.errors import SpmoeError, UsageError
from spmoe.models import reference as module
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.families import save as save_family
from spmoe.models.families import tiny_model
from spmoe.models.reference import FORWARD, GENERATE, LAYERS, Reference, ReferencePlan, Scored, plan_reference

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 3, 17, 60, 2, 33, 8, 21, 5, 9, 44]])
PROMPT, OUTPUT = [5, 9, 3, 17], [60, 2, 33, 8, 21]


def open_reference(directory: Path, wanted: str, dtype: torch.dtype = torch.float32) -> Reference:
    checkpoint = Checkpoint.find(str(directory))
    return Reference(checkpoint, dtype, plan_reference(checkpoint, dtype, CPU, wanted))


def logits(directory: Path, wanted: str, dtype: torch.dtype = torch.float32) -> Tensor:
    with open_reference(directory, wanted, dtype) as reference, torch.inference_mode():
        return reference.model(input_ids=IDS, use_cache=False).logits  # type: ignore[no-any-return]


def stock_logits(directory: Path, dtype: torch.dtype) -> Tensor:
    """Run the model as any user of transformers loads it."""
    model = load_stock(directory, dtype)
    for parameter in model.parameters():  # mapped from the file; rounding depends on the alignment there
        parameter.data = parameter.data.clone()
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits  # type: ignore[no-any-return]


def scores(reference: Reference, *sequences: tuple[list[int], list[int]]) -> list[list[Scored]]:
    return [scored for _, scored in sorted(reference.score(sequences), key=lambda pair: pair[0])]


def memory(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: free)
    monkeypatch.setattr(module, "_MARGIN_BYTES", 0)


MODELS: dict[str, Callable[[], Any]] = {
    "per-layer attention": lambda: tiny_model("gpt_oss"),
    "dense first layer, shared experts, latent attention": lambda: tiny_model("deepseek_v3"),
    "shared expert with a gate": lambda: tiny_model("qwen2_moe"),
    "linear attention": lambda: seeded(qwen3_next, 3),
    "rotary embeddings in layers": lambda: tiny_model("deepseek_v4"),
    "tied embeddings": lambda: seeded(mixtral, 1, tie_word_embeddings=True),
    "dense layers between": lambda: seeded(qwen3_moe, 2, mlp_only_layers=[1]),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_one_at_a_time_equal_the_whole_model(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_family(MODELS[kind](), tmp_path)
    try:
        expected = stock_logits(tmp_path, dtype)
    except RuntimeError as error:  # DeepSeek-V4 in bfloat16 up to transformers 5.17
        pytest.skip(f"this version of transformers cannot run it ({error})")
    assert torch.equal(logits(tmp_path, LAYERS, dtype), expected)
    assert torch.equal(logits(tmp_path, FORWARD, dtype), expected)
    assert expected.std() > 0.01, "the logits say something"


@pytest.mark.parametrize("layout", ["per-expert", "fused", "sharded"])
def test_layouts_of_experts(layout: str, tmp_path: Path) -> None:
    save(seeded(mixtral, 4), tmp_path, layout=layout)
    assert torch.equal(logits(tmp_path, LAYERS), stock_logits(tmp_path, torch.float32))


@pytest.mark.parametrize("kind", ["fp8-block", "gptq-asym"])
def test_quantized_checkpoint_equals_its_dequantized_form(kind: str, tmp_path: Path) -> None:
    save_family(tiny_model("deepseek_v3"), tmp_path / "source")
    pair = write_pair(tmp_path / "source", tmp_path, kind)
    for dtype in (torch.float32, torch.bfloat16):
        expected = stock_logits(pair.dense, dtype)
        assert torch.equal(logits(pair.packed, LAYERS, dtype), expected)
        assert torch.equal(logits(pair.packed, FORWARD, dtype), expected)


def test_mxfp4_checkpoint_equals_its_dequantized_form(
    mxfp4_checkpoint: tuple[Path, list[int]],  # noqa: F811
) -> None:
    directory, expected = mxfp4_checkpoint
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(directory, LAYERS, dtype), logits(directory, FORWARD, dtype))
    with open_reference(directory, GENERATE) as reference:
        assert reference.generate(MXFP4_PROMPT, len(expected)).tokens == expected
    with open_reference(directory, LAYERS) as reference:
        assert [one.token for one in scores(reference, (MXFP4_PROMPT, expected))[0]] == expected


def loaded_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in model.parameters() if p.device.type != "meta")


def test_one_layer_at_a_time_is_in_memory(tmp_path: Path) -> None:
    save(seeded(mixtral, 5), tmp_path)
    with open_reference(tmp_path, LAYERS) as reference, torch.inference_mode():
        model, seen = reference.model, []
        resident = loaded_bytes(model)
        assert resident == sum(
            p.numel() * 4
            for p in [
                *model.model.embed_tokens.parameters(),
                *model.model.norm.parameters(),
                *model.lm_head.parameters(),
            ]
        )
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda *args: seen.append(loaded_bytes(model)))
        model(input_ids=IDS, use_cache=False)
        one_layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
        assert seen == [resident + one_layer] * 3
        assert loaded_bytes(model) == resident
        model.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            model(input_ids=IDS, use_cache=False)
        assert loaded_bytes(model) == resident, "a failure frees the layer too"


def fail(*args: object) -> None:
    raise RuntimeError("stop")


def test_sequences_of_several_lengths_share_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(seeded(qwen3_moe, 6), tmp_path)
    sequences = [(PROMPT, OUTPUT), ([7], [1, 2, 3, 4, 5, 6, 7, 8]), (list(range(30)), [9])]
    with open_reference(tmp_path, FORWARD) as whole:
        expected = [scores(whole, one)[0] for one in sequences]
    passes: list[int] = []
    checkpoint = Checkpoint.find(str(tmp_path))
    plan = plan_reference(checkpoint, torch.float32, CPU, LAYERS)
    with Reference(checkpoint, torch.float32, plan, lambda done, total: passes.append(done)) as layered:
        found = scores(layered, *sequences)
        assert passes == [1, 2, 3], "one pass"
        monkeypatch.setattr(module, "_MAX_BATCH_TOKENS", 40)
        assert [[one.token for one in s] for s in scores(layered, *sequences)] == [
            [one.token for one in s] for s in expected
        ]
        assert passes == [1, 2, 3] * 3, "two more: 9 and 9 tokens, and 31"
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.token for one in ours] == [one.token for one in theirs]
        for name in ("logit", "own_logit"):
            assert [getattr(one, name) for one in ours] == pytest.approx(
                [getattr(one, name) for one in theirs], abs=1e-4
            )


def test_scores_are_logits_before_each_token_of_the_output(tmp_path: Path) -> None:
    save(seeded(mixtral, 7), tmp_path)
    stock = load_stock(tmp_path)
    expected = greedy(stock, PROMPT, 6)
    with open_reference(tmp_path, GENERATE) as reference:
        generated = reference.generate(PROMPT, 6)
        (found,) = scores(reference, (PROMPT, expected))
        (others,) = scores(reference, (PROMPT, OUTPUT))
    assert generated.tokens == expected
    assert [one.token for one in found] == expected
    assert all(one.logit == one.own_logit for one in found)
    with torch.inference_mode():
        rows = stock(input_ids=torch.tensor([[*PROMPT, *OUTPUT]]), use_cache=False).logits[0]
    for index, one in enumerate(others):
        row = rows[len(PROMPT) - 1 + index]
        assert one.token == int(row.argmax())
        assert (one.logit, one.own_logit) == pytest.approx((float(row.max()), float(row[OUTPUT[index]])), abs=1e-4)
    first = generated.score(2, 11)
    assert first.token == expected[2]
    assert first.own_logit < first.logit


def test_settings_of_the_checkpoint_do_not_change_greedy_search(tmp_path: Path) -> None:
    save(seeded(mixtral, 8), tmp_path)
    expected = greedy(load_stock(tmp_path), PROMPT, 8)
    settings = {"repetition_penalty": 5.0, "do_sample": True, "temperature": 2.0, "eos_token_id": expected[0]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with open_reference(tmp_path, GENERATE) as reference:
        assert reference.generate(PROMPT, 8).tokens == expected


def test_longrope_is_compared_up_to_its_switch(tmp_path: Path) -> None:
    save(seeded(phimoe, 9, rope_parameters=longrope(8), max_position_embeddings=64), tmp_path)
    with open_reference(tmp_path, LAYERS) as reference:
        found = scores(reference, (PROMPT, OUTPUT), (list(range(9)), OUTPUT), ([1, 2], [3]))
    assert [len(one) for one in found] == [4, 5, 1]


def test_plan_follows_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(seeded(mixtral, 10), tmp_path)
    checkpoint = Checkpoint.find(str(tmp_path))

    def plan(wanted: str = "auto", dtype: torch.dtype = torch.float32) -> ReferencePlan:
        return plan_reference(checkpoint, dtype, CPU, wanted)

    whole = plan()
    assert (whole.method, whole.whole, whole.notes) == (GENERATE, True, ())
    assert whole.weight_bytes == sum(p.numel() * 4 for p in load_stock(tmp_path).parameters())
    assert plan(dtype=torch.bfloat16).weight_bytes == whole.weight_bytes // 2
    assert (plan(FORWARD).method, plan(FORWARD).whole) == (FORWARD, True)
    assert (plan(LAYERS).method, plan(LAYERS).whole) == (LAYERS, False)
    memory(whole.weight_bytes + whole.layer_bytes - 1, monkeypatch)
    for wanted in ("auto", FORWARD):
        layered = plan(wanted)
        assert (layered.method, layered.whole) == (LAYERS, False)
        assert "layer by layer" in layered.notes[0]
    with pytest.raises(UsageError, match=r"--reference generate needs .* are free; use --reference layers"):
        plan(GENERATE)
    assert plan(dtype=torch.bfloat16).whole
    memory(whole.layer_bytes, monkeypatch)
    with pytest.raises(UsageError, match="one layer at a time"):
        plan()


def test_plan_on_a_cuda_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(seeded(mixtral, 14), tmp_path)
    checkpoint, cuda = Checkpoint.find(str(tmp_path)), torch.device("cuda", 0)
    memory(2**40, monkeypatch)
    found = []
    whole = plan_reference(checkpoint, torch.float32, CPU, "auto").weight_bytes
    for free in (2**40, whole, 1000):
        monkeypatch.setattr(module, "free_memory", lambda device, free=free: free)
        plan = plan_reference(checkpoint, torch.float32, cuda, "auto")
        found.append((plan.method, plan.device.type, len(plan.notes)))
    assert found == [(GENERATE, "cuda", 0), (LAYERS, "cuda", 1), (LAYERS, "cpu", 2)]
    assert "whose kernels round differently" in plan.notes[1]
    memory(whole, monkeypatch)  # a whole model is loaded into host memory first
    monkeypatch.setattr(module, "free_memory", lambda device: 2**40)
    assert plan_reference(checkpoint, torch.float32, cuda, "auto").method == LAYERS


def test_failure_of_transformers_is_one_line(tmp_path: Path) -> None:
    save(seeded(mixtral, 11), tmp_path)
    with open_reference(tmp_path, GENERATE) as reference:
        reference.model.lm_head.register_forward_hook(fail)
        for call in (lambda: reference.generate(PROMPT, 2), lambda: scores(reference, (PROMPT, OUTPUT))):
            with pytest.raises(SpmoeError, match=r"cannot run .*stop.*--reference"):
                call()


def test_buffers_that_are_computed_from_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(seeded(mixtral, 13), tmp_path)
    make = MixtralAttention.__init__

    def with_buffer(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    monkeypatch.setattr(MixtralAttention, "__init__", with_buffer)
    with pytest.raises(SpmoeError, match="MixtralAttention in its layers needs all weights"):
        open_reference(tmp_path, LAYERS)


def test_missing_layer_weights_are_an_error(tmp_path: Path) -> None:
    save(seeded(mixtral, 12), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with (
        open_reference(tmp_path, LAYERS) as reference,
        pytest.raises(SpmoeError, match=r"layers\.1\.self_attn\.q_proj"),
    ):
        scores(reference, (PROMPT, OUTPUT))
    with pytest.raises(SpmoeError, match=r"no weights for model\.layers\.1\.self_attn\.q_proj"):
        open_reference(tmp_path, FORWARD)
