"""Figures of a benchmark, from runs whose numbers are known."""

from __future__ import annotations

from typing import Any

import pytest

from spmoe.bench.figures import by_setting, differences, figures, resident_steps, sameness
from spmoe.bench.runs import ResidentStep, Run
from spmoe.bench.settings import Setting
from spmoe.config import Size
from spmoe.engine.llm import Completion
from spmoe.engine.stats import Stats
from spmoe.observe.ledger import Counters

BLOB = 1000
PLAIN = Setting(Size(share=0.25), "on-demand", 0)
FETCHED = Setting(Size(share=0.25), "draft-gate", 4)
PROMPT_COUNTERS: dict[str, Any] = {"steps": 1, "tokens": 1, "demand_loads": 50, "demand_bytes": 50 * BLOB, "hits": 7}


def run_of(
    setting: Setting, *, prompt: int = 0, tokens: list[int] | None = None, seconds: float = 1.0, **counted: Any
) -> Run:
    """A run of eleven tokens, ten of which are decoded in so many seconds with these counters."""
    ids = tokens or list(range(11))
    total = PROMPT_COUNTERS | {
        name: value + PROMPT_COUNTERS[name] if name in PROMPT_COUNTERS else value for name, value in counted.items()
    }
    stats = Stats(
        prompt_tokens=5,
        output_tokens=len(ids),
        ttft_seconds=0.5,
        latency_seconds=0.5 + seconds,
        counters=Counters(**total),
        prompt_counters=Counters(**PROMPT_COUNTERS),
        held_bytes=0,
        slots=32,
        peak_slots=32,
        cutoff_layers=None,
        layers=16,
        prefetch=setting.prefetch,
        draft_tokens=setting.draft_tokens,
        emulated_link_gbps=None,
    )
    return Run(setting, prompt, 0, Completion("", ids, "length", stats))


def prefetched(seconds: float = 1.0) -> Run:
    return run_of(
        FETCHED,
        seconds=seconds,
        steps=4,
        tokens=None,
        verified=4,
        drafted=16,
        accepted=6,
        hits=60,
        late=10,
        demand_loads=30,
        demand_bytes=30 * BLOB,
        prefetch_loads=50,
        issued_bytes=50 * BLOB,
        prefetch_used=40,
        used_bytes=40 * BLOB,
        late_bytes=10 * BLOB,
        wasted_bytes=8 * BLOB,
        stall_seconds=0.1,
        draft_seconds=0.4,
        verify_seconds=0.6,
    )


def test_figures_of_decoding_alone() -> None:
    found = figures([prefetched(1.0), prefetched(3.0)], ResidentStep(0.1, "measured"), link=1e6)
    assert found["runs"] == 2
    assert (found["steps"], found["output_tokens"]) == (8, 20)
    assert found["tpot_seconds"] == pytest.approx({"median": 0.2, "p10": 0.12, "p90": 0.28, "min": 0.1, "max": 0.3})
    assert found["ttft_seconds"]["median"] == 0.5
    assert found["tokens_per_second"] == pytest.approx(20 / 4)
    assert found["mean_acceptance_length"] == 1 + 6 / 4
    assert found["hit_rate"] == 0.6
    assert found["bytes_moved_per_token"] == 80 * BLOB / 10
    assert found["bytes_moved_per_step"] == 80 * BLOB / 4
    assert found["useful_bytes_per_step"] == 70 * BLOB / 4
    assert found["link_bytes_per_second"] == 160 * BLOB / 4
    assert found["prefetch_used_share"] == pytest.approx(40 / 48)
    assert found["prefetch_late_share"] == pytest.approx(10 / 48)
    assert found["prefetch_wasted_share"] == pytest.approx(8 / 48)
    assert found["step_seconds"] == 4 / 8
    assert found["stall_seconds_per_step"] == pytest.approx(0.1 / 4)
    assert found["ledger"]["demand_loads"] == 60


