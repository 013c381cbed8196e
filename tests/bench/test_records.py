"""Metrics of runs whose counters are known."""

from __future__ import annotations

from typing import Any

import pytest

from spmoe.bench.configs import BenchConfig
from spmoe.bench.records import (
    compare_tokens,
    find_differences,
    find_resident_steps,
    group_by_config,
    metrics,
)
from spmoe.bench.runs import BenchRun, ResidentStep
from spmoe.config import Size
from spmoe.engine.outputs import CompletionOutput, RequestOutput
from spmoe.engine.stats import Stats
from spmoe.observe.ledger import Counters

BLOB = 1000
PLAIN = BenchConfig(Size(share=0.25), "on-demand", 0)
FETCHED = BenchConfig(Size(share=0.25), "draft-gate", 4)
PROMPT_COUNTERS: dict[str, Any] = {"steps": 1, "tokens": 1, "demand_loads": 50, "demand_bytes": 50 * BLOB, "hits": 7}


def make_run(
    config: BenchConfig, *, prompt: int = 0, tokens: list[int] | None = None, seconds: float = 1.0, **counted: Any
) -> BenchRun:
    """Return a run of 11 tokens, 10 of them decoded in `seconds` with these counters."""
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
        prefetch=config.prefetch,
        draft_tokens=config.draft_tokens,
        emulated_link_gbps=None,
    )
    return BenchRun(
        config, prompt, 0, RequestOutput("0", None, [], [CompletionOutput(0, "", ids, "length")], True, stats)
    )


def prefetched(seconds: float = 1.0) -> BenchRun:
    return make_run(
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


def test_metrics_count_decoding_only() -> None:
    found = metrics([prefetched(1.0), prefetched(3.0)], ResidentStep(0.1, "measured"), link=1e6)
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
    assert found["counters"]["demand_loads"] == 60


def test_acceptance_by_position_is_summed_over_runs() -> None:
    long = make_run(FETCHED, steps=4, verified=4, accepted=6, drafted_at=[4, 4, 4, 4], accepted_at=[3, 2, 1, 0])
    short = make_run(FETCHED, steps=2, verified=2, accepted=1, drafted_at=[2], accepted_at=[1])
    found = metrics([long, short], ResidentStep(0.1, "given"), link=1e6)
    assert found["acceptance_by_position"] == [4 / 6, 2 / 4, 1 / 4, 0.0]
    assert found["counters"]["drafted_at"] == [6, 4, 4, 4]
    after = make_run(PLAIN, steps=10, drafted_at=[0, 0], accepted_at=[0, 0])  # an engine that has drafted before
    assert metrics([after], ResidentStep(0.1, "given"), link=1e6)["acceptance_by_position"] == []


@pytest.mark.parametrize(("link", "ideal"), [(1e6, 0.1), (70_000, 0.25), (7_000, 2.5)])
def test_efficiency_uses_the_larger_of_link_and_compute_time(link: float, ideal: float) -> None:
    found = metrics([prefetched(2.0)], ResidentStep(0.1, "given"), link)
    assert found["all_resident_source"] == "given"
    assert found["all_resident_step_seconds"] == 0.1
    assert found["ideal_step_seconds"] == pytest.approx(ideal)
    assert found["pipeline_efficiency"] == pytest.approx(ideal / 0.5)


def test_shares_are_none_without_events() -> None:
    found = metrics([make_run(PLAIN, steps=10)], ResidentStep(0.1, "measured"), link=1e6)
    assert found["hit_rate"] is found["mean_acceptance_length"] is found["prefetch_used_share"] is None
    assert found["pipeline_efficiency"] == pytest.approx(1.0)


def test_resident_step_is_given_measured_or_estimated() -> None:
    slow = make_run(PLAIN, steps=10, draft_seconds=0.0, verify_seconds=0.9, stall_seconds=0.4)
    runs = [slow, make_run(FETCHED, steps=4, draft_seconds=0.2, verify_seconds=0.6, stall_seconds=0.4)]
    assert find_resident_steps(runs, [], {0: 0.02}, {}) == {
        0: ResidentStep(0.02, "given"),
        4: ResidentStep(pytest.approx(0.1), "estimated"),  # type: ignore[arg-type]
    }
    whole = BenchConfig(Size(share=1.0), "on-demand", 0)
    found = find_resident_steps(runs, [make_run(whole, steps=10, seconds=0.3)], {}, {})
    assert found[0] == ResidentStep(pytest.approx(0.03), "measured")  # type: ignore[arg-type]
    assert found[4].source == "estimated"


def test_difference_is_reported_at_its_first_token() -> None:
    same, other = list(range(11)), [0, 1, 2, 9, 9, 9, 9, 9, 9, 9, 9]
    runs = [
        make_run(PLAIN, prompt=0, tokens=same),
        make_run(PLAIN, prompt=1, tokens=same),
        make_run(FETCHED, prompt=0, tokens=same),
        make_run(FETCHED, prompt=1, tokens=other),
        make_run(FETCHED, prompt=1, tokens=same[:10]),
    ]
    (found,) = find_differences(runs, runs)
    assert (found.configs, found.prompt, found.position) == ((PLAIN, FETCHED), 1, 3)
    assert str(found) == "25%, draft-gate, K=4 differs from 25%, on-demand, K=0 on prompt 2, from token 4 on"
    groups = group_by_config(runs)
    assert compare_tokens(groups[PLAIN], runs, groups[PLAIN])["identical_share"] == 1.0
    shares = compare_tokens(groups[FETCHED], runs, groups[FETCHED])
    assert (shares["identical_share"], shares["first_divergence"]) == (0.5, 3)
    assert (shares["identical_share_same_k"], shares["first_divergence_same_k"]) == (0.5, 3), "its own runs differ"
    assert shares["difference"] == str(found)
