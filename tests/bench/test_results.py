"""Results that are stored: read back, continued, and refused where they are something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair, byte_tokenizer
from spmoe.bench import runs
from spmoe.bench.figures import machine_record, records
from spmoe.bench.results import Group, read_results, write_results
from spmoe.bench.resume import find_stored
from spmoe.bench.runs import Bench, Job
from spmoe.bench.settings import System, settings_of
from spmoe.config import Size
from spmoe.errors import UsageError

SYSTEMS = [System("draft-gate"), System("on-demand", "lru")]


@pytest.fixture(scope="module")
def job(mixtral_pair: Pair) -> Job:
    engine: dict[str, Any] = {
        "model": str(mixtral_pair.target), "draft": str(mixtral_pair.good), "shape": None, "link_gbps": None,
        "enforce_eager": False, "device": "cpu", "progress": False,
    }  # fmt: skip
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in ("the cat", "x")]
    settings = settings_of([Size(share=0.5), Size(share=0.75)], SYSTEMS, [0, 2])
    return Job(engine, settings, prompts, 6, 2, 1, labels={"prompt_set": "mine", "command": "spmoe bench"})


@pytest.fixture(scope="module")
def whole(job: Job) -> Group:
    bench = Bench(job, lambda words: None)
    bench.run()
    return Group(machine_record(bench), records(bench))


def part_of(group: Group, count: int) -> Group:
    """As if it had been interrupted after so many runs."""
    rows = []
    for row in group.rows:
        samples = [sample for sample in row["samples"] if sample["order"] < count]
        if samples:
            rows.append({**row, "samples": samples})
    return Group(group.machine, rows)


def test_what_was_written_is_read(whole: Group, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    write_results(file, [whole, part_of(whole, 3)])
    first, second = read_results(file)
    assert first == whole
    assert [len(row["samples"]) for row in second.rows] == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_figures_can_be_made_again_of_what_is_stored(job: Job, whole: Group) -> None:
    found = find_stored(job, [Group({**whole.machine, "output_len": 99}), whole])
    assert found is not None
    number, stored = found
    assert number == 1
    bench = Bench(job, lambda words: None, stored=stored)
    bench.run()
    assert bench.facts is None, "nothing was left to do, so nothing was loaded"
    assert records(bench) == json.loads(json.dumps(whole.rows))
    assert machine_record(bench) == whole.machine


@pytest.mark.parametrize("count", [4, 13])
def test_it_goes_on_where_it_ended(job: Job, whole: Group, count: int) -> None:
    found = find_stored(job, [part_of(whole, count)])
    assert found is not None
    said: list[str] = []
    kept: list[int] = []
    bench = Bench(job, said.append, stored=found[1], num_logits=lambda: kept.append(len(bench.runs)))
    bench.run()
    assert kept == list(range(count + 1, job.total + 1))
    assert next(words for words in said if words.startswith("run ")).startswith(f"run {count + 1} of {job.total}: ")
    every = {(run.setting, run.prompt, run.repeat) for run in bench.runs}
    assert len(every) == len(bench.runs) == job.total
    rows = records(bench)
    assert [row["runs"] for row in rows] == [4] * len(job.settings)
    assert all(row["differs"] is None and row["resident_source"] == "measured" for row in rows)
    assert not any(words.startswith("loading, 100%") for words in said), "that step is known from before"


def test_more_can_be_asked_of_what_is_stored(job: Job, whole: Group) -> None:
    fewer = replace(job, settings=job.settings[:1])
    found = find_stored(fewer, [whole])
    assert found is not None
    assert [row["prefetch"] for row in found[1].others] == [row["prefetch"] for row in whole.rows[1:]]
    again = find_stored(replace(job, repeat=3), [whole])
    assert again is not None
    bench = Bench(replace(job, repeat=3), lambda words: None, stored=again[1])
    assert len(bench._left(job.settings[0])) == 2


@pytest.mark.parametrize(
    "change", [{"output_len": 7}, {"warmup": 0}, {"prompts": [[1, 2]]}, {"labels": {"prompt_set": "x"}}]
)
def test_another_job_is_not_continued(job: Job, whole: Group, change: dict[str, Any]) -> None:
    assert find_stored(replace(job, **change), [whole]) is None
    for said in ("command", "scenario_text"):  # a comment in a scenario file decides nothing
        assert find_stored(replace(job, labels={**job.labels, said: "another"}), [whole]) is not None
    for asked in ({"dtype": "bfloat16"}, {"device": "cuda"}, {"projection": False}):
        assert find_stored(replace(job, engine={**job.engine, **asked}), [whole]) is None


def test_another_machine_is_refused(job: Job, whole: Group) -> None:
    other = Group({**whole.machine, "torch": "1.0"}, part_of(whole, 2).rows)
    found = find_stored(job, [other])
    assert found is not None
    with pytest.raises(UsageError, match=r"of torch 1\.0.*choose another file"):
        Bench(job, lambda words: None, stored=found[1]).run()


def test_time_left_is_from_how_long_runs_took(job: Job) -> None:
    pace = runs.Pace()
    first, second = job.settings[:2]
    assert pace.left({first: 3}) == ""
    pace.took(first, 10.0)
    pace.took(first, 20.0)
    assert pace.left({first: 2}) == "; 30 s left"
    pace.took(second, 60.0)
    assert pace.left({first: 2, second: 5}) == "; 6 min left"
    assert pace.left({first: 0, job.settings[2]: 1}) == "; 30 s left", "as long as one usually takes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no results"),
        ("{", "line 1 of .* is not JSON"),
        ('{"type": "machine", "format": 1}', "another version"),
        ('{"type": "configuration"}', "line 1 of .* is no result"),
        ("3", "no result"),
    ],
)
def test_files_that_hold_no_results(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_results(file)


def test_files_that_cannot_be_read_or_written(tmp_path: Path, whole: Group) -> None:
    with pytest.raises(UsageError, match="check the path"):
        read_results(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="cannot write"):
        write_results(tmp_path / "nowhere" / "x.jsonl", [whole])
