"""`spmoe demo` and `spmoe predictability`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spmoe.cli.demo import MODES, draw_timeline
from spmoe.observe.timeline import Activity, Span

if TYPE_CHECKING:
    from conftest import Invoke


def test_demo_modes_generate_the_same_tokens(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    # a fixed cutoff: on a busy machine the latency model may select 0 layers
    monkeypatch.setitem(MODES, "speculation, prefetched", MODES["speculation, prefetched"] | {"cutoff": "all"})
    result = invoke("demo", "--max-tokens", 12, "--link-gbps", 2, "--json").succeeded()
    found = json.loads(result.out)
    assert found["identical"]
    assert list(found["runs"]) == list(MODES)
    assert len({tuple(run["token_ids"]) for run in found["runs"].values()}) == 1
    plain, on_demand, prefetched = (run["stats"] for run in found["runs"].values())
    assert plain["drafted"] == 0 < on_demand["drafted"]
    assert on_demand["prefetch_issued_bytes"] == 0 < prefetched["prefetch_issued_bytes"]
    assert {run["stats"]["link"] for run in found["runs"].values()} == {"emulated"}


def test_demo_shows_text_table_and_timeline(checkpoints: Path, invoke: Invoke) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft")
    out = invoke("demo", *pair, "--prompt", "hello", "--max-tokens", 8).succeeded().out
    assert "generated exactly these tokens" in out
    assert "Emulated link" in out
    assert out.count("compute |") == out.count("link    |") == 3
    for mode in MODES:
        assert mode.split(",")[0] in out


def test_demo_with_another_model_needs_a_draft(checkpoints: Path, invoke: Invoke) -> None:
    invoke("demo", checkpoints / "target").refused(2, "--draft")


def test_timeline_draws_stalls_and_the_last_seconds_only() -> None:
    spans = [
        Span(Activity.DRAFT, 0.0, 5.0),
        Span(Activity.STALL, 7.0, 8.0),
        Span(Activity.VERIFY, 6.0, 10.0),
        Span(Activity.COPY, 4.0, 8.0),
    ]
    assert draw_timeline(spans, seconds=10.0, columns=10) == ("ddddd V.VV", "    ####  ")
    assert draw_timeline(spans, seconds=4.0, columns=4) == ("V.VV", "##  ")


def test_predictability_by_layer(invoke: Invoke, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text())
    options = ("--text", text, "--windows", 2, "--window", 64, "--dtype", "float32")
    found = json.loads(invoke("predictability", *options, "--plot", plot, "--json").succeeded().out)
    assert len(found["layers"]) == 16
    assert found["tokens"] == 128
    mean = found["mean"]
    assert 0.5 < mean["recall"] <= mean["recall_plus_one"] <= 1, "a trained pair predicts far better than chance, 0.25"
    assert mean["union_recall"] > 0.5
    assert all(0.25 <= layer["largest_load"] <= 1 for layer in found["layers"]), (
        "2 of 8: the busiest takes a quarter or more"
    )
    later = [layer["next_gate_recall"] for layer in found["layers"][1:]]
    assert found["layers"][0]["next_gate_recall"] is None, "no layer before it predicts its experts"
    assert found["mean"]["next_gate_recall"] == pytest.approx(sum(later) / len(later))
    texts = {text.text for text in ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")}
    names = {"top-1", "recall@k", "recall@k+1", "union recall", "next gate", "previous token"}
    assert {"MoE layer", *names} <= texts
    table = invoke("predictability", *options).succeeded().out
    assert "mean" in table
    assert f"{100 * found['greedy_agreement']:.1f}%" in table


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--draft", "none"), ("--draft",)),
        (("--plot", "plot.png"), ("plot.svg",)),
        (("--text", "/nowhere/text"), ("/nowhere/text", "check the path")),
        (("--windows", 0), ("--windows",)),
    ],
)
def test_predictability_refusals(invoke: Invoke, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    invoke("predictability", *options).refused(2, *words)


def test_a_text_of_a_few_words_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("x = 1")
    invoke("predictability", "--text", text).refused(2, "at least 16")
