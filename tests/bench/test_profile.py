"""The profile file and its damages, predictions from a profile, the check's arithmetic, and a measured profile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair, memory_for
from spmoe import LLM
from spmoe.bench.profile import (
    PROFILED_POLICIES,
    EngineProfile,
    PolicyStats,
    Predictor,
    Subject,
    read_engine_profile,
)
from spmoe.bench.profile_runs import (
    Check,
    CheckedStep,
    CutoffSweep,
    Workload,
    check_engine,
    counted_predictions,
    generate,
    measure_policies,
    measure_profile,
)
from spmoe.bench.report import html_report
from spmoe.bench.results import WorkloadResults, write_results
from spmoe.cli.main import main
from spmoe.config import Size
from spmoe.errors import UsageError
from spmoe.observe.progress import Report

PROMPTS = [list(b"def f(x):"), list(b"import os")]

ON_DEMAND = PolicyStats(
    policy="on-demand",
    draft_tokens=4,
    slots=32,
    steps=20,
    tokens=3.0,
    draft_passes=4.0,
    draft_seconds=0.2,
    verify_seconds=0.32,
    stall_seconds=0.48,
    needed=5.0,
    missing=3.0,
    missing_by_layer=(3.0,) * 16,
    draft_recall=0.0,
    draft_precision=0.0,
    verify_recall=0.0,
    verify_precision=0.0,
)
PROFILE = EngineProfile(
    machine={"device": "cpu"},
    subject=Subject(
        model="target",
        draft="draft",
        dtype="float32",
        device="cpu",
        shape=None,
        layers=16,
        experts_per_layer=8,
        top_k=2,
        expert_bytes=1000,
        draft_layers=16,
        slots=32,
        eviction="lru",
        emulated_link_gbps=None,
    ),
    draft_pass_seconds=0.05,
    verify_seconds={1: 0.1, 3: 0.2, 5: 0.4},
    expert_share=0.0,
    load_seconds={1: 0.02, 2: 0.03, 4: 0.04},
    policies=(
        ON_DEMAND,
        ON_DEMAND.model_copy(update={"policy": "draft-gate", "draft_recall": 1.0, "draft_precision": 1.0}),
    ),
)


# ---- the file


def test_profile_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    without_draft = PROFILE.model_copy(update={"draft_pass_seconds": None, "load_seconds": {}})
    for profile in (PROFILE, without_draft):
        profile.save(path)
        assert read_engine_profile(path) == profile
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="spmoe trace"), "is not a profile: .* make one"),
        (lambda d: d.update(version=1), "version 1, not 2"),
        (lambda d: d.pop("verify_seconds"), "verify_seconds: field required"),
        (lambda d: d.update(verify_seconds={}), "verify_seconds: dictionary should have at least 1 item"),
        (lambda d: d.update(colour="red"), "colour: extra inputs are not permitted"),
        (lambda d: d["verify_seconds"].update({"3": -1.0}), r"verify_seconds.3: .* than or equal to 0, not '-1.0'"),
        (lambda d: d["verify_seconds"].update({"x": 1.0}), r"verify_seconds.x.*: .* valid integer.*, not 'x'"),
        (lambda d: d["load_seconds"].update({"0": 1.0}), r"load_seconds.0.*: .* greater than or equal to 1, not '0'"),
        (lambda d: d["policies"][0].pop("needed"), r"policies\[0\].needed: field required"),
        (lambda d: d["subject"].update(layers=True), "subject.layers: .* valid integer, not 'True'"),
        (lambda d: d.update(subject=[]), "subject: .* object"),
        (lambda d: d.update(load_seconds=[]), "load_seconds: .* object"),
        (lambda d: d.update(policies={}), "policies: .* array"),
        (lambda d: d.update(expert_share=float("nan")), "expert_share: .*, not 'nan'"),
        (lambda d: d["policies"][0].update(missing_by_layer=["x"]), r"policies\[0\].missing_by_layer\[0\]: .* 'x'"),
        (lambda d: d.update(policies=[]), "policies: on-demand is missing"),
    ],
)
def test_error_names_the_damaged_field(tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    values = PROFILE.to_dict()
    change(values)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match=words) as refused:
        read_engine_profile(path)
    assert "\n" not in str(refused.value)


def test_refuses_files_that_are_not_profiles(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"{", b"[]", b"\xff\xfe", b"3"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="not a profile"):
            read_engine_profile(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_engine_profile(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot write"):
        PROFILE.save(tmp_path / "no" / "a.json")


# ---- predictions


def test_predicts_on_demand_steps() -> None:
    predictor = Predictor(PROFILE)
    # 3 missing experts: 2 together take 0.015 each and 4 take 0.01 each, so 3 take 0.0125 each
    assert predictor.load_seconds(3.0) == pytest.approx(0.0125)
    found = predictor.step("on-demand", 4, 0, 32)
    assert found.seconds == pytest.approx(0.2 + 0.32 + 48 * 0.0125)
    # two draft passes of 0.05; verification of 3 rows takes half of the time of 5 rows
    fewer = predictor.step("on-demand", 2, 0, 32, missing=2.0)
    assert fewer.seconds == pytest.approx(0.1 + 0.16 + 32 * 0.015)


def test_predicts_draft_from_single_pass_if_generations_drafted_nothing() -> None:
    plain = ON_DEMAND.model_copy(update={"draft_tokens": 0, "draft_passes": 0.0, "draft_seconds": 0.0})
    predictor = Predictor(PROFILE.model_copy(update={"policies": (plain,)}))
    assert predictor.step("on-demand", 2, 0, 128).draft_seconds == pytest.approx(2 * 0.05)


def test_prefetching_and_more_slots_make_steps_faster() -> None:
    predictor = Predictor(PROFILE)
    on_demand = predictor.step("on-demand", 4, 0, 32).seconds
    by_depth = [predictor.step("draft-gate", 4, depth, 64).seconds for depth in range(17)]
    assert by_depth == sorted(by_depth, reverse=True)
    assert by_depth[0] == pytest.approx(predictor.step("on-demand", 4, 0, 64).seconds)
    assert by_depth[-1] < by_depth[0] < on_demand
    assert predictor.step("on-demand", 4, 0, 128).stall_seconds == 0.0
    assert predictor.step("draft-gate", 4, 16, 64).draft_seconds == pytest.approx(0.2)


def test_policy_that_was_not_profiled_is_predicted_as_on_demand() -> None:
    predictor = Predictor(PROFILE)
    assert predictor.step("next-gate", 4, 0, 32) == predictor.step("on-demand", 4, 0, 32)


# ---- the check


def checked(policy: str, measured: float, predicted: float, cutoff: int | None = None) -> CheckedStep:
    return CheckedStep(
        expert_memory="25%",
        policy=policy,
        draft_tokens=4,
        cutoff=cutoff,
        steps=10,
        measured=measured,
        predicted=predicted,
        predicted_from_run=1.0,
        missing=3.0,
        predicted_missing=3.0,
    )


def test_errors_are_relative_to_measured_time() -> None:
    steps = [checked("on-demand", 2.0, 1.0), checked("draft-gate", 1.0, 1.1, 8), checked("next-gate", 1.0, 0.5)]
    check = Check(steps, [])
    errors = check.errors
    assert errors["step"].mean == pytest.approx((0.5 + 0.1 + 0.5) / 3)
    assert errors["step"].worst == pytest.approx(0.5)
    assert errors["from_run"].mean == pytest.approx(0.5 / 3)
    # ratios to on-demand: 1.1 predicted and 0.5 measured; 0.5 predicted and 0.5 measured
    assert (errors["ratio"].mean, errors["ratio"].worst) == (pytest.approx(0.6), pytest.approx(1.2))
    assert Check([], []).errors["ratio"].worst == 0.0
    json.dumps(check.to_dict())


def test_sweep_compares_chosen_cutoffs_with_the_best() -> None:
    sweep = CutoffSweep("25%", 4, {0: 3.0, 4: 2.0, 8: 2.5}, {0: 3.0}, auto=8, just_in_time=0)
    assert sweep.best == 4
    assert (sweep.slowdown(8), sweep.slowdown(0)) == (pytest.approx(0.25), pytest.approx(0.5))
    assert sweep.to_dict()["auto_slowdown"] == pytest.approx(0.25)


# ---- in reports


def profile_of_report(**subject: Any) -> EngineProfile:
    """A profile of the machine and model of `test_report`'s results, with these differences."""
    from test_report import MACHINE

    same = {"dtype": MACHINE["dtype"], "expert_bytes": MACHINE["expert_bytes"], "top_k": MACHINE["top_k"], **subject}
    updated = PROFILE.subject.model_copy(update=same)
    return PROFILE.model_copy(update={"machine": {"device": MACHINE["device"]}, "subject": updated})


