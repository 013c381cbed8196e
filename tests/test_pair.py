"""The pair that ships: it loads anywhere, says the same in transformers and here, and its card tells the truth.

So does the fine-grained target beside it, which is in the repository only.
"""

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

FINE = Path(__file__).resolve().parent.parent / "extras" / "fine"
CLASS = "import os\n\nclass Reader:\n    def __init__(self, path):\n"
PROMPTS = ("def fibonacci(n):", CLASS)

with_fine = pytest.mark.skipif(not FINE.exists(), reason="the fine-grained target is in the repository only")


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
def measured(llm: LLM) -> Predictability:
    return measure_predictability(llm.engine, sample_text(), window=256, windows=8)


def greedy_by_transformers(directory: str | Path, prompt: str, tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(directory)(prompt, return_tensors="pt").input_ids
    found: list[int] = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()
    return found


def check_card(directory: Path, measured: Predictability) -> None:
    """The figures beside a card are what is measured, and the card gives them all."""
    card: dict[str, float] = json.loads((directory / "figures.json").read_text())
    mean = measured.mean()
    found = {
        "greedy_agreement": measured.greedy_agreement,
        "sampling_acceptance": measured.sampling_acceptance,
        "largest_load": max(layer.largest_load for layer in measured.layers),
    }
    for name in ("cosine", "top1", "recall", "recall_plus_one", "union_recall", "union_precision"):
        found[name] = getattr(mean, name)
    assert found == pytest.approx(card, abs=0.01)
    text = (directory / "README.md").read_text()
    for name, value in card.items():
        assert f"{value:.3f}" in text, f"the card does not give {name}"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_transformers_says_the_same(llm: LLM, prompt: str) -> None:
    target, _ = shipped_pair()
    expected = greedy_by_transformers(target, prompt, 48)
    assert llm.generate(prompt, SamplingParams(max_tokens=48))[0].token_ids == expected


def test_writes_something_like_python(llm: LLM) -> None:
    text = llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64))[0].text
    assert text.startswith("\n    "), "the body of a function is indented"
    text = CLASS + llm.generate(CLASS, SamplingParams(max_tokens=64))[0].text
    whole = text.rpartition("\n\n")[0]  # the last statement may be cut off
    reader = ast.parse(whole).body[-1]
    assert isinstance(reader, ast.ClassDef)
    assert len(reader.body) > 1, f"no method after the first:\n{whole}"
    assert "self.path" in ast.unparse(reader), f"the argument is not kept:\n{whole}"


def test_draft_and_target_read_the_same_tokens() -> None:
    target, draft = (Path(directory) for directory in shipped_pair())
    assert (target / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = sample_text()
    assert tokenizer.decode(tokenizer(text, verbose=False).input_ids) == text


def test_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*.safetensors")) <= 30_000_000


def test_the_card_gives_the_figures_that_are_measured(measured: Predictability) -> None:
    check_card(ROOT, measured)


def test_no_expert_takes_more_than_half_of_the_tokens(measured: Predictability) -> None:
    busy = {layer: one.largest_load for layer, one in enumerate(measured.layers) if one.largest_load > 0.5}
    assert not busy, "the card says that the experts are in balance"


@with_fine
def test_the_fine_grained_target_says_the_same_in_transformers(fine: LLM) -> None:
    expected = greedy_by_transformers(FINE, CLASS, 48)
    assert fine.generate(CLASS, SamplingParams(max_tokens=48))[0].token_ids == expected


@with_fine
def test_the_fine_grained_target_reads_the_pair_s_tokens() -> None:
    assert (FINE / "tokenizer.json").read_bytes() == (ROOT / "draft" / "tokenizer.json").read_bytes()


@with_fine
def test_the_card_of_the_fine_grained_target_gives_the_figures_that_are_measured(fine: LLM) -> None:
    measured = measure_predictability(fine.engine, sample_text(), window=256, windows=8)
    check_card(FINE, measured)
    assert all(one.largest_load <= 0.5 for one in measured.layers)
