"""Intra-op threads on the CPU: the number is measured, cached, honoured if the user chose one, and restored."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.config import EngineConfig
from spmoe.engine import build, threads
from spmoe.engine.plan import make_plan
from spmoe.engine.profiling import slow_draft_notice
from spmoe.engine.threads import IntraOpThreads, compute_times, thread_counts
from spmoe.types import Turn

TimePass = Callable[[Any, int], float]


@pytest.fixture(autouse=True)
def _four_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let PyTorch have started with four threads, on four cores, and nothing be cached."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(threads, "_process", threads._ProcessSetting())
    monkeypatch.setattr(threads, "_default_counts", lambda default: {4})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[TimePass], list[tuple[int, int]]]:
    """Return a function that replaces the times of passes, and returns the list of timed (threads, rows)."""
    monkeypatch.setattr(build, "compute_times", compute_times)
    run = threads._time_pass

    def replace(seconds: TimePass) -> list[tuple[int, int]]:
        passes: list[tuple[int, int]] = []

        def time_pass(runner: Any, rows: int) -> float:
            assert run(runner, rows) > 0  # the forward itself works
            passes.append((torch.get_num_threads(), rows))
            return seconds(runner, rows)

        monkeypatch.setattr(threads, "_time_pass", time_pass)
        return passes

    return replace


def small(runner: Any, rows: int) -> float:
    """Return the seconds of a pass of a small model: prompts are faster on several threads, other passes slower."""
    count = torch.get_num_threads()
    return 0.02 / count if rows >= threads.TIMED_PROMPT_ROWS else 0.01 * count**2


def make(pair: Pair, **options: Any) -> LLM:
    given = {"draft": None, "device": "cpu", "progress": False, "expert_memory": "50%", "cutoff": "all", **options}
    return LLM(str(pair.target), **given)


# ---- the choice


@pytest.mark.parametrize(
    ("times", "expected", "tried"),
    [
        ({1: 1.0, 2: 0.5, 4: 0.3}, 4, 4),
        ({1: 1.0, 2: 0.95, 4: 0.3}, 4, 4),  # a tie is no reason to stop
        ({1: 1.0, 2: 0.95, 4: 0.92}, 1, 4),  # fewer threads, if more are hardly faster
        ({1: 1.0, 2: 0.5, 4: 0.8}, 2, 4),
        ({1: 1.0, 2: 1.2, 4: 0.1}, 1, 2),  # slower: four threads are not tried
        ({1: 1.0, 2: 0.6, 4: 0.55}, 2, 4),
    ],
)
def test_the_fastest_number_is_chosen(
    monkeypatch: pytest.MonkeyPatch, times: dict[int, float], expected: int, tried: int
) -> None:
    monkeypatch.setattr(threads, "_time_pass", lambda runner, rows: times[torch.get_num_threads()] / 10)
    part = threads._Part(None, 1, 1)  # type: ignore[arg-type]
    assert threads.fastest([1, 2, 4], [part]) == expected
    assert torch.get_num_threads() == tried


def test_one_slow_pass_on_several_threads_decides_against_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def time_pass(runner: Any, rows: int) -> float:
        calls.append(torch.get_num_threads())
        return 0.01 if calls[-1] == 1 else 5.0 if calls.count(2) == 3 else 0.005

    monkeypatch.setattr(threads, "_time_pass", time_pass)
    assert threads.fastest([1, 2, 4], [threads._Part(None, 1, 1)]) == 1  # type: ignore[arg-type]
    assert calls.count(2) == 3, "passes after the slow one are not run"
    assert 4 not in calls


def test_long_passes_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def time_pass(runner: Any, rows: int) -> float:
        calls.append(torch.get_num_threads())
        return 8.0 / calls[-1]

    monkeypatch.setattr(threads, "_time_pass", time_pass)
    assert threads.fastest([1, 2, 4], [threads._Part(None, 1, 1)]) == 4  # type: ignore[arg-type]
    assert calls == [1, 2, 4]


def test_numbers_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread_counts() == [1, 2, 4]
    monkeypatch.setattr(threads, "_default_counts", lambda default: {6, 12})
    for start, counts in ((6, [1, 2, 4, 6]), (12, [1, 2, 4, 8, 12]), (3, [3])):  # 3: set before spmoe was imported
        torch.set_num_threads(start)
        monkeypatch.setattr(threads, "_process", threads._ProcessSetting())
        assert thread_counts() == counts


def test_the_users_number_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)  # after spmoe was imported
    assert thread_counts() == [2]
    torch.set_num_threads(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert thread_counts() == [4]


def test_cores_of_this_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert all(1 <= count <= 4096 for count in threads._default_counts(1))
    monkeypatch.setattr(threads, "_CPU_TOPOLOGY", Path("/nowhere"))
    assert threads._default_counts(5) == {5}


# ---- engines


def test_an_engine_measures_once_and_caches_the_result(
    mixtral_pair: Pair, timed: Callable[[TimePass], list[tuple[int, int]]], tmp_path: Path
) -> None:
    passes = timed(small)
    with make(mixtral_pair, prefetch="on-demand") as llm:  # so that nothing else is measured
        assert (llm.engine.parts.threads.decode, llm.engine.parts.threads.prompt) == (1, 1)
        assert llm._thread.call(torch.get_num_threads) == 1
        assert llm.engine.counters.hits + llm.engine.counters.demand_loads == 0, "no expert was loaded for it"
    assert torch.get_num_threads() == 4
    (file,) = (tmp_path / "profiles").glob("threads-*.json")
    assert json.loads(file.read_text())["threads"] == 1
    passes.clear()
    with make(mixtral_pair) as llm:
        assert llm.engine.parts.threads.decode == 1
    assert not passes
    for damage in (
        "{",
        "[]",
        '{"origin": [], "threads": -1}',
        file.read_text().replace('"threads": 1', '"threads": "1"'),
    ):
        file.write_text(damage)
        make(mixtral_pair).close()
        assert passes, f"measured again after {damage}"
        passes.clear()


def test_prompts_may_run_with_more_threads(
    mixtral_pair: Pair, timed: Callable[[TimePass], list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(lambda runner, rows: small(runner, rows) if rows >= threads.TIMED_PROMPT_ROWS else 0.01)
    with make(mixtral_pair) as llm:
        assert (llm.engine.parts.threads.decode, llm.engine.parts.threads.prompt) == (1, 4)
        counts, step = [], llm.engine.loop.step

        def record(turns: Sequence[Turn]) -> list[list[int]]:
            counts.append(torch.get_num_threads())
            return step(turns)

        monkeypatch.setattr(llm.engine.loop, "step", record)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate("y" * threads.TIMED_PROMPT_ROWS, params)
        llm.generate("short", params)
        assert counts == [4, 1, 1, 1]


def test_the_number_is_in_force_on_any_thread_and_restored_there(
    mixtral_pair: Pair, timed: Callable[[TimePass], list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(small)
    started, built, ended = threading.Event(), threading.Event(), threading.Event()
    counts: list[int] = []
    engines: list[LLM] = []

    def work() -> None:
        counts.append(torch.get_num_threads())  # an old thread: it keeps its own number
        started.set()
        built.wait(60)
        (llm,) = engines
        step = llm.engine.loop.step

        def record(turns: Sequence[Turn]) -> list[list[int]]:
            counts.append(torch.get_num_threads())
            return step(turns)

        monkeypatch.setattr(llm.engine.loop, "step", record)
        llm.generate("abc", SamplingParams(max_tokens=1))
        counts.append(torch.get_num_threads())
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    with make(mixtral_pair) as llm:
        engines.append(llm)
        built.set()
        assert ended.wait(60)
        thread.join()
        assert counts == [4, 1, 4]


def test_the_last_of_several_engines_restores_the_number() -> None:
    first, second, untouched = IntraOpThreads(1, 2), IntraOpThreads(2, 2), IntraOpThreads()
    assert thread_counts() == [1, 2, 4], "the number of another engine is not the user's"
    for one in (first, first, untouched):
        one.close()
        assert torch.get_num_threads() == 2
    with first.in_force(1):
        assert torch.get_num_threads() == 1
    second.close()
    assert torch.get_num_threads() == 4


def test_a_failed_build_restores_the_number(
    mixtral_pair: Pair, timed: Callable[[TimePass], list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(small)
    monkeypatch.setattr(build, "Engine", lambda *parts: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        make(mixtral_pair)
    assert torch.get_num_threads() == 4


def test_info_finds_the_profile_of_the_engine(
    mixtral_pair: Pair, timed: Callable[[TimePass], list[tuple[int, int]]]
) -> None:
    timed(small)
    options = {"draft": str(mixtral_pair.good), "cutoff": "auto", "expert_memory": "50%", "device": "cpu"}
    with make(mixtral_pair, **options) as llm:
        profile = llm.engine.prefetching.profile
    plan = make_plan(EngineConfig.make(model=str(mixtral_pair.target), **options))
    assert profile is not None
    assert plan.prefetch.profile is not None
    assert plan.prefetch.profile.draft_seconds_per_layer == profile.draft_seconds_per_layer


# ---- drafts that are too slow


def test_a_slow_draft_is_reported_with_its_ratio(
    mixtral_pair: Pair, timed: Callable[[TimePass], list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # one number of threads, but the draft is timed
    timed(lambda runner, rows: 0.06 if type(runner).__name__ == "QuantizedSelfRunner" else 0.01)
    with make(mixtral_pair, draft="self:int4", num_speculative_tokens=4) as llm:
        assert torch.get_num_threads() == 4
        (_, notice) = llm.notices
    assert "draft self:int4 takes 6.0 times as long as one of the target (60 ms, 10 ms)" in notice
    assert "takes 5.0 times as long as with -k 0" in notice  # (4 * 60 + 10) / 5 ms
    assert "--draft ngram" in notice
    with make(mixtral_pair, draft="self:int4", num_speculative_tokens=4, link_gbps=1e-5, prefetch="on-demand") as llm:
        assert not [notice for notice in llm.notices if "as long as" in notice], "loads take longer than any pass"
    with make(mixtral_pair, draft=str(mixtral_pair.good), num_speculative_tokens=4) as llm:
        assert llm.notices == []


def test_a_draft_as_fast_as_the_target_is_not_reported() -> None:
    assert slow_draft_notice("d", 4, 0.010, 0.012, 0.010) is None
    assert slow_draft_notice("d", 0, 1.0, 0.012, 0.010) is None
