"""Fitting a projection, for drafts that are a rotated, wider or narrower copy of the target's dense part."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from checkpoints import (
    HIDDEN,
    TOP_K,
    Pair,
    byte_tokenizer,
    greedy_tokens,
    qwen3,
    qwen3_moe,
    reference,
    save,
    seeded,
    upcycle,
)
from spmoe import LLM, SamplingParams
from spmoe.bench.fit_predictor import Fit, fit_predictor
from spmoe.bench.predictability import measure_predictability
from spmoe.errors import PromptError, UsageError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.predictors import predictor_path, write_predictor
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.predict.policies.next_gate import NextGate

TEXT = Path(__file__).read_text()
OTHER_TEXT = (Path(__file__).parents[1] / "checkpoints.py").read_text()
WIDTHS = {"narrower": (24, HIDDEN), "as wide": (HIDDEN, HIDDEN), "wider": (48, HIDDEN)}  # of draft and target
CHANCE = TOP_K / 8


def rotated(model: Any, hidden: int) -> Any:
    """Build an equivalent model of another width, whose residual stream is the given model's times a matrix.

    The norms' weights are moved into the layers that follow them, since an RMS norm without weights commutes with a
    rotation.
    """
    small = model.state_dict()
    width = small["model.norm.weight"].shape[0]
    basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(width))).Q[:width]
    found = seeded(qwen3, 0, hidden_size=hidden)
    scale = (width / hidden) ** 0.5  # a norm's mean is over more dimensions
    weights = {}
    for name, weight in small.items():
        layer = name.rpartition("self_attn")[0] or name.rpartition("mlp")[0]
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name] = scale * (weight * small[f"{layer}input_layernorm.weight"]) @ basis
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights[name] = scale * (weight * small[f"{layer}post_attention_layernorm.weight"]) @ basis
        elif name == "lm_head.weight":
            weights[name] = scale * (weight * small["model.norm.weight"]) @ basis
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = basis.T @ weight
        elif name == "model.embed_tokens.weight":
            weights[name] = weight @ basis
        elif name.endswith(("layernorm.weight", "model.norm.weight")):
            weights[name] = torch.ones(hidden)
        else:
            weights[name] = weight
    found.load_state_dict(weights)
    return found


@pytest.fixture(scope="module", params=WIDTHS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Save a target and a rotated draft; the target's hidden states are a linear function of the draft's."""
    narrow, wide = sorted(WIDTHS[request.param])
    base = seeded(qwen3, 3, hidden_size=narrow)
    draft, source = (rotated(base, wide), base) if request.param != "narrower" else (base, rotated(base, wide))
    target = seeded(qwen3_moe, 4)
    upcycle(target, source, noise=0.05)
    root, tokenizer = tmp_path_factory.mktemp("pair"), byte_tokenizer()
    saved = save(draft, root / "draft", tokenizer)
    return Pair(save(target, root / "target", tokenizer), saved, saved)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))


def build(pair: Pair, **options: Any) -> LLM:
    return LLM(
        str(pair.target), str(pair.good), progress=False, expert_memory="50%", num_speculative_tokens=3, **options
    )


@cache
def _fit(pair: Pair) -> Fit:
    with build(pair, prefetch="on-demand", projection=False) as llm:
        reports: list[tuple[int, int]] = []
        found = fit_predictor(llm.engine, TEXT, 96, 20, lambda done, total: reports.append((done, total)))
        assert [done for done, _ in reports] == list(range(reports[0][1] + 1)), "progress counts up to the total"
    return found


def fit(pair: Pair) -> Fit:
    """Return the projection of a pair, fitted once per process, and write its file to the home of the test."""
    found = deepcopy(_fit(pair))
    write_predictor(*checkpoints_of(pair), found.projection, found.to_dict())
    return found


def checkpoints_of(pair: Pair) -> tuple[Checkpoint, Checkpoint]:
    return Checkpoint.find(str(pair.target)), Checkpoint.find(str(pair.good))


def recall(pair: Pair, **options: Any) -> float:
    with build(pair, prefetch="on-demand", **options) as llm:
        found = measure_predictability(llm.engine, OTHER_TEXT, 96, 6).mean().recall
        return found or 0.0  # None: the target's gates cannot read hidden states of another width


