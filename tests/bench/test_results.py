"""Result files: reading, resuming and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair, byte_tokenizer
from spmoe.bench.configs import make_configs
from spmoe.bench.records import config_records, find_stored, machine_record
from spmoe.bench.results import WorkloadResults, read_results, write_results
from spmoe.bench.runs import BenchJob, BenchRunner
from spmoe.bench.scenario import PolicyPair
from spmoe.bench.step_timeline import StepTimeline
from spmoe.config import Size
from spmoe.errors import UsageError
from spmoe.observe.timeline import Activity

PAIRS = [PolicyPair(prefetch="draft-gate"), PolicyPair(prefetch="on-demand", eviction="lru")]


@pytest.fixture(scope="module")
def job(mixtral_pair: Pair) -> BenchJob:
    engine: dict[str, Any] = {
        "model": str(mixtral_pair.target), "draft": str(mixtral_pair.good), "shape": None, "link_gbps": None,
        "enforce_eager": False, "device": "cpu", "progress": False,
    }  # fmt: skip
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in ("the cat", "x")]
    configs = make_configs([Size(share=0.5), Size(share=0.75)], PAIRS, [0, 2])
    return BenchJob(engine, configs, prompts, 6, 2, 1, labels={"prompt_set": "mine", "command": "spmoe bench"})


@pytest.fixture(scope="module")
def complete(job: BenchJob) -> WorkloadResults:
    runner = BenchRunner(job, lambda words: None)
    runner.run()
    return WorkloadResults(machine_record(runner), config_records(runner))


def first_runs(results: WorkloadResults, count: int) -> WorkloadResults:
    """Return the results as if the benchmark had been interrupted after `count` runs."""
    rows = []
    for row in results.rows:
        samples = [sample for sample in row["samples"] if sample["order"] < count]
        if samples:
            rows.append({**row, "samples": samples})
    return WorkloadResults(results.machine, rows)


def test_written_results_are_read_back(complete: WorkloadResults, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    write_results(file, [complete, first_runs(complete, 3)])
    first, second = read_results(file)
    assert first == complete
    assert [len(row["samples"]) for row in second.rows] == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_metrics_are_restored_from_stored_runs(job: BenchJob, complete: WorkloadResults) -> None:
    found = find_stored(job, [WorkloadResults({**complete.machine, "output_len": 99}), complete])
    assert found is not None
    number, stored = found
    assert number == 1
    runner = BenchRunner(job, lambda words: None, stored=stored)
    runner.run()
    assert runner.facts is None, "no run was missing, so no engine was loaded"
    assert config_records(runner) == json.loads(json.dumps(complete.rows)), "timelines too"
    assert machine_record(runner) == complete.machine


def test_first_run_of_each_configuration_has_the_timeline_of_a_step(complete: WorkloadResults) -> None:
    for row in complete.rows:
        found = [(one["prompt"], one["repeat"]) for one in row["samples"] if "timeline" in one]
        assert found == [(0, 0)]
        record = next(one["timeline"] for one in row["samples"] if "timeline" in one)
        timeline = StepTimeline.from_record(json.loads(json.dumps(record)))
        kinds = {span.activity for span in timeline.spans}
        assert {Activity.VERIFY, Activity.LAYER} <= kinds
        assert (Activity.REQUEST in kinds) == (row["prefetch"] != "on-demand")
        assert all(0 <= span.start <= span.end <= timeline.seconds + 1e-9 for span in timeline.spans)
        assert 1 <= timeline.step <= timeline.steps


def test_results_of_earlier_versions_are_read(complete: WorkloadResults, tmp_path: Path) -> None:
    """Files without the date, cores, memory and timelines are shown and resumed."""
    new = ("date", "cores", "usable_cores", "threads", "memory_bytes")
    machine = {name: value for name, value in complete.machine.items() if name not in new}
    assert len(machine) == len(complete.machine) - len(new)
    rows = [
        {**row, "samples": [{k: v for k, v in one.items() if k != "timeline"} for one in row["samples"]]}
        for row in complete.rows
    ]
    write_results(tmp_path / "old.jsonl", [WorkloadResults(machine, rows)])
    (found,) = read_results(tmp_path / "old.jsonl")
    assert found.rows == json.loads(json.dumps(rows))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tpot_seconds": None}, "tpot_seconds: Input should be a valid dictionary"),
        ({"prefetch": 3}, "prefetch: Input should be a valid string"),
        ({"step_seconds": float("nan")}, "step_seconds: Input should be a finite number"),
        ({"runs": "<b>"}, "runs: Input should be a valid integer"),
        ({"samples": [{"prompt": 0, "repeat": 0, "tpot_seconds": 1.0, "timeline": {}}]}, "not a timeline"),
    ],
)
def test_wrong_field_is_named(complete: WorkloadResults, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "x.jsonl"
    write_results(file, [WorkloadResults(complete.machine, [complete.rows[0], {**complete.rows[1], **change}])])
    with pytest.raises(UsageError, match=rf"line 3 of .* is not a result .*{words}"):
        read_results(file)


def test_missing_field_is_named(complete: WorkloadResults, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    machine = {name: value for name, value in complete.machine.items() if name != "dtype"}
    write_results(file, [WorkloadResults(machine, complete.rows)])
    with pytest.raises(UsageError, match=r"the machine record before line 2 of .* \(dtype: Field required\)"):
        read_results(file)


@pytest.mark.parametrize("count", [4, 13])
def test_resume_makes_only_missing_runs(job: BenchJob, complete: WorkloadResults, count: int) -> None:
    found = find_stored(job, [first_runs(complete, count)])
    assert found is not None
    messages: list[str] = []
    counts: list[int] = []
    reports: list[tuple[int, int]] = []

    def on_progress(done: int, total: int, detail: str = "") -> None:
        reports.append((done, total))

    on_run = lambda: counts.append(len(runner.runs))  # noqa: E731
    runner = BenchRunner(job, messages.append, stored=found[1], on_run=on_run, on_progress=on_progress)
    runner.run()
    assert counts == list(range(count + 1, job.total + 1))
    assert reports[0] == (count, job.total), "stored runs are done, and the resident step is stored"
    assert reports[-1] == (job.total, job.total)
    every = {(run.config, run.prompt, run.repeat) for run in runner.runs}
    assert len(every) == len(runner.runs) == job.total
    rows = config_records(runner)
    assert [row["runs"] for row in rows] == [4] * len(job.configs)
    assert all(row["difference"] is None and row["all_resident_source"] == "measured" for row in rows)
    assert not any(words.startswith("loading, 100%") for words in messages), "the resident step is stored"


def test_resume_with_fewer_configurations_or_more_repeats(job: BenchJob, complete: WorkloadResults) -> None:
    fewer = replace(job, configs=job.configs[:1])
    found = find_stored(fewer, [complete])
    assert found is not None
    assert [row["prefetch"] for row in found[1].other_rows] == [row["prefetch"] for row in complete.rows[1:]]
    again = find_stored(replace(job, repeat=3), [complete])
    assert again is not None
    runner = BenchRunner(replace(job, repeat=3), lambda words: None, stored=again[1])
    assert len(runner._missing(job.configs[0])) == 2


@pytest.mark.parametrize(
    "change", [{"output_len": 7}, {"warmup": 0}, {"prompts": [[1, 2]]}, {"labels": {"prompt_set": "x"}}]
)
def test_other_workload_is_not_resumed(job: BenchJob, complete: WorkloadResults, change: dict[str, Any]) -> None:
    assert find_stored(replace(job, **change), [complete]) is None
    for label in ("command", "scenario_text"):  # do not identify a workload
        assert find_stored(replace(job, labels={**job.labels, label: "another"}), [complete]) is not None
    for option in ({"dtype": "bfloat16"}, {"device": "cuda"}, {"projection": False}):
        assert find_stored(replace(job, engine={**job.engine, **option}), [complete]) is None


def test_resume_on_another_machine_is_rejected(job: BenchJob, complete: WorkloadResults) -> None:
    other = WorkloadResults({**complete.machine, "torch": "1.0"}, first_runs(complete, 2).rows)
    found = find_stored(job, [other])
    assert found is not None
    with pytest.raises(UsageError, match=r"measured with torch 1\.0.*--json with a new file"):
        BenchRunner(job, lambda words: None, stored=found[1]).run()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no results"),
        ("{", "line 1 of .* is not JSON"),
        ('{"type": "machine", "format": 1}', "has result format 1, and this version of spmoe reads format 3"),
        ('{"type": "configuration"}', "line 1 of .* is not a result"),
        ("3", "is not a result"),
    ],
)
def test_file_without_results_is_rejected(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_results(file)


def test_unreadable_and_unwritable_files(tmp_path: Path, complete: WorkloadResults) -> None:
    with pytest.raises(UsageError, match="check the path"):
        read_results(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="cannot write"):
        write_results(tmp_path / "nowhere" / "x.jsonl", [complete])
