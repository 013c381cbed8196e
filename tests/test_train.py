"""The training recipe: conversion to and from transformers, upcycling, losses, and a small run of all scripts."""

from __future__ import annotations

import importlib
import json
import lzma
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from spmoe.models.shipped import ROOT as PAIR

TRAIN = Path(__file__).parents[1] / "train"
NAMES = ("network", "muon", "convert", "train", "evaluate", "export", "corpus")
TINY = {"vocab": 64, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 24}

pytestmark = pytest.mark.skipif(not TRAIN.exists(), reason="the recipe is not part of the package")


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    """Import the scripts, which import each other by their plain names."""
    sys.path.insert(0, str(TRAIN))
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in NAMES}
    yield SimpleNamespace(**modules)
    sys.path.remove(str(TRAIN))
    for name in NAMES:
        del sys.modules[name]


def tiny(recipe: SimpleNamespace, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return recipe.network.Decoder(recipe.network.Shape(**{**TINY, **sizes})).eval()


SPARSE = {"experts": 4, "top_k": 2, "ffn": 8}
SHARED = {**SPARSE, "shared": 8, "attention_bias": True}


@pytest.mark.parametrize("sizes", [{}, SPARSE, SHARED], ids=["mistral", "mixtral", "qwen2-moe"])
def test_an_exported_model_computes_and_reads_back_the_same(
    recipe: SimpleNamespace, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    model = tiny(recipe, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # biases and norms too
            parameter.copy_(parameter.bfloat16())  # as in the file
    recipe.convert.to_transformers(model).save_pretrained(tmp_path)
    back = recipe.convert.from_transformers(tmp_path)
    assert back.shape == model.shape
    for (name, ours), (_, read) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        torch.testing.assert_close(read, ours, rtol=0, atol=0, msg=name)
    tokens = torch.randint(64, (2, 12))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(back(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_experts_start_as_parts_of_the_dense_layer(recipe: SimpleNamespace) -> None:
    dense = tiny(recipe)
    shape = recipe.network.Shape(**{**TINY, "experts": 5, "top_k": 2, "ffn": 8})  # more than the 3 parts there are
    sparse = recipe.train.upcycle(dense, shape, noise=0.0)
    for ours, theirs in zip(sparse.layers, dense.layers, strict=True):
        for name, scale in (("gate", 1), ("up", 1), ("down", 2)):
            parts = getattr(theirs.ffn, name)[0].unflatten(0, (3, 8))
            assert torch.equal(getattr(ours.ffn, name), scale * parts[[0, 1, 2, 0, 1]])
    assert torch.equal(sparse.embed.weight, dense.embed.weight)


def test_whole_copies_make_the_dense_model(recipe: SimpleNamespace) -> None:
    dense = tiny(recipe)
    sparse = recipe.train.upcycle(dense, recipe.network.Shape(**{**TINY, "experts": 4}), noise=0.0)
    tokens = torch.randint(64, (2, 12))
    torch.testing.assert_close(sparse(tokens).logits, dense(tokens).logits, rtol=1e-4, atol=1e-4)


def test_distance_of_hidden_states_is_zero_for_equal_and_one_for_unrelated_models(recipe: SimpleNamespace) -> None:
    model = tiny(recipe)
    tokens = torch.randint(64, (4, 32))
    with torch.no_grad():
        output = model(tokens)
    assert float(recipe.train.distance(output, output)) == pytest.approx(0, abs=1e-6)
    unrelated = output._replace(taps=[torch.randn_like(tap) for tap in output.taps])
    assert float(recipe.train.distance(output, unrelated)) == pytest.approx(1, abs=0.1)


def test_overlap_is_one_for_even_probabilities_and_zero_for_disjoint_experts(recipe: SimpleNamespace) -> None:
    span, overlap = recipe.network.SPAN, recipe.network.overlap
    chosen = torch.eye(span).repeat(1, 4, 1)  # every token has an expert of its own, again after SPAN tokens
    assert overlap(chosen, chosen, 1) == 0
    assert overlap(torch.full_like(chosen, 1 / span), chosen, 1) == pytest.approx(1)
    same = torch.zeros(1, 20, span)
    same[..., 0] = 1
    assert overlap(same, same, 1) == pytest.approx(span)


def test_evaluation_counts_the_experts_of_consecutive_tokens(recipe: SimpleNamespace) -> None:
    span = recipe.network.SPAN
    probs = torch.eye(2 * span)[None].repeat(1, 2, 1)[..., : 2 * span]  # two experts per token: its own and expert 0
    probs = probs + 0.5 * torch.nn.functional.one_hot(torch.tensor(0), 2 * span)
    figures = recipe.evaluate._compare(probs, probs, 2)
    assert figures["recall"] == 1
    # a token that is expert 0's own has a second expert at random (a tie), which no neighbour has to have
    assert figures["previous_token"] == pytest.approx(0.5, abs=0.1)
    assert figures["distinct"] == pytest.approx(span + 1, abs=0.6)


def write_corpus(directory: Path) -> None:
    directory.mkdir()
    chance = np.random.default_rng(0)
    for split in ("train", "heldout"):
        steps = chance.integers(1, 4, 4000)
        tokens = (np.cumsum(steps) % 64).astype("<u2")
        (directory / f"{split}.u16.xz").write_bytes(lzma.compress(tokens.tobytes()))


def test_a_stage_starts_from_a_checkpoint_resumes_and_is_evaluated_and_exported(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "data")
    recipe.convert.to_transformers(tiny(recipe)).save_pretrained(tmp_path / "draft")
    network, train = recipe.network, recipe.train
    shape = network.Shape(**{**TINY, **SPARSE})
    stage = train.Stage(shape, 12, 0.02, 4e-3, parent="absent", noise=1.0, overlap=0.3, align=0.5)
    monkeypatch.setitem(train.STAGES, "diverse", stage)
    for module in (train, recipe.evaluate):
        monkeypatch.setattr(module, "BATCH", 4)
        monkeypatch.setattr(module, "WINDOW", 32)

    def run(module: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *arguments])
        module.main()
        return capsys.readouterr().out

    def place(runs: str) -> list[str]:
        return ["--data", str(tmp_path / "data"), "--runs", str(tmp_path / runs), "--device", "cpu"]

    start = ["diverse", "--from", str(tmp_path / "draft"), "--save-every", "5"]
    assert "step 0 of 12" in run(train, *start, *place("whole"))

    real, drawn = train.batch, []

    def interrupted(*args: Any) -> Any:
        if len(drawn) == 11:  # in step 11, after the checkpoint of step 10
            raise KeyboardInterrupt
        drawn.append(args)
        return real(*args)

    monkeypatch.setattr(train, "batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(train, *start, *place("stopped"))
    with pytest.raises(SystemExit, match="not complete"):
        train.load("diverse", tmp_path / "stopped", "cpu")
    monkeypatch.setattr(train, "batch", real)
    assert "step 10 of 12" in run(train, *start, *place("stopped"))
    assert "complete at step 12" in run(train, *start, *place("stopped"))
    whole, resumed = (train.load("diverse", tmp_path / runs, "cpu") for runs in ("whole", "stopped"))
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)

    printed = run(recipe.evaluate, "diverse", "--draft", str(tmp_path / "draft"), "--windows", "8", *place("whole"))
    assert "previous_token" in printed
    figures = json.loads((tmp_path / "whole" / "diverse.evaluation.json").read_text())
    assert 2 <= sum(figures["distinct"]) / 2 <= 4
    assert figures["distinct_random"] == pytest.approx(4 * (1 - 0.5**5))
    assert 0 < figures["agreement"] < 1

    run(
        recipe.export,
        "diverse",
        "--runs",
        str(tmp_path / "whole"),
        "--tokenizer",
        str(PAIR / "draft"),
        "--out",
        str(tmp_path),
    )
    exported = {path.name for path in (tmp_path / "diverse").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= exported
    tokens = torch.randint(64, (1, 8))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "diverse", dtype=torch.float32)
    torch.testing.assert_close(model(tokens).logits, whole(tokens).logits, rtol=0.05, atol=0.05)  # bfloat16 weights


def test_a_checkpoint_that_is_not_there_is_named(recipe: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither a stage nor a checkpoint"):
        recipe.train.load(str(tmp_path / "nothing"), tmp_path, "cpu")
    with pytest.raises(SystemExit, match="run it first"):
        recipe.train.load("base", tmp_path, "cpu")


def test_a_part_of_the_corpus_keeps_the_held_out_packages(recipe: SimpleNamespace) -> None:
    pins = recipe.corpus.read_pins(TRAIN / "packages.toml")
    part = recipe.corpus.thin_out(pins, 80)
    assert [pin for pin in part if pin.heldout] == [pin for pin in pins if pin.heldout]
    training = [pin for pin in pins if not pin.heldout]
    kept = [training.index(pin) for pin in part if not pin.heldout]
    assert len(kept) == 80
    assert max(b - a for a, b in pairwise(kept)) <= len(training) // 80 + 1
    assert recipe.corpus.thin_out(pins, len(training)) == pins
    with pytest.raises(SystemExit, match="--training-packages is 0"):
        recipe.corpus.thin_out(pins, 0)


def test_a_tokenizer_of_another_model_is_refused(recipe: SimpleNamespace, tmp_path: Path) -> None:
    assert recipe.corpus.read_tokenizer(PAIR / "draft").get_vocab_size() == recipe.corpus.VOCAB_SIZE
    with pytest.raises(SystemExit, match="does not exist"):
        recipe.corpus.read_tokenizer(tmp_path)
    recipe.corpus.Tokenizer(recipe.corpus.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SystemExit, match="has 0 tokens"):
        recipe.corpus.read_tokenizer(tmp_path)
