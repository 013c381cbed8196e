"""The included pair and the targets in `extras/`: exactness, and the figures of their model cards."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmoe import LLM, SamplingParams
from spmoe.bench.predictability import Predictability, measure_predictability
from spmoe.models.shipped import ROOT, sample_text, shipped_pair

EXTRAS = Path(__file__).resolve().parent.parent / "extras"
FINE, DIVERSE = EXTRAS / "fine", EXTRAS / "diverse"
CLASS = "import os\n\nclass Reader:\n    def __init__(self, path):\n"
PROMPTS = ("def fibonacci(n):", CLASS)

with_fine = pytest.mark.skipif(not FINE.exists(), reason="the fine-grained target is not part of the package")
with_diverse = pytest.mark.skipif(not (DIVERSE / "figures.json").exists(), reason="extras/diverse has no weights")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", cutoff="all") as engine:
        yield engine


@pytest.fixture(scope="module")
def fine() -> Iterator[LLM]:
    _, draft = shipped_pair()
    with LLM(str(FINE), draft=draft, dtype="float32", cutoff="all") as engine:
        yield engine


@pytest.fixture(scope="module")
def diverse() -> Iterator[LLM]:
    _, draft = shipped_pair()
    with LLM(str(DIVERSE), draft=draft, dtype="float32", cutoff="all") as engine:
        yield engine


@pytest.fixture(scope="module")
def measured(llm: LLM) -> Predictability:
    return measure_predictability(llm.engine, sample_text(), window=256, windows=8)


def greedy_by_transformers(directory: str | Path, prompt: str, tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(directory)(prompt, return_tensors="pt").input_ids
    found: list[int] = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()
    return found


def check_card(directory: Path, measured: Predictability) -> None:
    """Check that figures.json has the measured values and that the model card contains all of them."""
    card: dict[str, float] = json.loads((directory / "figures.json").read_text())
    mean = measured.mean()
    found = {
        "greedy_agreement": measured.greedy_agreement,
        "sampling_acceptance": measured.sampling_acceptance,
        "largest_load": max(layer.largest_load for layer in measured.layers),
    }
    for name in ("cosine", "top1", "recall", "recall_plus_one", "union_recall", "union_precision"):
        found[name] = getattr(mean, name)
    if "previous_token" in card:
        found["previous_token"] = mean.previous_token
    assert found == pytest.approx(card, abs=0.01)
    text = (directory / "README.md").read_text()
    for name, value in card.items():
        assert f"{value:.3f}" in text, f"the card does not contain {name}"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_output_equals_transformers(llm: LLM, prompt: str) -> None:
    target, _ = shipped_pair()
    expected = greedy_by_transformers(target, prompt, 48)
    assert llm.generate(prompt, SamplingParams(max_tokens=48))[0].token_ids == expected


def test_output_is_valid_python(llm: LLM) -> None:
    text = llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64))[0].text
    assert text.startswith("\n    "), "the body of a function is indented"
    text = CLASS + llm.generate(CLASS, SamplingParams(max_tokens=64))[0].text
    whole = text.rpartition("\n\n")[0]  # the last statement may be cut off
    reader = ast.parse(whole).body[-1]
    assert isinstance(reader, ast.ClassDef)
    assert len(reader.body) > 1, f"no method after the first:\n{whole}"
    assert "self.path" in ast.unparse(reader), f"the argument is not stored:\n{whole}"


def test_draft_and_target_have_the_same_tokenizer() -> None:
    target, draft = (Path(directory) for directory in shipped_pair())
    assert (target / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = sample_text()
    assert tokenizer.decode(tokenizer(text, verbose=False).input_ids) == text


def test_pair_has_at_most_30_megabytes() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*.safetensors")) <= 30_000_000


def test_model_card_has_the_measured_figures(measured: Predictability) -> None:
    check_card(ROOT, measured)


def test_no_expert_is_used_by_more_than_half_of_the_tokens(measured: Predictability) -> None:
    busy = {number: layer.largest_load for number, layer in enumerate(measured.layers) if layer.largest_load > 0.5}
    assert not busy, "the model card says that the experts are balanced"


@with_fine
def test_fine_grained_target_equals_transformers(fine: LLM) -> None:
    expected = greedy_by_transformers(FINE, CLASS, 48)
    assert fine.generate(CLASS, SamplingParams(max_tokens=48))[0].token_ids == expected


@with_fine
def test_fine_grained_target_has_the_tokenizer_of_the_pair() -> None:
    assert (FINE / "tokenizer.json").read_bytes() == (ROOT / "draft" / "tokenizer.json").read_bytes()


@with_fine
def test_model_card_of_the_fine_grained_target_has_the_measured_figures(fine: LLM) -> None:
    measured = measure_predictability(fine.engine, sample_text(), window=256, windows=8)
    check_card(FINE, measured)
    assert all(layer.largest_load <= 0.5 for layer in measured.layers)


@with_diverse
def test_diverse_target_equals_transformers(diverse: LLM) -> None:
    expected = greedy_by_transformers(DIVERSE, CLASS, 48)
    assert diverse.generate(CLASS, SamplingParams(max_tokens=48))[0].token_ids == expected


@with_diverse
def test_diverse_target_has_the_tokenizer_of_the_pair_and_less_than_8_megabytes() -> None:
    assert (DIVERSE / "tokenizer.json").read_bytes() == (ROOT / "draft" / "tokenizer.json").read_bytes()
    assert sum(path.stat().st_size for path in DIVERSE.iterdir()) < 8_000_000


@with_diverse
def test_diverse_target_routes_consecutive_tokens_to_different_experts(diverse: LLM, measured: Predictability) -> None:
    found = measure_predictability(diverse.engine, sample_text(), window=256, windows=8)
    check_card(DIVERSE, found)
    assert all(layer.largest_load <= 0.5 for layer in found.layers)
    at_random = found.top_k / found.experts
    assert found.mean().previous_token <= 1.2 * at_random, "the model card says that routing is almost random"
    assert found.greedy_agreement < measured.greedy_agreement, "the model card says that the draft accepts less"