def test_acceptance_by_position_adds_up_over_runs() -> None:
    long = run_of(FETCHED, steps=4, verified=4, accepted=6, drafted_at=[4, 4, 4, 4], accepted_at=[3, 2, 1, 0])
    short = run_of(FETCHED, steps=2, verified=2, accepted=1, drafted_at=[2], accepted_at=[1])
    found = figures([long, short], ResidentStep(0.1, "given"), link=1e6)
    assert found["acceptance_by_position"] == [4 / 6, 2 / 4, 1 / 4, 0.0]
    assert found["ledger"]["drafted_at"] == [6, 4, 4, 4]
    after = run_of(PLAIN, steps=10, drafted_at=[0, 0], accepted_at=[0, 0])  # an engine that has drafted before
    assert figures([after], ResidentStep(0.1, "given"), link=1e6)["acceptance_by_position"] == []


@pytest.mark.parametrize(("link", "ideal"), [(1e6, 0.1), (70_000, 0.25), (7_000, 2.5)])
def test_efficiency_is_of_whichever_takes_longer(link: float, ideal: float) -> None:
    found = figures([prefetched(2.0)], ResidentStep(0.1, "given"), link)
    assert found["resident_source"] == "given"
    assert found["all_resident_step_seconds"] == 0.1
    assert found["ideal_step_seconds"] == pytest.approx(ideal)
    assert found["pipeline_efficiency"] == pytest.approx(ideal / 0.5)


def test_where_nothing_was_asked_for_there_are_no_shares() -> None:
    found = figures([run_of(PLAIN, steps=10)], ResidentStep(0.1, "measured"), link=1e6)
    assert found["hit_rate"] is found["mean_acceptance_length"] is found["prefetch_used_share"] is None
    assert found["pipeline_efficiency"] == pytest.approx(1.0)


def test_resident_steps_are_given_measured_or_estimated() -> None:
    slow = run_of(PLAIN, steps=10, draft_seconds=0.0, verify_seconds=0.9, stall_seconds=0.4)
    runs = [slow, run_of(FETCHED, steps=4, draft_seconds=0.2, verify_seconds=0.6, stall_seconds=0.4)]
    assert resident_steps(runs, [], {0: 0.02}) == {
        0: ResidentStep(0.02, "given"),
        4: ResidentStep(pytest.approx(0.1), "estimated"),  # type: ignore[arg-type]
    }
    whole = Setting(Size(share=1.0), "on-demand", 0)
    found = resident_steps(runs, [run_of(whole, steps=10, seconds=0.3)], {})
    assert found[0] == ResidentStep(pytest.approx(0.03), "measured")  # type: ignore[arg-type]
    assert found[4].source == "estimated"


def test_differences_are_found_where_they_begin() -> None:
    same, other = list(range(11)), [0, 1, 2, 9, 9, 9, 9, 9, 9, 9, 9]
    runs = [
        run_of(PLAIN, prompt=0, tokens=same),
        run_of(PLAIN, prompt=1, tokens=same),
        run_of(FETCHED, prompt=0, tokens=same),
        run_of(FETCHED, prompt=1, tokens=other),
        run_of(FETCHED, prompt=1, tokens=same[:10]),
    ]
    (found,) = differences(runs, runs)
    assert (found.settings, found.prompt, found.position) == ((PLAIN, FETCHED), 1, 3)
    assert str(found) == "25%, draft-gate, K=4 differs from 25%, on-demand, K=0 on prompt 2, from token 4 on"
    groups = by_setting(runs)
    assert sameness(groups[PLAIN], runs, groups[PLAIN])["identical_share"] == 1.0
    figure = sameness(groups[FETCHED], runs, groups[FETCHED])
    assert (figure["identical_share"], figure["first_divergence"]) == (0.5, 3)
    assert (figure["identical_share_same_k"], figure["first_divergence_same_k"]) == (0.5, 3), "its own runs disagree"
    assert figure["differs"] == str(found)
