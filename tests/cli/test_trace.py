"""`spmoe trace`, and timelines of runs: output and refusals."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spmoe.engine.loop import Loop
from spmoe.replay.replay import Replayer
from spmoe.replay.trace import Trace

if TYPE_CHECKING:
    from conftest import Invoke


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with one prompt."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("hello hello hello\n")
    return path


@pytest.fixture
def trace(checkpoints: Path, text: Path, invoke: Invoke) -> Path:
    """Return a trace of the tiny pair, recorded once."""
    path = text.with_name("a.trace")
    if path.exists():
        return path
    options = ("--draft", checkpoints / "draft", "--prompts", text, "--max-tokens", 16, "--ignore-eos", "-k", 2)
    result = invoke("trace", "record", checkpoints / "target", *options, "--expert-memory", "75%", "-o", path)
    assert result.succeeded().out == ""
    assert "steps" in result.err
    return path


def test_record_and_replay(trace: Path, tmp_path: Path, invoke: Invoke) -> None:
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
    assert [record["rank"] for record in records] == list(range(1, 25)), "best first"
    times = [round(record["tpot_ms"], 9) for record in records]
    assert times == sorted(times)
    assert len({(r["prefetch"], r["eviction"], r["num_speculative_tokens"], r["link_gbps"]) for r in records}) == 24
    events = json.loads(chrome.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2 * 24
    table = invoke("trace", "replay", trace, "--link-gbps", 1).succeeded().out
    assert not [word for word in ("on-demand", "draft-gate", "TPOT ms", "efficiency", "recorded:") if word not in table]
    assert [line.split()[0] for line in table.splitlines()] == ["rank", "1", "2", "recorded:"]


def test_help_names_the_policies_that_only_replays_have(invoke: Invoke) -> None:
    shown = " ".join(invoke("trace", "replay", "--help").succeeded().out.split())
    assert [
        name for name in ("oracle", "perfect-draft", "belady", "one-step-perfect") if f"'{name}'" not in shown
    ] == []


def test_output_does_not_depend_on_the_number_of_processes(trace: Path, tmp_path: Path, invoke: Invoke) -> None:
    options = ("--prefetch", "on-demand,draft-gate", "--link-gbps", "0.1,1", "--json", "--chrome")
    outputs = []
    for workers in (1, 3):
        path = tmp_path / f"{workers}.json"
        result = invoke("trace", "replay", trace, *options, path, "--workers", workers).succeeded()
        records = [json.loads(line) for line in result.out.splitlines()]
        assert all(record.pop("replayed_steps_per_second") > 0 for record in records)
        outputs.append((records, path.read_text()))
    assert outputs[0] == outputs[1]
    invoke("trace", "replay", trace, "--workers", 0).refused(2, "--workers")


def test_assumed_sizes_and_times_replace_recorded_ones(trace: Path, invoke: Invoke) -> None:
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
        (("-k", "two"), ("--num-speculative-tokens", "not a whole number")),
        (("--prefetch", "magic"), ("prefetch must be one of", "oracle")),
        (("--eviction", "magic"), ("eviction must be one of", "belady")),
        (("--link-gbps", "0"), ("not a bandwidth",)),
        (("--cutoff", "deep"), ("not a cutoff",)),
        (("--expert-memory", ","), ("--expert-memory", "commas")),
        (("--expert-memory", "75%,1B"), ("1 B holds 0 experts", "fewer than")),
        (("--prefetch", "on-demand,magic"), ("prefetch must be one of",)),
        (("--transfer", "pigeon"), ("recorded or cuda",)),
        (("--chrome", "/no/such/place.json"), ("cannot write",)),
    ],
)
def test_bad_option_is_refused_in_one_line(
    trace: Path, invoke: Invoke, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    invoke("trace", "replay", trace, *options).refused(2, *words)


def test_recording_needs_a_fixed_k(invoke: Invoke, tmp_path: Path) -> None:
    invoke("trace", "record", "-k", "auto", "-o", tmp_path / "a.trace").refused(2, "K", "give a number")


def test_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, invoke: Invoke) -> None:
    other = tmp_path / "other"
    other.write_text("something else")
    invoke("trace", "replay", other).refused(2, "not a complete trace", "spmoe trace record")
    invoke("trace", "replay", tmp_path / "nothing").refused(2, "cannot read", "check the path")


def test_every_configuration_is_checked_before_the_first_replay(
    trace: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*ignored: object) -> None:
        raise AssertionError("a replay began")

    monkeypatch.setattr(Replayer, "run", ran)
    invoke("trace", "replay", trace, "-k", "2,9").refused(2, "recorded with 2")
    invoke("trace", "replay", trace, "--eviction", "lru,magic").refused(2, "eviction must be one of")


def test_auto_eviction_follows_the_prefetch_policy(trace: Path, invoke: Invoke) -> None:
    options = ("--prefetch", "on-demand,activation", "--eviction", "auto,activation", "--link-gbps", 1, "--json")
    records = [json.loads(line) for line in invoke("trace", "replay", trace, *options).succeeded().out.splitlines()]
    pairs = [(record["prefetch"], record["eviction"]) for record in records]
    assert pairs == [("on-demand", "draft-informed"), ("on-demand", "activation"), ("activation", "activation")]
    assert Trace.load(trace).about["options"]["eviction"] == "draft-informed"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Handle SIGINT as in a terminal; a background process of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_the_steps_so_far(
    checkpoints: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt in the middle of the second prompt of three."""
    prompts, path, steps = tmp_path / "prompts.txt", tmp_path / "a.trace", 0
    prompts.write_text("hello\n\nhello hello\n\nhello hello hello\n")
    step = Loop.step

    def interrupted(loop: Loop, *arguments: object) -> list[int]:
        nonlocal steps
        steps += 1
        if steps == 12:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)  # until the main thread has handled it
        return step(loop, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Loop, "step", interrupted)
    options = ("--prompts", prompts, "--max-tokens", 8, "--ignore-eos", "-k", 0, "--prefetch", "on-demand")
    result = invoke("trace", "record", checkpoints / "target", *options, "-o", path)
    assert result.code == 130
    assert "replay it with --link-gbps" in result.err, "the link is measured only for prefetching"
    sequences = Trace.load(path).step_sequence.tolist()
    assert f"interrupted; wrote {len(sequences)} steps" in result.err
    assert sequences[:12] == [0] * 8 + [1] * 4
    assert len(sequences) < 3 * 8


