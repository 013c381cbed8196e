"""The command `spmoe profile`: its tables, its JSON and the options it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spmoe.bench.profile import read_engine_profile

if TYPE_CHECKING:
    from conftest import Invoke

SHORT = ("--max-prompts", 1, "--output-len", 6)


def test_measures_shows_and_checks_a_profile(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    file = tmp_path / "a.json"
    pair = (checkpoints / "target", "--draft", checkpoints / "draft", *SHORT)
    shown = invoke("profile", *pair, "--expert-memory", "50%", "-k", 2, "-o", file).succeeded()
    assert not [word for word in ("draft", "verify", "Loads", "on-demand", "slots") if word not in shown.out]
    assert "timing passes and loads" in shown.err
    assert read_engine_profile(file).subject.slots == 6
    options = ("--check", "--from", file, "-k", "2", "--expert-memory", "50%", "--cutoff", "every", "--repeat", 1)
    checked = invoke("profile", *pair, *options, "--json").succeeded()
    found = json.loads(checked.out)
    assert found["format"] == "spmoe profile"
    steps = found["check"]["steps"]
    assert {step["cutoff"] for step in steps} == {None, 0, 1, 2, 3}
    assert found["check"]["errors"]["step"]["mean"] == pytest.approx(sum(abs(s["error"]) for s in steps) / len(steps))
    assert len(found["check"]["sweeps"]) == 1
    plain = (checkpoints / "target", "--draft", "none", "--expert-memory", "50%")
    other = invoke("profile", *plain, "--dtype", "bfloat16", "--check", "--from", file)
    other.refused(2, "of dtype float32", "of dtype bfloat16", "--from")


def test_shows_a_stored_profile_without_loading_a_model(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    file = tmp_path / "a.json"
    measured = invoke("profile", checkpoints / "target", "--expert-memory", "50%", *SHORT, "-o", file).succeeded()
    shown = invoke("profile", "--from", file).succeeded()
    assert shown.out == measured.out
    assert "timing" not in shown.err


def test_without_a_draft_shows_no_draft_pass_and_no_cutoffs(checkpoints: Path, invoke: Invoke) -> None:
    options = ("--expert-memory", "50%", "--check", "--repeat", 1, *SHORT)
    shown = invoke("profile", checkpoints / "target", *options).succeeded().out
    assert not [line for line in shown.splitlines() if line.startswith("draft")]
    assert "on-demand" in shown
    assert "Cutoffs" not in shown


def test_plots_cutoffs(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("spmoe.bench.charts")
    plot = tmp_path / "a.svg"
    pair = (checkpoints / "target", "--draft", checkpoints / "draft", *SHORT)
    options = ("--check", "-k", 2, "--expert-memory", "50%", "--cutoff", "0,3", "--repeat", 1, "--plot", plot)
    invoke("profile", *pair, *options).succeeded()
    drawn = plot.read_text()
    for title in ("Verification", "Loads of one layer", "Step by cutoff, 50%, K=2", "predicted; dashed: just-in-time"):
        assert title in drawn


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plot", "a.png"), ("writes SVG", "a.svg")),
        (("-k", "1,2"), ("add --check",)),
        (("--cutoff", "4"), ("add --check",)),
        (("--check", "-k", "two"), ("cannot be 'two'",)),
        (("--check", "-k", "1,,2"), ("commas",)),
        (("--check", "-k", "99"), ("from 0 to 64",)),
        (("--check", "--cutoff", "auto"), ("numbers of layers or 'every'",)),
        (("--check", "--expert-memory", "much"), ("not a size",)),
        (("-o", "/no/such/a.json"), ("cannot write",)),
        (("--from", "/no/such/a.json"), ("cannot read",)),
        (("--from", "a.json", "-o", "b.json"), ("none to write",)),
        (("--shape", "mixtral-8x7b", "--device", "cpu"), ("needs a CUDA device",)),
    ],
)
def test_refuses_bad_options_in_one_line(
    checkpoints: Path, invoke: Invoke, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    invoke("profile", checkpoints / "target", *options).refused(2, *words)
