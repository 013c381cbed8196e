"""`spmoe bench` with scenarios and --resume, and `spmoe report`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spmoe.bench import runs
from spmoe.engine import request
from spmoe.observe import progress

if TYPE_CHECKING:
    from conftest import Invoke

ROOT = Path(__file__).parents[2]
SCENARIO = """
models = "target"
drafts = "draft"
device = "cpu"
prompts = "prompts.jsonl"
budgets = "50%"
output_len = 6
repeat = 1
[[matrix]]
policies = ["draft-gate", "on-demand"]
draft_tokens = 2
[[matrix]]
name = "depths"
policies = "draft-gate"
draft_tokens = 2
cutoffs = ["auto", "every"]
"""


@pytest.fixture
def scenario(checkpoints: Path, tmp_path: Path) -> Path:
    """Write a scenario beside its models and prompts."""
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(checkpoints / name)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"question": "why not?"}\n')
    file = tmp_path / "mine.toml"
    file.write_text(SCENARIO)
    return file


@pytest.fixture
def _own_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def read_groups(file: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for record in map(json.loads, file.read_text().splitlines()):
        if record["type"] == "machine":
            found.append((record, []))
        else:
            found[-1][1].append(record)
    return found


def test_scenarios_are_found_by_name(scenario: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmoe.cli.bench.packaged_scenarios", lambda: {"mine": scenario, "quick": scenario})
    wrong = ("--prompts", "/nowhere")
    invoke("bench", "--scenario", "mine", *wrong).refused(2, "/nowhere")  # the scenario was read
    invoke("bench", "--scenario", "mien").refused(2, "no scenario 'mien'", "did you mean mine?", "mine, quick")
    invoke("bench", "--scenario", "wobble").refused(2, "no scenario 'wobble'", "path of a TOML file", "mine, quick")
    invoke("bench", "--scenario", "none.toml").refused(2, "cannot read none.toml")
    invoke("bench", "--scenario", "not/there").refused(2, "cannot read not/there")


def test_scenario_to_report(scenario: Path, invoke: Invoke, tmp_path: Path) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "page.html"
    result = invoke("bench", "--scenario", scenario, "--json", results, "--report", page).succeeded()
    assert "workload 1 of 2" in result.err
    assert "workload 2 of 2: depths" in result.err
    assert [line for line in result.out.splitlines() if line.startswith("depths: cpu, ")], "the table names its matrix"
    (first, compared), (second, swept) = read_groups(results)
    assert [row["prefetch"] for row in compared] == ["draft-gate", "on-demand"]
    assert [row["cutoff"] for row in swept] == ["auto", "0", "1", "2", "3"]
    assert [row["cutoff_layers"] for row in swept[1:]] == [0, 1, 2, 3]
    assert (first["scenario"], first["matrix"], second["matrix"]) == ("mine", None, "depths")
    assert first["scenario_text"] == SCENARIO
    assert (first["prompt_set"], first["prompt_format"]) == ("prompts", "JSON lines")
    assert first["command"].startswith("spmoe bench --scenario ")
    assert all(row["identical_share"] == 1 for row in [*compared, *swept])
    assert all(len(row["acceptance_by_position"]) == 2 for row in [*compared, *swept])
    text = page.read_text()
    assert "Best: " in text
    assert "--scenario ablation" in text, "the command for the missing section"

    again = tmp_path / "again.html"
    invoke("report", results, "-o", again).succeeded()
    assert again.read_text() == text
    markdown = invoke("report", results, "--markdown").succeeded().out
    assert markdown.count("| --- |") >= 2
    both = invoke("report", results, results, "--markdown", "-o", tmp_path / "both.md").succeeded()
    assert both.out == ""
    assert (tmp_path / "both.md").read_text().count("| draft-gate") > markdown.count("| draft-gate")


def test_quick_scenario_has_all_sections(invoke: Invoke, tmp_path: Path) -> None:
    results = tmp_path / "quick.jsonl"
    options: tuple[object, ...] = ("--output-len", 6, "--repeat", 1, "--warmup", 0, "--link-gbps", 5)
    short = tmp_path / "short.txt"
    short.write_text("def f(x):")
    options = (*options, "--expert-memory", "50%", "--resident-step-ms", "0=1,4=4", "--prompts", short)
    invoke("bench", "--scenario", ROOT / "src/spmoe/scenarios/quick.toml", *options, "--json", results).succeeded()
    found = read_groups(results)
    assert [machine["matrix"] for machine, _ in found] == [None, "cutoff", "ablation"]
    assert {row["ablation"] for row in found[2][1]} == {
        "all on", "no cutoff", "no batching", "no overlap", "no prefetch"
    }  # fmt: skip
    assert all(row["difference"] is None for _, rows in found for row in rows)
    text = tmp_path / "quick.html"
    invoke("report", results, "-o", text).succeeded()
    assert 'class="missing"' not in text.read_text()


@pytest.mark.usefixtures("_own_ctrl_c")
def test_resume_after_interrupt(
    scenario: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    original, taken = request.Request._take, 0

    def take(self: request.Request, token: int) -> Iterator[str]:
        nonlocal taken
        yield from original(self, token)
        taken += 1
        if taken == (2 + 3) * 6 + 2:  # in the fourth run, after two warm-up runs
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # until the main thread has handled it

    results = tmp_path / "results.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(request.Request, "_take", take)
        result = invoke("bench", "--scenario", scenario, "--json", results)
    assert result.code == 130
    ((machine, rows),) = read_groups(results)
    assert machine["interrupted"]
    assert [row["runs"] for row in rows] == [1, 2]
    before = [sample for row in rows for sample in row["samples"]]

    result = invoke("bench", "--scenario", scenario, "--json", results, "--resume").succeeded()
    assert "3 of 4 runs are in the file already" in result.err
    assert "Runs: 3 of 6" in result.err
    assert "Runs: 4 of 6" in result.err
    assert "Runs: 2 of 6" not in result.err
    (machine, rows), (_, swept) = read_groups(results)
    assert not machine["interrupted"]
    assert [row["runs"] for row in rows] == [2, 2]
    after = [sample for row in rows for sample in row["samples"]]
    assert all(sample in after for sample in before)
    assert len(swept) == 5

    monkeypatch.setattr(runs, "LLM", None)
    result = invoke("bench", "--scenario", scenario, "--json", results, "--resume").succeeded()
    assert "10 of 10 runs are in the file already" in result.err
    assert read_groups(results)[0][1] == rows


def test_resume_with_other_configurations_keeps_stored_ones(scenario: Path, invoke: Invoke, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    scenario.write_text(SCENARIO.split("[[matrix]]\nname")[0])
    common = ("bench", "--scenario", scenario, "--cutoff", "auto", "--json", results, "--resident-step-ms", "2=1")
    invoke(*common, "--prefetch", "on-demand").succeeded()
    invoke(*common, "--prefetch", "next-gate", "--resume").succeeded()
    policies = [[row["prefetch"] for row in rows] for _, rows in read_groups(results)]
    assert policies == [["next-gate", "on-demand"]]


def test_results_are_written_while_it_runs(
    scenario: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that results survive a killed process."""
    results, counts = tmp_path / "results.jsonl", list[int]()
    original = runs.BenchRunner._warm_up

    def warm_up(self: runs.BenchRunner, *arguments: Any) -> None:
        if results.exists():
            counts.append(sum(row["runs"] for _, rows in read_groups(results) for row in rows))
        original(self, *arguments)

    monkeypatch.setattr(runs.BenchRunner, "_warm_up", warm_up)
    monkeypatch.setattr("spmoe.cli.bench._SAVE_SECONDS", 0.0)
    options = ("--cutoff", "auto", "--json", results, "--resident-step-ms", "2=1")
    invoke("bench", "--scenario", scenario, *options).succeeded()
    assert counts == [4], "when the second workload starts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resume",), "--json"),
        (("--resume", "--json", "-"), "--json"),
        (("--scenario", "/nowhere.toml"), "check the path"),
        (("--report", "/nowhere/page.html"), "cannot write /nowhere/page.html"),
        (("--prompts", "humanevil"), "did you mean humaneval"),
        (("--prompts", "humaneval"), "go online"),
        (("--eviction", "lur"), "did you mean lru"),
        (("--link-gbps", 0), "--link-gbps"),
        (("--dtype", "int4"), "--dtype"),
    ],
)
def test_invalid_options(invoke: Invoke, options: tuple[object, ...], message: str) -> None:
    invoke("bench", *options).refused(2, message)