def test_report_draws_predictions_beside_the_sweep() -> None:
    from test_report import MACHINE, SWEEP, SYSTEMS

    groups = [WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP])]
    plain, drawn = (html_report(groups, profile) for profile in (None, profile_of_report()))
    assert "predicted from the profile" not in plain
    assert "predicted from the profile" in drawn
    other = WorkloadResults({**MACHINE, "link_gbps": 16.0}, SWEEP)
    both = html_report([*groups, other], profile_of_report())
    assert both.count("predicted from the profile") == 1, "only for the group of the same link"
    assert unescape(both).count("Not predicted: the profile is of the machine's own link.") == 1


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
def test_report_refuses_a_profile_of_another_model_or_link(change: dict[str, Any], words: str) -> None:
    from test_report import MACHINE, SWEEP

    with pytest.raises(UsageError, match=words) as refused:
        html_report([WorkloadResults(MACHINE, SWEEP)], profile_of_report(**change))
    assert "spmoe profile -o FILE" in str(refused.value)


def test_report_refuses_a_profile_of_another_machine_or_without_a_sweep() -> None:
    from test_report import MACHINE, SWEEP, SYSTEMS

    elsewhere = profile_of_report().model_copy(update={"machine": {"device": "another"}})
    with pytest.raises(UsageError, match="of the device another, and these results are of the device a <device>"):
        html_report([WorkloadResults(MACHINE, SWEEP)], elsewhere)
    with pytest.raises(UsageError, match=r"contain no cutoff sweep .*; leave out --profile"):
        html_report([WorkloadResults(MACHINE, SYSTEMS)], profile_of_report())


