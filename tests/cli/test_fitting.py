"""`spmoe fit-predictor`, and the commands that then use its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Invoke

TEXT = Path(__file__).read_text()


def test_fit_writes_projection_that_other_commands_use(
    invoke: Invoke, checkpoints: Path, own_home: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 2)
    pair = (checkpoints / "target", "--draft", checkpoints / "draft")
    assert json.loads(invoke("info", *pair, "--json").succeeded().out)["draft"]["projection_file"] is None
    shown = invoke("fit-predictor", *pair, "--text", text, "--window", 48, "--windows", 20).succeeded().out
    (file,) = (own_home / "predictors").glob("*.safetensors")
    assert "before" in shown
    assert "mean" in shown
    assert str(file) in shown.replace("\n", "")
    found = json.loads(
        invoke("fit-predictor", *pair, "--text", text, "--window", 48, "--windows", 20, "--json").succeeded().out
    )
    assert found["file"] == str(file)
    assert all(layer["after"] >= layer["before"] for layer in found["layers"])
    plan = json.loads(invoke("info", *pair, "--json").succeeded().out)
    assert plan["draft"]["projection_file"] == str(file)
    assert (
        json.loads(invoke("info", *pair, "--no-projection", "--json").succeeded().out)["draft"]["projection_file"]
        is None
    )

    measure = ("predictability", *pair, "--text", text, "--windows", 4, "--window", 48, "--json")
    with_projection, without = (
        json.loads(invoke(*measure, *more).succeeded().out) for more in ((), ("--no-projection",))
    )
    assert with_projection["mean"]["recall"] >= without["mean"]["recall"]
    assert with_projection["mean"]["cosine"] != without["mean"]["cosine"]


def test_unusable_text_or_pair_is_rejected(invoke: Invoke, checkpoints: Path, tmp_path: Path) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft")
    text = tmp_path / "text.txt"
    text.write_text("too short")
    invoke("fit-predictor", *pair, "--text", text).refused(2, "9 tokens")
    text.write_text("not quite long enough for that")
    invoke("fit-predictor", *pair, "--text", text).refused(2, "too little text", "--text")
    invoke("fit-predictor", *pair, "--text", tmp_path / "nowhere.txt").refused(2, "nowhere.txt")
    invoke("fit-predictor", *pair).refused(2, "--text")
    text.write_text(TEXT)
    invoke("fit-predictor", checkpoints / "target", "--text", text).refused(2, "--draft")