def test_unknown_key_in_scenario(invoke: Invoke, scenario: Path) -> None:
    scenario.write_text("output_length = 3")
    invoke("bench", "--scenario", scenario).refused(2, "unknown key output_length; did you mean output_len?")


def test_report_without_results(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    invoke("report", file, "-o", tmp_path / "x.html").refused(2, "cannot read")
    file.write_text("hello")
    invoke("report", file).refused(2, "-o report.html")
    invoke("report", file, "--markdown").refused(2, "line 1 of", "not JSON")
    file.write_text('{"type": "machine", "format": 3}\n')
    invoke("report", file, "--markdown").refused(2, "no finished configuration")
    file.write_text('{"type": "machine", "format": 3}\n{"type": "configuration"}\n')
    invoke("report", file, "--markdown").refused(2, "the machine record before line 2 of", "device: Field required")
    invoke("report", file, "-o", file).refused(2, "would be overwritten; name another file with -o")
    assert "configuration" in file.read_text()


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_missing_report_extra(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr("spmoe.bench.charts.find_spec", lambda name: None if name == missing else object())
    message = f"need {missing}, not installed here; run `pip install 'spmoe[report]'`"
    invoke("report", tmp_path / "x.jsonl", "-o", tmp_path / "x.html").refused(2, message)
    invoke("bench", "--report", tmp_path / "x.html").refused(2, message)


def test_run_with_batching_and_overlap_switched_off(checkpoints: Path, invoke: Invoke) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft", "--device", "cpu", "--max-tokens", 8, "--json")
    outcomes = [
        json.loads(invoke("run", *pair, "--prompt", "hello", *switches).succeeded().out)["token_ids"]
        for switches in ((), ("--no-batching",), ("--no-overlap",))
    ]
    assert outcomes[0] == outcomes[1] == outcomes[2]
