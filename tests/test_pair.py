"""The pair that ships: it loads anywhere, says the same in transformers and here, and its card tells the truth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmoe import LLM, SamplingParams
from spmoe.bench.predictability import Predictability, measure_predictability
from spmoe.models.shipped import ROOT, sample_text, shipped_pair

PROMPTS = ("def fibonacci(n):", "import os\n\nclass Reader:\n    def __init__(self, path):\n")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", cutoff="none") as engine:
        yield engine


@pytest.fixture(scope="module")
def card() -> dict[str, float]:
    figures: dict[str, float] = json.loads((ROOT / "figures.json").read_text())
    return figures


@pytest.fixture(scope="module")
def measured(llm: LLM) -> Predictability:
    return measure_predictability(llm.engine, sample_text(), window=256, windows=8)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_transformers_says_the_same(llm: LLM, prompt: str) -> None:
    target, _ = shipped_pair()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(target)(prompt, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :].tolist()
    assert llm.generate(prompt, SamplingParams(max_tokens=48))[0].token_ids == expected


def test_writes_something_like_python(llm: LLM) -> None:
    text = llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64))[0].text
    assert text.startswith("\n    "), "the body of a function is indented"
    assert "return" in text.lower()


def test_draft_and_target_read_the_same_tokens() -> None:
    target, draft = (Path(directory) for directory in shipped_pair())
    assert (target / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = sample_text()
    assert tokenizer.decode(tokenizer(text, verbose=False).input_ids) == text


def test_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*.safetensors")) <= 30_000_000


def test_the_card_gives_the_figures_that_are_measured(measured: Predictability, card: dict[str, float]) -> None:
    mean = measured.mean()
    assert measured.greedy_agreement == pytest.approx(card["greedy_agreement"], abs=0.01)
    assert measured.sampling_acceptance == pytest.approx(card["sampling_acceptance"], abs=0.01)
    for name in ("cosine", "top1", "recall", "recall_plus_one", "union_recall", "union_precision"):
        assert getattr(mean, name) == pytest.approx(card[name], abs=0.01), name
    text = (ROOT / "README.md").read_text()
    for name, value in card.items():
        assert f"{value:.3f}" in text, f"the card does not give {name}"


def test_the_card_names_the_layers_where_one_expert_takes_most_tokens(measured: Predictability) -> None:
    busy = [str(layer) for layer, one in enumerate(measured.layers) if one.largest_load > 0.55]
    text = (ROOT / "README.md").read_text()
    named = text.partition("More than half of the tokens go to one expert in layers ")[2].partition(".")[0]
    assert set(busy) <= set(named.replace(" and ", ", ").split(", "))