def test_prompt_that_is_too_long_is_refused_before_any_is_run(
    checkpoints: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*ignored: object) -> None:
        raise AssertionError("a step was run")

    monkeypatch.setattr(Loop, "step", ran)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\n" + "hello " * 9000)
    options = ("--prompts", prompts, "-k", 0, "-o", tmp_path / "a.trace")
    invoke("trace", "record", checkpoints / "target", *options).refused(2, "shorten the prompt")


def test_unwritable_output_is_refused_before_loading(checkpoints: Path, invoke: Invoke) -> None:
    invoke("run", checkpoints / "target", "-p", "x", "--chrome", "/no/such/a.json").refused(2, "cannot write")
    invoke("trace", "record", checkpoints / "target", "-o", "/no/such/a.trace").refused(2, "cannot write", "directory")


@pytest.mark.parametrize("link", [(), ("--link-gbps", "0.05")])
def test_run_writes_a_timeline(checkpoints: Path, tmp_path: Path, invoke: Invoke, link: tuple[str, ...]) -> None:
    path = tmp_path / "run.json"
    options = ("--prompt", "hello", "--draft", checkpoints / "draft", "--max-tokens", 12, "--expert-memory", "75%")
    invoke("run", checkpoints / "target", *options, *link, "--chrome", path).succeeded()
    events = json.loads(path.read_text())["traceEvents"]
    kinds = {event["cat"] for event in events if event["ph"] != "M"}
    assert {"draft", "verify", "layer", "copy"} <= kinds
    copies = [event for event in events if event.get("cat") in ("copy", "prefetch") and event["ph"] == "b"]
    assert all(layer.isdecimal() and expert.isdecimal() for layer, expert in (c["name"].split(".") for c in copies))
