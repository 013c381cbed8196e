"""Isolated configurations: each loads the same experts on a shared engine as on an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.bench.runs import IsolatedConfigs
from spmoe.config import ONE_BY_ONE, Cutoff, CutoffMode
from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.eviction import ScoredEviction
from spmoe.experts.transfer import FileTransfer, FutureHandle

PROMPTS = ["the cat", "a longer prompt", "the cat", "0123 zz"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
CONFIGURATIONS: list[dict[str, Any]] = [
    {"prefetch": "on-demand", "eviction": "lru", "num_speculative_tokens": 3},
    {"prefetch": "on-demand", "eviction": "draft-informed", "num_speculative_tokens": 3},
    {"prefetch": "on-demand", "eviction": "draft-informed", "num_speculative_tokens": 0},
    {"prefetch": "activation", "eviction": "activation", "num_speculative_tokens": 0},
]
Select = Callable[[int], None]


def engine(pair: Pair, **options: Any) -> LLM:
    given = {"expert_memory": "50%", "num_speculative_tokens": 3, "prefetch": "on-demand", **ONE_BY_ONE, **options}
    return LLM(str(pair.target), str(pair.good), progress=False, **given)


def loads(llm: LLM, select: Select, numbers: list[int]) -> dict[int, list[tuple[int, ...]]]:
    """Return routed experts and demand loads of every prompt under each configuration, in turns."""
    found: dict[int, list[tuple[int, ...]]] = {number: [] for number in numbers}
    for turn, prompt in enumerate(PROMPTS):
        for number in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
            select(number)
            counters = llm.generate(prompt, PARAMS)[0].stats.counters
            # which prefetches are in time depends on the worker thread; which experts are needed does not
            found[number].append((counters.hits + counters.late + counters.demand_loads, counters.demand_loads))
    return found


def test_configuration_loads_the_same_experts_as_on_its_own_engine(mixtral_pair: Pair) -> None:
    numbers = [0, 1, 2]
    alone = {}
    for number in numbers:
        with engine(mixtral_pair, eviction=CONFIGURATIONS[number]["eviction"]) as llm:
            llm.engine.reconfigure(**CONFIGURATIONS[number])
            alone |= loads(llm, lambda number: None, [number])
    with engine(mixtral_pair) as llm:
        isolated = IsolatedConfigs(llm.engine)
        assert loads(llm, lambda number: isolated.select(number, CONFIGURATIONS[number]), numbers) == alone
    with engine(mixtral_pair) as llm:
        shared = loads(llm, lambda number: llm.engine.reconfigure(**CONFIGURATIONS[number]), numbers)
    assert shared != alone, "without isolation they differ, or this test shows nothing"


def test_copies_for_a_switch_are_not_counted_and_state_is_restored(mixtral_pair: Pair) -> None:
    with engine(mixtral_pair) as llm:
        isolated, cache = IsolatedConfigs(llm.engine), llm.engine.experts.pool._cache
        state: dict[int, tuple[Any, ...]] = {}
        for turn in range(3):
            for number, changes in enumerate(CONFIGURATIONS):
                counters = llm.engine.counters.copy()
                isolated.select(number, changes)
                moved = llm.engine.counters.minus(counters)
                assert (moved.hits, moved.demand_loads, moved.demand_bytes, moved.steps) == (0, 0, 0, 0)
                present = {entry.key for entry in cache.entries()}
                if turn:
                    assert state[number] == (present, cache.eviction, llm.engine.loop.policy.name)
                else:
                    assert not present
                llm.generate(PROMPTS[number], PARAMS)
                state[number] = ({e.key for e in cache.entries()}, cache.eviction, llm.engine.loop.policy.name)
        assert len({id(eviction) for _, eviction, _ in state.values()}) == len(CONFIGURATIONS)
        held = int(cache.prefetched.sum()) * llm.engine.experts.pool.blob_bytes
        assert llm.engine.counters.held_bytes == held, "evicted without use counts as wasted"


def test_cutoff_is_learned_from_steps_of_the_same_configuration(mixtral_pair: Pair) -> None:
    """Also if two configurations share the profile file because they differ in the cutoff only."""
    shared = {"prefetch": "draft-gate", "num_speculative_tokens": 3}
    changes = [{**shared, "cutoff": Cutoff(mode)} for mode in (CutoffMode.AUTO, CutoffMode.ALL)]
    with engine(mixtral_pair) as llm:
        isolated, steps = IsolatedConfigs(llm.engine), [0, 0]
        for prompt in PROMPTS:
            for number in (0, 1):
                isolated.select(number, changes[number])
                assert llm.engine.counters.minus(llm.engine.prefetching.since).steps == steps[number]
                steps[number] += llm.generate(prompt, PARAMS)[0].stats.counters.steps
        assert len(llm.engine.learned.profiles) == 1
    assert min(steps) > 0


def test_nothing_is_evicted_with_slots_for_all_experts(mixtral_pair: Pair) -> None:
    with engine(mixtral_pair, expert_memory="100%") as llm:
        isolated = IsolatedConfigs(llm.engine)
        for number, changes in enumerate(CONFIGURATIONS):
            isolated.select(number, changes)
            llm.generate("every expert, sooner or later: abcdefghijklmnopqrstuvwxyz 0123456789", PARAMS)
        before = llm.engine.counters.demand_loads
        isolated.select(0, CONFIGURATIONS[0])
        llm.generate("every expert, sooner or later: abcdefghijklmnopqrstuvwxyz 0123456789", PARAMS)
        assert llm.engine.counters.demand_loads == before


def test_failed_copy_raises(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(mixtral_pair) as llm:
        isolated = IsolatedConfigs(llm.engine)
        isolated.select(0, CONFIGURATIONS[0])
        llm.generate(PROMPTS[0], PARAMS)
        isolated.select(1, CONFIGURATIONS[1])
        _break_copies(monkeypatch)
        with pytest.raises(SpmoeError, match="broken"):
            isolated.select(0, CONFIGURATIONS[0])


def _break_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: FileTransfer, jobs: Any, *, urgent: bool) -> Any:
        raise TransferError("broken")

    monkeypatch.setattr(FileTransfer, "copy", copy)


@pytest.mark.parametrize("at_submission", [True, False], ids=["submission fails", "copy fails"])
def test_eviction_policy_knows_its_slots_after_a_failed_copy(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, at_submission: bool
) -> None:
    with engine(mixtral_pair) as llm:
        isolated, cache = IsolatedConfigs(llm.engine), llm.engine.experts.pool._cache
        for number in (0, 1):
            isolated.select(number, CONFIGURATIONS[number])
            llm.generate(PROMPTS[number], PARAMS)
        with monkeypatch.context() as broken:
            if at_submission:
                _break_copies(broken)
            else:
                broken.setattr(FutureHandle, "wait", _fail)
            with pytest.raises(SpmoeError, match="broken"):
                isolated.select(0, CONFIGURATIONS[0])
        for number in (0, 1, 0, 1):
            isolated.select(number, CONFIGURATIONS[number])
            policy = cache.eviction
            assert isinstance(policy, ScoredEviction)
            assert (policy._resident == cache.present).all()
            assert policy is llm.engine.learned.evictions[CONFIGURATIONS[number]["eviction"]]
            llm.generate(PROMPTS[number], PARAMS)


def _fail(self: FutureHandle) -> None:
    raise TransferError("broken")
