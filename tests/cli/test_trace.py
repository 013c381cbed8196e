"""`spmoe trace`, and timelines of runs: what people type, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spmoe.replay.trace import Trace

if TYPE_CHECKING:
    from conftest import Invoke


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a prompt."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("hello hello hello\n")
    return path


@pytest.fixture
def trace(checkpoints: Path, text: Path, invoke: Invoke) -> Path:
    """A trace of the tiny pair, recorded once."""
    path = text.with_name("a.trace")
    if path.exists():
        return path
    options = ("--draft", checkpoints / "draft", "--prompts", text, "--max-tokens", 16, "--ignore-eos", "-k", 2)
    result = invoke("trace", "record", checkpoints / "target", *options, "--expert-memory", "75%", "-o", path)
    assert result.succeeded().out == ""
    assert "steps" in result.err
    return path


def test_a_trace_is_recorded_and_replayed(trace: Path, tmp_path: Path, invoke: Invoke) -> None:
    assert Trace.load(trace).shape.draft_tokens == 2
    chrome = tmp_path / "a.json"
    wide = (
        "--prefetch",
        "on-demand,draft-gate,oracle",
        "--eviction",
        "lru,belady",
        "-k",
        "1,2",
        "--link-gbps",
        "0.1,1",
    )
    result = invoke("trace", "replay", trace, *wide, "--expert-memory", "75%", "--chrome", chrome, "--json").succeeded()
    records = [json.loads(line) for line in result.out.splitlines()]
    assert len(records) == 3 * 2 * 2 * 2
    assert sorted(record["rank"] for record in records) == list(range(1, 25))
    assert len({(r["prefetch"], r["eviction"], r["num_speculative_tokens"], r["link_gbps"]) for r in records}) == 24
    events = json.loads(chrome.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2 * 24
    table = invoke("trace", "replay", trace, "--link-gbps", 1).succeeded().out
    assert not [word for word in ("on-demand", "draft-gate", "TPOT ms", "efficiency", "recorded:") if word not in table]


def test_other_sizes_and_times_can_be_assumed(trace: Path, invoke: Invoke) -> None:
    large = ("--expert-size", "336MiB", "--draft-pass-ms", 2.6, "--verify-layer-ms", 0.56, "--transfer", "cuda")
    result = invoke("trace", "replay", trace, *large, "--prefetch", "draft-gate", "--link-gbps", 54.7, "--json")
    record = json.loads(result.succeeded().out)
    assert record["bytes_per_step"] / record["loads_per_step"] == pytest.approx(336 * 2**20)
    slower = invoke("trace", "replay", trace, *large, "--compute-scale", 3, "--link-gbps", 54.7, "--json").succeeded()
    assert json.loads(slower.out.splitlines()[0])["compute_ms_per_step"] > 2 * record["compute_ms_per_step"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-k", "9"), ("recorded with 2", "--num-speculative-tokens 9")),
        (("-k", "two"), ("not a number of draft tokens",)),
        (("--prefetch", "magic"), ("prefetch must be one of", "oracle")),
        (("--eviction", "magic"), ("eviction must be one of", "belady")),
        (("--link-gbps", "0"), ("not a speed",)),
        (("--cutoff", "deep"), ("not a cutoff",)),
        (("--expert-memory", ","), ("got none",)),
        (("--transfer", "pigeon"), ("recorded or cuda",)),
        (("--chrome", "/no/such/place.json"), ("cannot write",)),
    ],
)
def test_bad_options_are_one_line(
    trace: Path, invoke: Invoke, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    invoke("trace", "replay", trace, *options).refused(2, *words)


def test_files_that_are_no_traces_are_one_line(tmp_path: Path, invoke: Invoke) -> None:
    other = tmp_path / "other"
    other.write_text("something else")
    invoke("trace", "replay", other).refused(2, "not a whole trace", "spmoe trace record")
    invoke("trace", "replay", tmp_path / "nothing").refused(2, "cannot read", "check the path")


def test_where_a_trace_cannot_be_written_nothing_is_loaded(checkpoints: Path, invoke: Invoke) -> None:
    invoke("trace", "record", checkpoints / "target", "-o", "/no/such/a.trace").refused(2, "no directory")


@pytest.mark.parametrize("link", [(), ("--link-gbps", "0.05")])
def test_a_run_can_be_drawn(checkpoints: Path, tmp_path: Path, invoke: Invoke, link: tuple[str, ...]) -> None:
    path = tmp_path / "run.json"
    options = ("--prompt", "hello", "--draft", checkpoints / "draft", "--max-tokens", 12, "--expert-memory", "75%")
    invoke("run", checkpoints / "target", *options, *link, "--chrome", path).succeeded()
    events = json.loads(path.read_text())["traceEvents"]
    kinds = {event["cat"] for event in events if event["ph"] != "M"}
    assert {"draft", "verify", "layer", "copy"} <= kinds
    copies = [event for event in events if event.get("cat") in ("copy", "prefetch") and event["ph"] == "b"]
    assert all(layer.isdecimal() and expert.isdecimal() for layer, expert in (c["name"].split(".") for c in copies))
