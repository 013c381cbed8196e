"""Drafts without a checkpoint of their own, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Invoke

PROMPT = ("--prompt", "abcabcabcabc", "--max-tokens", 12, "--ignore-eos", "--dtype", "float32", "--json")
DRAFT_GATE = ("-k", 4, "--prefetch", "draft-gate")
DRAFTS = {"ngram": "no model", "self:int8": "the target with int8 experts", "self:int4": "the target with int4 experts"}


@pytest.mark.parametrize("draft", DRAFTS)
def test_run_generates_the_tokens_of_plain_decoding(invoke: Invoke, checkpoints: Path, draft: str) -> None:
    plain = json.loads(invoke("run", checkpoints / "target", "--draft", "none", *PROMPT).succeeded().out)
    found = invoke("run", checkpoints / "target", "--draft", draft, *DRAFT_GATE, *PROMPT).succeeded()
    assert json.loads(found.out)["token_ids"] == plain["token_ids"]
    assert json.loads(found.out)["stats"]["prefetch"] == ("next-gate" if draft == "ngram" else "draft-gate")
    (note,) = found.err.splitlines()
    assert note.startswith("note: ")
    assert ("own layers" in note) if draft == "ngram" else (draft[5:] in note)


def test_the_table_shows_prefetched_bytes_of_next_gate(invoke: Invoke, checkpoints: Path) -> None:
    shown = invoke("run", checkpoints / "target", "--draft", "ngram", *DRAFT_GATE, *PROMPT[:-1]).succeeded().err
    assert "issued" in shown
    assert "prefetch next-gate" in " ".join(shown.split())


@pytest.mark.parametrize("draft", DRAFTS)
def test_info_describes_the_draft(invoke: Invoke, checkpoints: Path, draft: str) -> None:
    info = ("info", checkpoints / "target", "--draft", draft)
    plan = json.loads(invoke(*info, *DRAFT_GATE, "--json").succeeded().out)
    assert (plan["draft"]["name"], plan["draft"]["architecture"]) == (draft, DRAFTS[draft])
    assert plan["draft"]["num_speculative_tokens"] == 4
    assert (plan["draft"]["resident_bytes"] > 0) == (draft != "ngram")
    assert plan["prefetch"]["policy"] == ("next-gate" if draft == "ngram" else "draft-gate")
    default = json.loads(invoke(*info, "--json").succeeded().out)
    assert default["draft"] == {**plan["draft"], "num_speculative_tokens": "auto"}
    assert default["prefetch"]["policy"] == ("auto (on-demand)" if draft == "ngram" else "auto (draft-gate)")
    shown = invoke(*info).succeeded().out
    assert f"draft {draft} ({DRAFTS[draft]})" in " ".join(shown.split())
    none = json.loads(invoke(*info, "-k", 0, "--json").succeeded().out)
    assert none["draft"] is None
    assert none["memory"]["resident_bytes"] == none["target"]["resident_bytes"]


def test_bench_accepts_these_drafts(invoke: Invoke, checkpoints: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabcabcabc\n")
    for draft in DRAFTS:
        file = tmp_path / "out.jsonl"
        options = ("--output-len", 8, "--repeat", 1, "--warmup", 0, "--max-prompts", 1, "--expert-memory", "50%")
        options = (*options, "--resident-step-ms", "0=1,4=1")
        target = (checkpoints / "target", "--draft", draft, "--device", "cpu", "--json", file, "--prompts", prompts)
        invoke("bench", *target, *options).succeeded()
        assert draft in file.read_text()


def test_predictability_compares_the_quantized_target(invoke: Invoke, checkpoints: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    measure = ("predictability", checkpoints / "target", "--text", text, "--windows", 2, "--window", 48, "--json")
    found = json.loads(invoke(*measure, "--draft", "self:int8").succeeded().out)
    assert found["greedy_agreement"] > 0.9
    assert found["mean"]["recall"] > 0.95
    invoke(*measure, "--draft", "ngram").refused(2, "draft model", "--draft")


@pytest.mark.parametrize("draft", ["self", "self:int5", "self:int8 "])
def test_unknown_self_drafts_are_rejected(invoke: Invoke, checkpoints: Path, draft: str) -> None:
    invoke("run", checkpoints / "target", "--draft", draft, *PROMPT).refused(2, "self:int8 or self:int4")
