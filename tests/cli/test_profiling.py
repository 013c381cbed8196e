"""`spmoe profile`: what people type, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spmoe.bench.profile import read_engine_profile

if TYPE_CHECKING:
    from conftest import Invoke

SHORT = ("--max-prompts", 1, "--output-len", 6)


def test_a_profile_is_measured_shown_and_checked(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    kept = tmp_path / "a.json"
    pair = (checkpoints / "target", "--draft", checkpoints / "draft", *SHORT)
    shown = invoke("profile", *pair, "--expert-memory", "50%", "-k", 2, "-o", kept).succeeded()
    assert not [
        word for word in ("draft pass", "verification", "at once", "on-demand", "slots") if word not in shown.out
    ]
    assert "timing copies" in shown.err
    assert read_engine_profile(kept).subject.slots == 6
    plot = tmp_path / "a.svg"
    sweep = ("--check", "--from", kept, "-k", "2", "--expert-memory", "50%", "--cutoff", "every", "--repeat", 1)
    checked = invoke("profile", *pair, *sweep, "--plot", plot, "--json").succeeded()
    found = json.loads(checked.out)
    assert found["format"] == "spmoe profile"
    rows = found["check"]["rows"]
    assert {row["case"]["cutoff"] for row in rows} == {None, 0, 1, 2, 3}
    assert found["check"]["errors"]["step"]["mean"] == pytest.approx(sum(abs(r["error"]) for r in rows) / len(rows))
    assert len(found["check"]["sweeps"]) == 1
    drawn = plot.read_text()
    assert drawn.count("<polyline") == 6
    assert "Step over the cutoff, 50%, K=2" in drawn
    other = invoke("profile", *pair[:1], "--expert-memory", "50%", "--dtype", "bfloat16", "--check", "--from", kept)
    other.refused(2, "of dtype float32", "of dtype bfloat16", "--from")


def test_without_a_draft_there_is_less_to_say(checkpoints: Path, invoke: Invoke) -> None:
    options = ("--expert-memory", "50%", "--check", "--repeat", 1, *SHORT)
    shown = invoke("profile", checkpoints / "target", *options).succeeded().out
    assert "draft pass" not in shown
    assert "on-demand" in shown
    assert "over the cutoff" not in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plot", "a.png"), ("written as SVG", "a.svg")),
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
        (("--check", "--trace", "/no/such.trace"), ("cannot read",)),
        (("--shape", "mixtral-8x7b", "--device", "cpu"), ("CUDA device is needed",)),
    ],
)
def test_bad_options_are_one_line(
    checkpoints: Path, invoke: Invoke, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    invoke("profile", checkpoints / "target", *options).refused(2, *words)
