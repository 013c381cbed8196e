"""`spmoe verify`: tables, JSON, exit codes and interrupts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from torch import Tensor

from spmoe.bench.verification import Verification
from spmoe.engine.llm import Generation
from spmoe.models import reference
from spmoe.models.expert_reader import ExpertReader
from spmoe.types import ExpertKey

if TYPE_CHECKING:
    from conftest import Invoke

SHORT = ("--prompt-token-ids", "5,9,3,17", "--max-tokens", 6, "--device", "cpu")


def pair(checkpoints: Path) -> tuple[Any, ...]:
    return (checkpoints / "target", "--draft", checkpoints / "draft")


def test_equal_checkpoint(invoke: Invoke, checkpoints: Path) -> None:
    found = invoke("verify", *pair(checkpoints), *SHORT, "--prompt", "hello", "-k", "0,3").succeeded()
    rows = [line.split() for line in found.out.splitlines()]
    assert rows[0] == ["prefetch", "K", "tokens", "drafted", "accepted", "verdict", "first", "divergence"]
    assert rows[1] == ["on-demand", "0", "12", "-", "-", "equal"]
    for row, prefetch in zip(rows[2:4], ("draft-gate", "on-demand"), strict=True):
        assert (row[:3], row[5:]) == ([prefetch, "3", "12"], ["equal"])
        assert int(row[3]) > int(row[4]) >= 0
    assert found.out.splitlines()[4].startswith("equal: ")
    assert "against transformers" in found.out


def test_json_with_layers_because_memory_is_short(
    invoke: Invoke, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MARGIN_BYTES", 0)
    monkeypatch.setattr(reference, "available_memory", lambda: 350_000)
    found = invoke("verify", *pair(checkpoints), *SHORT, "-k", "2", "--eviction", "lru", "--json").succeeded()
    result = json.loads(found.out)
    about = result["reference"]
    assert (about["method"], about["device"], about["experts"]) == ("layers", "cpu", "eager")
    assert "layer by layer" in about["notes"][0]
    assert "note: transformers needs" in found.err
    assert "layer by layer" in found.err
    assert (result["verdict"], result["dtype"], result["prompt_tokens"]) == ("equal", "float32", [4])
    row = result["configurations"][0]
    assert row.pop("drafted") > row.pop("accepted")
    assert row == {
        "prefetch": "draft-gate",
        "num_speculative_tokens": 2,
        "eviction": "lru",
        "policy": "draft-gate",
        "tokens": 6,
        "verdict": "equal",
        "mismatches": 0,
        "divergence": None,
    }


def test_all_runs_every_policy(invoke: Invoke, checkpoints: Path) -> None:
    found = invoke("verify", *pair(checkpoints), *SHORT, "--all", "--max-tokens", 2, "-k", "2", "--json").succeeded()
    rows = json.loads(found.out)["configurations"]
    assert {"adaptive", "next-gate", "activation"} < {row["prefetch"] for row in rows}
    assert {row["eviction"] for row in rows} > {"lru", "lfu", "draft-informed"}
    assert {row["num_speculative_tokens"] for row in rows} == {1, 2, "auto"}


def test_difference_is_an_exit_code_and_a_place(
    invoke: Invoke, checkpoints: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = ExpertReader.fill

    def fill_wrongly(self: ExpertReader, key: ExpertKey, views: dict[str, Tensor]) -> None:
        fill(self, key, views)
        views["down_proj"].neg_()

    monkeypatch.setattr(ExpertReader, "fill", fill_wrongly)
    found = invoke("verify", *pair(checkpoints), *SHORT, "-k", "0,2")
    assert found.code == 1
    lines = found.out.splitlines()
    assert [line.split()[5:8] for line in lines[1:4]] == [["DIFFERENT", "prompt", "1,"]] * 3
    assert re.match(r"prompt 1, token \d: .* \(\d+\) here, .* in transformers; logit margin ", lines[4])
    assert "steps of float32)" in lines[4]
    assert "--dtype float32" in lines[-1]
    result = json.loads(invoke("verify", *pair(checkpoints), *SHORT, "-k", "0", "--json").out)
    divergence = result["configurations"][0]["divergence"]
    assert result["verdict"] == "different"
    assert divergence["prompt"] == 0
    assert divergence["token"] != divergence["reference_token"]
    assert divergence["margin_steps"] > result["near_tie_steps"]


def test_interrupted_comparison_prints_what_is_done(
    invoke: Invoke, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Verification._check

    def interrupt(self: Verification, *args: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Verification, "_check", interrupt)
    found = invoke("verify", *pair(checkpoints), *SHORT, "--reference", "forward", "--json")
    assert found.code == 130
    result = json.loads(found.out)
    assert (result["verdict"], result["interrupted"]) == ("not compared", True)
    monkeypatch.setattr(Verification, "_check", compare)

    run, runs = Generation.run, []

    def stop_second(self: Generation) -> Any:
        runs.append(self)
        if len(runs) == 2:
            self.stop()
        return run(self)

    monkeypatch.setattr(Generation, "run", stop_second)
    found = invoke("verify", *pair(checkpoints), *SHORT, "-k", "0,2")
    assert found.code == 130
    assert "Interrupted: comparing the tokens so far" in found.err
    assert [line.split()[5:] for line in found.out.splitlines()[1:4]] == [
        ["equal"],
        ["not", "compared"],
        ["not", "compared"],
    ]
    assert "not compared so far, interrupted: " in found.out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("how", ["generate", "forward", "layers"])
def test_on_cuda(invoke: Invoke, checkpoints: Path, how: str) -> None:
    options = ("--device", "cuda", "--reference", how, "--max-tokens", 12, "--json")
    result = json.loads(invoke("verify", *pair(checkpoints), *options).succeeded().out)
    assert (result["verdict"], result["device"], result["reference"]["device"]) == ("equal", "cuda", "cuda")


def test_draft_that_is_missing_is_noted(invoke: Invoke, checkpoints: Path) -> None:
    found = invoke("verify", checkpoints / "target", "--draft", "none", *SHORT).succeeded()
    assert "note: the engine drafts nothing with this model and draft: K = 0 is verified, not K = 4" in found.err
    assert [line.split()[:2] for line in found.out.splitlines()[1:-1]] == [["on-demand", "0"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prefetch", "draftgate"), ("prefetch must be one of", "'draftgate'")),
        (("--prefetch", "oracle"), ("oracle needs recorded routing",)),
        (("--eviction", "lru,fifo"), ("eviction must be one of", "'fifo'")),
        (("-k", "4,x"), ("whole number or auto", "'x'")),
        (("-k", ""), ("separated by commas",)),
        (("--reference", "magic"), ("--reference must be one of auto, generate, forward, layers", "'magic'")),
        (("--prompt-token-ids", "1,two"), ("--prompt-token-ids takes whole numbers", "'1,two'")),
        (("--prompts", "/nowhere/prompts.jsonl"), ("/nowhere/prompts.jsonl", "does not exist")),
        (("--max-prompts", "2"), ("--prompts",)),
        (("--prompt", ""), ("the prompt is empty",)),
        (("--max-tokens", "0"), ("--max-tokens",)),
    ],
    ids=str,
)
def test_bad_options_are_refused(
    invoke: Invoke, checkpoints: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    invoke("verify", checkpoints / "target", *options).refused(2, *words)


def test_bad_model_and_memory(invoke: Invoke, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("verify", "/nowhere/model").refused(2, "/nowhere/model")
    monkeypatch.setattr(reference, "available_memory", lambda: 1000)
    invoke("verify", checkpoints / "target", "--reference", "generate").refused(2, "--reference generate needs")
    invoke("verify", checkpoints / "target").refused(2, "one layer at a time")
