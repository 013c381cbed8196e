"""Profiles: the file and its corruptions, predictions from one, the check's arithmetic, and a measured one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair, memory_for
from spmoe import LLM
from spmoe.bench.profile import (
    Behaviour,
    Contention,
    CopyTime,
    EngineProfile,
    PassTime,
    Subject,
    read_engine_profile,
)
from spmoe.bench.profile_behaviour import OBSERVED, Observer, generate, observe
from spmoe.bench.profile_check import Case, Check, Checked, Sweep, check_engine
from spmoe.bench.profile_measure import measure_profile
from spmoe.bench.profile_predict import Predictor
from spmoe.bench.profile_trace import TraceNeeds
from spmoe.bench.report import html_report
from spmoe.bench.results import WorkloadResults, write_results
from spmoe.cli.main import main
from spmoe.config import Size
from spmoe.engine.memory_plan import MemoryPlan
from spmoe.errors import UsageError

PROMPTS = [list(b"def f(x):"), list(b"import os")]

SHOWN = Behaviour(
    "on-demand", draft_tokens=4, passes=4.0, rows=5.0, slots=32, steps=20, tokens_per_step=3.0, step_seconds=1.0,
    draft_seconds=0.2, compute_seconds=0.32, stall_seconds=0.48, loads=48.0, needed=5.0, missing=3.0,
    missing_by_layer=(3.0,) * 16, draft_recall=0.0, draft_precision=0.0, own_recall=0.0, own_precision=0.0,
)  # fmt: skip
MADE_UP = EngineProfile(
    {"device": "cpu"},
    Subject("target", "draft", "float32", "cpu", None, 16, 8, 2, 1000, 16, 32, "lru", None),
    (PassTime(1, 0.04, 0.05, 0.003),),
    (PassTime(1, 0.1, 0.1, 0.1 / 16), PassTime(3, 0.2, 0.2, 0.2 / 16), PassTime(5, 0.4, 0.4, 0.4 / 16)),
    0.0,
    (CopyTime(1.0, 1000, 0.004, 0.004),),
    (CopyTime(1.0, 1000, 0.02, 0.02), CopyTime(2.0, 2000, 0.03, 0.03), CopyTime(4.0, 4000, 0.04, 0.04)),
    None,
    MemoryPlan(32, 1000, 5, 6, 0, 100, None),
    (SHOWN, replace(SHOWN, policy="draft-gate", draft_recall=1.0, draft_precision=1.0)),
)


# ---- the file


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    whole = replace(MADE_UP, contention=Contention(1.0, 1.5, 2.0, 2.0))
    for one in (MADE_UP, whole):
        one.save(path)
        assert read_engine_profile(path) == one
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="spmoe trace"), "is no profile; make one"),
        (lambda d: d.update(version=2), "version 2, not 1"),
        (lambda d: d.pop("verify"), "verify is missing"),
        (lambda d: d.update(verify=[]), "verify is empty"),
        (lambda d: d.update(colour="red"), "colour is not known"),
        (lambda d: d["verify"][1].update(median=-1.0), r"verify\[1\].median cannot be '-1.0'"),
        (lambda d: d["verify"][1].update(rows="3"), r"verify\[1\].rows cannot be '3'"),
        (lambda d: d["loads"][0].pop("best"), r"loads\[0\].best is missing"),
        (lambda d: d["subject"].update(layers=True), "subject.layers cannot be 'True'"),
        (lambda d: d.update(memory=[]), "memory is no object"),
        (lambda d: d.update(draft={}), "draft is no list"),
        (lambda d: d.update(expert_share=float("nan")), "expert_share cannot be 'nan'"),
        (lambda d: d["behaviours"][0].update(missing_by_layer=["x"]), r"missing_by_layer\[0\] cannot be 'x'"),
    ],
)
def test_a_damaged_profile_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    values = json.loads(json.dumps(MADE_UP.to_dict()))
    change(values)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match=words):
        read_engine_profile(path)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"{", b"[]", b"\xff\xfe", b"3"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="no profile"):
            read_engine_profile(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_engine_profile(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot write"):
        MADE_UP.save(tmp_path / "no" / "a.json")


# ---- predictions


def test_on_demand_is_predicted_by_hand() -> None:
    predictor = Predictor(MADE_UP)
    # 3 missing: 0.04 for 4 and 0.03 for 2 at once, so 0.0125 an expert between them
    assert predictor.load_seconds(3.0) == pytest.approx(0.0125)
    found = predictor.step("on-demand", 4, 0, 32)
    assert found.seconds == pytest.approx(0.2 + 0.32 + 48 * 0.0125)
    # two draft passes of 0.05 and verification of 3 rows, which takes half of what 5 take
    fewer = predictor.step("on-demand", 2, 0, 32, missing=2.0)
    assert fewer.seconds == pytest.approx(0.1 + 0.16 + 32 * 0.015)
    # over a link that takes 0.001 for an expert: what it takes here beyond the bare copy's 0.004 stays
    assert predictor.load_seconds(3.0, link=1e6) == pytest.approx(0.0085 + 0.001)


def test_prefetching_and_slots_and_the_oracle_are_predicted() -> None:
    predictor = Predictor(MADE_UP)
    plain = predictor.step("on-demand", 4, 0, 32).seconds
    drafted = [predictor.step("draft-gate", 4, depth, 64).seconds for depth in range(17)]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] == pytest.approx(predictor.step("on-demand", 4, 0, 64).seconds)
    assert predictor.step("oracle", 4, 0, 64).seconds <= drafted[-1] < drafted[0] < plain
    assert predictor.step("on-demand", 4, 0, 128).stall_seconds == 0.0
    assert predictor.step("draft-gate", 4, 16, 64).draft_seconds == pytest.approx(0.2)


def test_compute_that_was_measured_beside_copies_is_freed_of_them() -> None:
    slowed = replace(MADE_UP, contention=Contention(1.0, 1.5, 1.0, 1.2))
    costs = Predictor(slowed).costs("on-demand", 4, 3.0)
    busy = 48 * 0.0125 / 1.0
    assert costs.draft_pass == pytest.approx(0.05 / (1 + 0.5 * busy))
    assert (costs.compute_slowdown, costs.link_slowdown) == (1.5, 1.2)
    noise = Contention(1.0, 0.9, 1.0, 0.8)
    assert (noise.compute_slowdown, noise.link_slowdown) == (1.0, 1.0)


def test_a_trace_says_what_is_needed_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "replay"))
    from traces import make_trace

    trace = make_trace(layers=16, experts=8, steps=40)
    needs = TraceNeeds(trace, MADE_UP)
    few, many = needs("on-demand", 4, 32), needs("on-demand", 4, 96)
    assert 2 <= few.needed == many.needed <= 8
    assert many.missing < few.missing <= few.needed
    assert needs("on-demand", 1, 32).needed < few.needed
    drafted, own = needs("draft-gate", 4, 96), needs("next-gate", 4, 96)
    assert 0.5 < drafted.draft.recall <= 1.0
    assert 0.5 < own.own.recall <= 1.0
    assert (drafted.own.recall, own.draft.recall) == (0.0, 0.0)
    found = Predictor(MADE_UP, needs).step("draft-gate", 4, 16, 96)
    assert found.loads > 0
    with pytest.raises(UsageError, match="2 of 8 experts in 6 layers, and this one has 2 of 8 in 16"):
        TraceNeeds(make_trace(), MADE_UP)


# ---- the check


def row(policy: str, measured: float, predicted: float, cutoff: int | None = None) -> Checked:
    return Checked("25%", 32, Case(policy, 4, cutoff), 10, 3.0, measured, predicted, 1.0, 3.0, 3.0)


def test_errors_are_shares_of_what_was_measured() -> None:
    check = Check([row("on-demand", 2.0, 1.0), row("draft-gate", 1.0, 1.1, 8), row("next-gate", 1.0, 0.5)], [])
    errors = check.errors
    assert errors["step"].mean == pytest.approx((0.5 + 0.1 + 0.5) / 3)
    assert errors["step"].worst == pytest.approx(0.5)
    assert errors["given_parts"].mean == pytest.approx(0.5 / 3)
    # against on demand: 1.1 for 0.5, and 0.5 for 0.5, which is right
    assert (errors["ratio"].mean, errors["ratio"].worst) == (pytest.approx(0.6), pytest.approx(1.2))
    assert Check([], []).errors["ratio"].worst == 0.0
    json.dumps(check.to_dict())


def test_a_sweep_knows_its_best_and_how_far_the_choices_are() -> None:
    sweep = Sweep("25%", 4, {0: 3.0, 4: 2.0, 8: 2.5}, {0: 3.0}, analytic=8, just_in_time=0)
    assert sweep.best == 4
    assert (sweep.slower(8), sweep.slower(0)) == (pytest.approx(0.25), pytest.approx(0.5))
    assert sweep.to_dict()["analytic_slower"] == pytest.approx(0.25)


def like_the_results(**subject: Any) -> EngineProfile:
    """A profile of what `test_report` has results of, but for this."""
    from test_report import MACHINE

    alike = {"dtype": MACHINE["dtype"], "expert_bytes": MACHINE["expert_bytes"], "top_k": MACHINE["top_k"], **subject}
    return replace(MADE_UP, machine={"device": MACHINE["device"]}, subject=replace(MADE_UP.subject, **alike))


def test_a_report_draws_what_is_predicted_beside_what_was_swept() -> None:
    from test_report import MACHINE, SWEEP, SYSTEMS

    groups = [WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP])]
    plain, drawn = (html_report(groups, profile) for profile in (None, like_the_results()))
    assert "predicted from the profile" not in plain
    assert "predicted from the profile" in drawn
    other = WorkloadResults({**MACHINE, "link_gbps": 16.0}, SWEEP)
    both = html_report([*groups, other], like_the_results())
    assert both.count("predicted from the profile") == 1, "where it belongs"
    assert both.count("Not predicted: the profile is of the machine&#39;s own link.") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 5}, "of layers 5, and these results are of layers 16"),
        ({"shape": "mixtral-8x7b"}, "of the shape mixtral-8x7b, and these results are of a model that is not widened"),
        ({"dtype": "bfloat16"}, "of dtype bfloat16, and these results are of dtype float32"),
        ({"expert_bytes": 1000}, "of experts of 1000 bytes, and these results are of experts of 1048576 bytes"),
        ({"top_k": 1}, "of top k 1, and"),
        ({"emulated_link_gbps": 0.4}, "of an emulated link of 0.4 GB/s, and these results are of the machine's own"),
    ],
)
def test_a_report_refuses_a_profile_of_something_else(change: dict[str, Any], words: str) -> None:
    from test_report import MACHINE, SWEEP

    with pytest.raises(UsageError, match=words) as refused:
        html_report([WorkloadResults(MACHINE, SWEEP)], like_the_results(**change))
    assert "spmoe profile -o FILE" in str(refused.value), "what to do"


def test_a_report_refuses_a_profile_of_another_machine_or_for_nothing() -> None:
    from test_report import MACHINE, SWEEP, SYSTEMS

    elsewhere = replace(like_the_results(), machine={"device": "another"})
    with pytest.raises(UsageError, match="of the device another, and these results are of the device a <device>"):
        html_report([WorkloadResults(MACHINE, SWEEP)], elsewhere)
    with pytest.raises(UsageError, match="no cutoff sweep to draw the profile's predictions in; leave out --profile"):
        html_report([WorkloadResults(MACHINE, SYSTEMS)], like_the_results())


def test_the_command_refuses_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_report import MACHINE, SWEEP

    results, profile, page = (tmp_path / name for name in ("results.jsonl", "profile.json", "page.html"))
    write_results(results, [WorkloadResults(MACHINE, SWEEP)])

    def report(*options: object) -> tuple[int, str]:
        monkeypatch.setattr(
            sys, "argv", ["spmoe", "report", str(results), "--profile", str(profile), *map(str, options)]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    like_the_results(dtype="bfloat16").save(profile)
    code, said = report("-o", page)
    assert (code, said.count("\n"), page.exists()) == (2, 1, False)
    assert "dtype bfloat16" in said
    assert report("--markdown")[0] == 2
    like_the_results().save(profile)
    assert report("-o", page)[0] == 0
    assert "predicted from the profile" in page.read_text()


# ---- measured


def test_a_profile_of_a_tiny_pair_and_its_check(mixtral_pair: Pair, tmp_path: Path) -> None:
    options: dict[str, Any] = {"expert_memory": memory_for(6), "link_gbps": 0.05, "prefetch": "on-demand"}
    told: list[str] = []
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), num_speculative_tokens=4, **options) as llm:
        behave = lambda: observe(llm, 2, PROMPTS, 10)  # noqa: E731
        profile = measure_profile(llm.engine, behave, told.append)
        assert llm.engine.config.prefetch != "oracle"
        assert [one.rows for one in profile.draft] == [1, 2, 4, 8]
        assert [one.rows for one in profile.verify] == [1, 2, 3, 5, 9]
        assert all(one.best <= one.median for one in (*profile.draft, *profile.verify, *profile.copies))
        assert 0.0 <= profile.expert_share <= 1.0
        blob = llm.engine.store.layout.nbytes
        assert [one.experts for one in profile.loads] == [1.0, 2.0, 4.0]
        assert all(one.best >= one.bytes / 0.05e9 for one in (*profile.loads, *profile.copies)), (
            "no faster than the link"
        )
        assert [one.bytes for one in profile.copies] == [round(blob * one.experts) for one in profile.copies]
        assert profile.memory == llm.engine.memory
        assert [one.policy for one in profile.behaviours] == list(OBSERVED)
        for shown in profile.behaviours:
            assert 0 < shown.missing <= shown.needed <= 4
            assert shown.missing == pytest.approx(sum(shown.missing_by_layer) / 3)
            assert 2.5 < shown.rows <= 3.0, "hardly a draft is cut short"
            assert shown.step_seconds == pytest.approx(
                shown.draft_seconds + shown.compute_seconds + shown.stall_seconds, rel=1e-6
            )
        drafted = profile.behaviour("draft-gate")
        assert drafted is not None
        assert 0 < drafted.draft_recall <= 1
        profile.save(tmp_path / "a.json")
        assert read_engine_profile(tmp_path / "a.json") == profile
        predictor = Predictor(profile)
        check = check_engine(
            llm, predictor, Size(bytes=6 * blob), [2], [0, 3], PROMPTS[:1], 8, 1, told.append, no_watch
        )
    cases = [row.case for row in check.rows]
    assert {Case("on-demand", 2, None), Case("next-gate", 2, None), Case("draft-gate", 2, 0)} <= set(cases)
    (sweep,) = check.sweeps
    assert set(sweep.predicted) == {0, 1, 2, 3}
    assert {0, 3, sweep.analytic, sweep.just_in_time} == set(sweep.measured)
    assert all(one.measured > 0 and one.predicted > 0 and one.steps > 0 for one in check.rows)
    assert any("turn 1 of 1" in words for words in told)


def no_watch(generation: object) -> Any:
    """Nobody stops it."""
    from contextlib import nullcontext

    return nullcontext()


def test_what_others_run_on_the_same_engine_changes_nothing(mixtral_pair: Pair) -> None:
    def missing(others: bool) -> tuple[list[float], list[float]]:
        with LLM(
            str(mixtral_pair.target), str(mixtral_pair.good), num_speculative_tokens=2, expert_memory=memory_for(6)
        ) as llm:
            policies = ("next-gate", "on-demand") if others else ("on-demand",)
            seen = observe(llm, 2, PROMPTS, 10, policies=policies)
            profile = measure_profile(llm.engine, lambda: observe(llm, 2, PROMPTS[:1], 4), lambda words: None)
            depths = [0, 1, 2, 3] if others else []
            check = check_engine(
                llm, Predictor(profile), Size(bytes=0), [2], depths, PROMPTS, 8, 1, lambda words: None, no_watch
            )
        return (
            [one.missing for one in seen if one.policy == "on-demand"],
            [one.missing for one in check.rows if one.case.policy == "on-demand"],
        )

    assert missing(others=True) == missing(others=False)


def test_an_observer_counts_what_the_ledger_counts(mixtral_pair: Pair) -> None:
    with LLM(
        str(mixtral_pair.target), str(mixtral_pair.good), num_speculative_tokens=2, expert_memory=memory_for(6)
    ) as llm:
        llm.engine.loop.policy = observer = Observer(llm.engine)
        stats = generate(llm, PROMPTS[0], 12, no_watch).stats
    decoded = stats.decode_counters
    assert sum(observer.missing) == decoded.useful_loads
    assert observer.needed == decoded.asked
    assert all(0 <= observer.right[by] <= observer.named[by] for by in observer.named)
