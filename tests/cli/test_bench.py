"""`spmoe bench`."""

from __future__ import annotations

import json
import os
import re
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

LISTS = ("--expert-memory", "25%,50%", "--prefetch", "draft-gate,on-demand", "--num-speculative-tokens", "0,4")
ROWS = [(memory, *row) for memory in ("25%", "50%") for row in (("on-demand", 0), ("draft-gate", 4), ("on-demand", 4))]


@pytest.fixture
def tiny(checkpoints: Path, tmp_path: Path) -> tuple[object, ...]:
    """Arguments for a tiny pair and two prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"question": "why not?"}\n')
    pair = (checkpoints / "target", "--draft", checkpoints / "draft", "--device", "cpu")
    return ("bench", *pair, "--prompts", prompts, "--output-len", 8, "--repeat", 1, "--expert-memory", "50%")


def records(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    machine, *rows = (json.loads(line) for line in text.splitlines())
    assert machine["type"] == "machine"
    assert {row["type"] for row in rows} == {"configuration"}
    return machine, rows


def test_shipped_pair(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    file = tmp_path / "bench.jsonl"
    options = ("--dtype", "float32", "--device", "cpu", "--link-gbps", 2, "--output-len", 8, "--max-prompts", 2)
    # a fixed cutoff: on a busy machine the latency model may select 0 layers
    options = (*options, "--repeat", 1, "--warmup", 0, "--cutoff", "all")
    result = invoke("bench", *LISTS, *options, "--json", file).succeeded()
    machine, rows = records(file.read_text())
    assert [(r["expert_memory"], r["prefetch"], r["num_speculative_tokens"]) for r in rows] == ROWS

    assert machine["model"] == "shipped pair"
    assert (machine["dtype"], machine["prompts"], machine["output_len"], machine["repeat"]) == ("float32", 2, 8, 1)
    assert (machine["link_source"], machine["link_bytes_per_second"]) == ("emulated", 2e9)
    assert (machine["experts"], machine["layers"], machine["top_k"]) == (128, 16, 2)
    assert machine["memory_bytes_per_second"] > 0
    assert not machine["interrupted"]

    for row in rows:
        counters, steps, blob = row["counters"], row["steps"], machine["expert_bytes"]
        assert row["runs"] == len(row["samples"]) == 2
        assert row["output_tokens"] == counters["tokens"] == 2 * 7
        assert steps == counters["steps"] == sum(sample["steps"] for sample in row["samples"])
        moved = counters["demand_bytes"] + counters["issued_bytes"]
        assert moved == sum(sample["bytes_moved"] for sample in row["samples"])
        assert row["bytes_moved_per_token"] * row["output_tokens"] == pytest.approx(moved)
        assert row["bytes_moved_per_step"] * steps == pytest.approx(moved)
        assert row["useful_bytes_per_step"] * steps == pytest.approx(
            blob * (counters["demand_loads"] + counters["prefetch_used"])
        )
        assert row["useful_bytes_per_step"] > 0
        routed = counters["hits"] + counters["late"] + counters["demand_loads"]
        assert row["hit_rate"] * routed == pytest.approx(counters["hits"])
        assert row["all_resident_source"] == "measured"
        assert row["ideal_step_seconds"] == max(
            row["useful_bytes_per_step"] / machine["link_bytes_per_second"], row["all_resident_step_seconds"]
        )
        assert row["pipeline_efficiency"] == pytest.approx(row["ideal_step_seconds"] / row["step_seconds"])
        assert row["pipeline_efficiency"] > 0, "no upper bound: the two steps run at different times on a busy machine"
        assert row["tpot_seconds"]["min"] <= row["tpot_seconds"]["median"] <= row["tpot_seconds"]["max"]
        spent = row["draft_seconds_per_step"] + row["verify_seconds_per_step"]
        assert row["stall_seconds_per_step"] < spent <= row["step_seconds"] * 1.001
        assert (row["identical_share"], row["first_divergence"], row["difference"]) == (1.0, None, None)
        assert (row["mean_acceptance_length"] is None) == (row["num_speculative_tokens"] == 0)
        assert (row["prefetch_used_share"] is not None) == (row["prefetch"] == "draft-gate")
        assert (row["cutoff_layers"] is not None) == (row["prefetch"] == "draft-gate")
    orders = sorted(sample["order"] for row in rows for sample in row["samples"])
    assert orders == list(range(12))

    head, names, *lines = result.out.splitlines()
    assert "emulated link 2 GB/s" in head
    assert len(names.split()) <= 10
    assert max(map(len, [names, *lines[:6]])) <= 100
    for line, row, expected in zip(lines, rows, ROWS, strict=False):
        found = re.fullmatch(r"(\S+), ([\w-]+)(?:, cutoff all)? +(\d)(.*)", line)
        assert found is not None, line
        memory, prefetch, k, cells = found[1], found[2], found[3], found[4].split()
        assert (memory, prefetch, int(k)) == expected
        assert float(cells[0]) == pytest.approx(1e3 * row["tpot_seconds"]["median"], abs=0.06)
        plain = next(one for one in rows if one["expert_memory"] == memory and not one["num_speculative_tokens"])
        speedup = plain["tpot_seconds"]["median"] / row["tpot_seconds"]["median"]
        assert cells[-1] == f"{speedup:.2f}x"
    assert "10th to 90th percentile" in lines[6]
    assert "at K=0 (measured)" in lines[7]
    assert "loading, 25% of the experts in slots" in result.err
    assert "Runs: 12 of 16 (75%)" in result.err, "12 that count, and 2 for each K with all experts in slots"
    assert "25%, draft-gate, K=4, cutoff all; prompt 2, repeat 1" in result.err
    assert result.err.count("emulated link") == 1


def test_auto_number_of_draft_tokens(tiny: tuple[object, ...], invoke: Invoke, tmp_path: Path) -> None:
    file, page = tmp_path / "bench.jsonl", tmp_path / "bench.html"
    options = ("-k", "auto,2", "--prefetch", "on-demand", "--json", file)
    result = invoke(*tiny, *options, "--report", page).succeeded()
    _, rows = records(file.read_text())
    assert [row["num_speculative_tokens"] for row in rows] == ["auto", 2]
    assert [row["all_resident_source"] for row in rows] == ["estimated", "measured"], "auto has steps of many lengths"
    assert all(row["difference"] is None for row in rows)
    assert "K=2 (measured" in result.out
    assert "K=auto (" not in result.out
    assert "K=auto" in page.read_text()
    again = invoke(*tiny, *options, "--resume").succeeded()
    assert "4 of 4 runs are in the file already" in again.err
    invoke(*tiny, "-k", "auto", "--prefetch", "oracle").refused(2, "oracle replays recorded steps", "give a number")


def test_wide_table_and_quiet(tiny: tuple[object, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    options = (*tiny, "-k", "0,2", "--prefetch", "on-demand", "--max-prompts", 1, "--resident-step-ms", "0=1,2=2")
    result = invoke(*options, "--wide", "--quiet").succeeded()
    assert result.err == ""
    _, names, *lines = result.out.splitlines()
    assert names.split()[:4] == ["memory", "prefetch", "K", "TPOT"]
    assert len(names.split()) > 15
    assert [tuple(line.split()[:3]) for line in lines[:2]] == [("50%", "on-demand", "0"), ("50%", "on-demand", "2")]
    assert [len(line.split()) for line in lines[:2]] == [len(names.split())] * 2, "one line per row"


def test_only_json_on_standard_output(tiny: tuple[object, ...], invoke: Invoke) -> None:
    given = ("--resident-step-ms", "0=1.5, 2=3")
    result = invoke(*tiny, "-k", "0,2", "--prefetch", "on-demand", *given, "--json", "-").succeeded()
    machine, rows = records(result.out)
    assert machine["link_source"] == "expert file"
    assert machine["prompt_tokens"] == [5, 8]
    assert [row["all_resident_step_seconds"] for row in rows] == [0.0015, 0.003]
    assert {row["all_resident_source"] for row in rows} == {"given"}
    assert result.err.count("loading") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_different_tokens_fail_in_float32_only(
    dtype: str, tiny: tuple[object, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = runs.BenchRunner._generate

    def generate(self: runs.BenchRunner, llm: Any, isolated: Any, config: Any, prompt: list[int], *rest: Any) -> Any:
        completion = original(self, llm, isolated, config, prompt, *rest)
        if config.draft_tokens and len(prompt) == 8:
            completion.token_ids[3] += 1
        return completion

    monkeypatch.setattr(runs.BenchRunner, "_generate", generate)
    options = ("-k", "0,2", "--prefetch", "on-demand", "--resident-step-ms", "0=1,2=1", "--dtype", dtype)
    result = invoke(*tiny, *options, "--json", "-")
    _, rows = records(result.out)
    assert [row["identical_share"] for row in rows] == [1.0, 0.5]
    assert [row["first_divergence"] for row in rows] == [None, 3]
    assert [row["identical_share_same_k"] for row in rows] == [1.0, 1.0]
    assert result.code == (1 if dtype == "float32" else 0)
    if dtype == "float32":
        error = result.err.splitlines()[-1]
        assert "50%, on-demand, K=2 differs from 50%, on-demand, K=0 on prompt 2, from token 4 on" in error


@pytest.fixture
def own_ctrl_c() -> Iterator[None]:
    """Install Python's SIGINT handler, which a test session started in the background may lack."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler  # restored by the code under test