def test_rotated_model_is_equivalent(pair: Pair) -> None:
    base = seeded(qwen3, 3, hidden_size=24)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(base(tokens).logits, rotated(base, 40)(tokens).logits, atol=2e-3, rtol=1e-3)


def test_projection_is_recovered_and_works_on_other_text(pair: Pair) -> None:
    before = recall(pair)
    found = fit(pair)
    same_width = reference(pair.good).config.hidden_size == HIDDEN
    assert all(layer.after > 0.8 for layer in found.layers)
    assert all((layer.before is not None) == same_width for layer in found.layers)
    assert before < CHANCE + 0.2
    assert recall(pair) > 0.8
    assert recall(pair, projection=False) == pytest.approx(before)
    assert found.tokens == 4 * found.held_out


def test_fit_never_lowers_recall(qwen_pair: Pair) -> None:
    found = _fit(qwen_pair)
    for layer in found.layers:
        assert layer.before is not None
        assert layer.after >= layer.before > CHANCE


def test_engine_loads_projection_and_output_stays_exact(pair: Pair) -> None:
    expected = greedy_tokens(pair.target, [84, 104], 14)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    same_width = reference(pair.good).config.hidden_size == HIDDEN
    with build(pair, prefetch="draft-gate") as llm:
        assert llm.generate([84, 104], params)[0].token_ids == expected
        assert isinstance(llm.engine.loop.policy, DraftGate if same_width else NextGate)
        assert same_width or "`spmoe fit-predictor`" in llm.notices[0]
    fit(pair)
    for cutoff in ("all", "1", "auto"):
        with build(pair, prefetch="draft-gate", cutoff=cutoff) as llm:
            assert llm.generate([84, 104], params)[0].token_ids == expected
            assert llm.notices == []
            assert isinstance(llm.engine.loop.policy, DraftGate)
            counters = llm.engine.counters
            assert counters.prefetches_requested > 0
            projection = llm.engine.parts.projection
            assert projection is not None
            weights = llm.engine.target.resident_bytes + llm.engine.loop.drafter.runner.resident_bytes  # type: ignore[attr-defined]
            assert llm.engine.parts.memory.resident == weights + projection.nbytes
    with build(pair, prefetch="draft-gate", projection=False) as llm:
        assert llm.engine.parts.projection is None


@pytest.mark.parametrize("damage", ["other target", "other draft", "truncated", "not finite", "shape"])
def test_damaged_or_foreign_file_is_not_used(pair: Pair, damage: str) -> None:
    found = fit(pair)
    checkpoint, draft = checkpoints_of(pair)
    path = predictor_path(checkpoint, draft)
    if damage == "other target":
        shutil.move(write_predictor(replace(checkpoint, fingerprint="another"), draft, found.projection, {}), path)
    elif damage == "other draft":
        shutil.move(write_predictor(checkpoint, replace(draft, fingerprint="another"), found.projection, {}), path)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "not finite":
        found.projection.biases[0, 0, 0] = float("nan")
        write_predictor(checkpoint, draft, found.projection, {})
    else:
        found.projection.weights = found.projection.weights[:, :-1]
        write_predictor(checkpoint, draft, found.projection, {})
    with build(pair) as llm:
        assert llm.engine.parts.projection is None
        assert "is not used" in llm.notices[0]
        assert str(path) in llm.notices[0]


def test_file_has_metadata(pair: Pair) -> None:
    fit(pair)
    path = predictor_path(*checkpoints_of(pair))
    assert path.parent.name == "predictors"
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"
    with safe_open(path, framework="pt") as file:
        assert {"format", "target", "draft", "facts"} <= file.metadata().keys()


@pytest.mark.parametrize("text", [TEXT[:120], TEXT[:200]])
def test_short_text_is_rejected(pair: Pair, text: str) -> None:
    with (
        build(pair, prefetch="on-demand") as llm,
        pytest.raises(PromptError, match=r"too little text .* give a longer --text"),
    ):
        fit_predictor(llm.engine, text, 96, 20)


def test_fit_needs_a_draft_model(pair: Pair) -> None:
    for draft in ("ngram", "self:int8"):
        with LLM(str(pair.target), draft, progress=False) as llm, pytest.raises(UsageError, match="--draft"):
            fit_predictor(llm.engine, TEXT)