def test_report_command_refuses_a_profile_in_one_line(
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

    profile_of_report(dtype="bfloat16").save(profile)
    code, said = report("-o", page)
    assert (code, said.count("\n"), page.exists()) == (2, 1, False)
    assert "dtype bfloat16" in said
    assert report("--markdown")[0] == 2
    profile_of_report().save(profile)
    assert report("-o", page)[0] == 0
    assert "predicted from the profile" in page.read_text()


# ---- measured


def test_measures_and_checks_a_tiny_pair(mixtral_pair: Pair, tmp_path: Path) -> None:
    options: dict[str, Any] = {"expert_memory": memory_for(6), "link_gbps": 0.05, "prefetch": "on-demand"}
    titles: list[str] = []

    @contextmanager
    def progress(title: str) -> Iterator[Report]:
        titles.append(title)
        yield lambda done, total, detail="": None

    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), num_speculative_tokens=4, **options) as llm:
        profile = measure_profile(llm, 2, Workload(PROMPTS, 10, progress=progress))
        assert profile.draft_pass_seconds is not None
        assert list(profile.verify_seconds) == [1, 2, 3, 5], "up to the engine's K + 1"
        assert 0.0 <= profile.expert_share <= 1.0
        blob = llm.engine.spec.layout.nbytes
        assert list(profile.load_seconds) == [1, 2, 4]
        assert all(seconds >= count * blob / 0.05e9 for count, seconds in profile.load_seconds.items()), "link speed"
        assert [one.policy for one in profile.policies] == list(PROFILED_POLICIES)
        for stats in profile.policies:
            assert 0 < stats.missing <= stats.needed <= 4
            assert stats.missing == pytest.approx(sum(stats.missing_by_layer) / 3)
            assert 1.5 < stats.draft_passes <= 2.0, "few drafts are cut short"
            assert min(stats.draft_seconds, stats.verify_seconds) > 0
        assert 0 < profile.stats("draft-gate").draft_recall <= 1
        assert profile.stats("draft-gate").verify_recall == 0
        assert 0 < profile.stats("next-gate").verify_recall <= 1
        profile.save(tmp_path / "a.json")
        assert read_engine_profile(tmp_path / "a.json") == profile
        workload = Workload(PROMPTS[:1], 8, progress=progress)
        check = check_engine(llm, Predictor(profile), Size(bytes=6 * blob), [2], [0, 3], 1, workload)
    found = {(step.policy, step.draft_tokens, step.cutoff) for step in check.steps}
    assert {("on-demand", 2, None), ("next-gate", 2, None), ("draft-gate", 2, 0)} <= found
    (sweep,) = check.sweeps
    assert set(sweep.predicted) == {0, 1, 2, 3}
    assert {0, 3, sweep.auto, sweep.just_in_time} == set(sweep.measured)
    assert all(one.measured > 0 and one.predicted > 0 and one.steps > 0 for one in check.steps)
    assert len(titles) == 2


def test_configurations_on_one_engine_do_not_affect_each_other(mixtral_pair: Pair) -> None:
    def missing(others: bool) -> tuple[list[float], list[float]]:
        with LLM(
            str(mixtral_pair.target), str(mixtral_pair.good), num_speculative_tokens=2, expert_memory=memory_for(6)
        ) as llm:
            policies = ("next-gate", "on-demand") if others else ("on-demand",)
            stats = measure_policies(llm, 2, Workload(PROMPTS, 10), policies)
            profile = measure_profile(llm, 2, Workload(PROMPTS[:1], 4))
            depths = [0, 1, 2, 3] if others else []
            check = check_engine(llm, Predictor(profile), Size(bytes=0), [2], depths, 1, Workload(PROMPTS, 8))
        return (
            [one.missing for one in stats if one.policy == "on-demand"],
            [one.missing for one in check.steps if one.policy == "on-demand"],
        )

    assert missing(others=True) == missing(others=False)


def test_prediction_counter_agrees_with_the_engine_counters(mixtral_pair: Pair) -> None:
    with (
        LLM(
            str(mixtral_pair.target), str(mixtral_pair.good), num_speculative_tokens=2, expert_memory=memory_for(6)
        ) as llm,
        counted_predictions(llm.engine) as counter,
    ):
        stats = generate(llm, PROMPTS[0], Workload([], 12)).stats
    counters = stats.decode_counters
    assert sum(counter.missing) == counters.useful_loads
    assert counter.needed == counters.asked
    assert all(0 <= counter.correct[stage] <= counter.predicted[stage] for stage in counter.predicted)