@pytest.mark.usefixtures("own_ctrl_c")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_keeps_finished_runs(
    presses: int, tiny: tuple[object, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, taken = request.Request._take, 0

    def take(self: request.Request, token: int) -> Iterator[str]:
        nonlocal taken
        yield from original(self, token)
        taken += 1
        if taken == (2 + 3) * 8 + 4:  # in the fourth run, after two warm-up runs
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)  # until the main thread has handled it

    monkeypatch.setattr(request.Request, "_take", take)
    file = tmp_path / "some.jsonl"
    result = invoke(*tiny, "-k", "0,2", "--prefetch", "on-demand", "--repeat", 5, "--json", file)
    assert result.code == 130
    assert "interrupted after 3 runs" in result.err
    assert "Traceback" not in result.err
    machine, rows = records(file.read_text())
    assert machine["interrupted"]
    assert [row["runs"] for row in rows] == [1, 2]
    assert len([line for line in result.out.splitlines() if line.lstrip().startswith("50%")]) == 2


@pytest.mark.usefixtures("own_ctrl_c")
def test_ctrl_c_while_loading(tiny: tuple[object, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LLM", lambda **options: os.kill(os.getpid(), signal.SIGINT))
    result = invoke(*tiny)
    assert (result.code, result.out) == (130, "")
    assert result.err.splitlines()[-1] == "interrupted after 0 runs"


def test_failure_keeps_finished_runs(tiny: tuple[object, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: runs.BenchRunner) -> None:
        raise OSError("a disk went away")

    monkeypatch.setattr(runs.BenchRunner, "_run_all_resident", fail)
    result = invoke(*tiny, "-k", 0, "--json", "-")
    assert result.code == 1
    assert "a disk went away" in result.err.splitlines()[-1]
    _, (row,) = records(result.out)
    assert (row["runs"], row["all_resident_source"]) == (2, "estimated")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-k", "0,,4"), ("--num-speculative-tokens", "commas")),
        (("-k", "four"), ("--num-speculative-tokens", "'four'")),
        (("-k", "65"), ("from 0 to 64",)),
        (("--prefetch", "draft-gate,guess"), ("prefetch", "'guess'")),
        (("--expert-memory", "25%,much"), ("'much' is not a size",)),
        (("--expert-memory", "50%,0.1%"), ("--expert-memory 0.1%", "at least")),
        (("--expert-memory", "1KiB"), ("--expert-memory", "at least")),
        (("--cutoff", "deep"), ("'deep' is not a cutoff",)),
        (("--shape", "gpt-5"), ("mixtral-8x7b", "'gpt-5'")),
        (("--shape", "mixtral-8x7b", "--device", "cpu"), ("--shape", "CUDA")),
        (("--output-len", 1), ("--output-len",)),
        (("--output-len", 4096), ("--output-len 4096", "context of 4096")),
        (("--repeat", 0), ("--repeat",)),
        (("--draft", "none", "-k", "0,4"), ("--draft",)),
        (("--resident-step-ms", "12"), ("--resident-step-ms", "K=milliseconds")),
        (("--resident-step-ms", "4=-1"), ("--resident-step-ms",)),
        (("--prompts", "/nowhere/prompts"), ("/nowhere/prompts", "check the path")),
        (("--json", "/nowhere/bench.jsonl"), ("cannot write /nowhere/bench.jsonl",)),
    ],
)
def test_invalid_options(invoke: Invoke, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    invoke("bench", *options).refused(2, *words)


def test_invalid_prompt_files(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n{"text": "y"}\n')
    invoke("bench", "--prompts", file).refused(2, "line 2 of", "name it prompt")
    file.write_bytes(b"\xff\xfe")
    invoke("bench", "--prompts", file).refused(2, "not UTF-8")


def test_model_needs_a_draft(checkpoints: Path, invoke: Invoke) -> None:
    target = ("bench", checkpoints / "target", "--draft", "none")
    invoke(*target, "-k", "0,4").refused(2, "--draft", "--num-speculative-tokens 0")


def test_without_a_draft_nothing_is_drafted(checkpoints: Path, invoke: Invoke, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    target = ("bench", checkpoints / "target", "--draft", "none", "--device", "cpu", "--prompts", prompts)
    options = ("--output-len", 4, "--repeat", 1, "--warmup", 0, "--resident-step-ms", "0=1", "--json", "-")
    _, rows = records(invoke(*target, *options).succeeded().out)
    assert [row["num_speculative_tokens"] for row in rows] == [0]


def test_report_does_not_overwrite_the_results(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    invoke("bench", "--json", file, "--report", file).refused(2, "--report would overwrite", str(file))
