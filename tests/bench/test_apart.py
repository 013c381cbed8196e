"""Configurations that take turns on one engine load what each would on an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.bench.apart import Apart
from spmoe.config import Cutoff, CutoffMode
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
Enter = Callable[[int], None]


def engine(pair: Pair, **options: Any) -> LLM:
    given = {"expert_memory": "50%", "num_speculative_tokens": 3, "prefetch": "on-demand", **options}
    return LLM(str(pair.target), str(pair.good), progress=False, **given)


def loads(llm: LLM, enter: Enter, numbers: list[int]) -> dict[int, list[tuple[int, ...]]]:
    """Hits and loads of every prompt under each configuration, which take turns."""
    found: dict[int, list[tuple[int, ...]]] = {number: [] for number in numbers}
    for turn, prompt in enumerate(PROMPTS):
        for number in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
            enter(number)
            counters = llm.generate(prompt, PARAMS)[0].stats.counters
            # what is fetched for a prefetch request depends on when the worker wakes; that it is needed does not
            found[number].append((counters.hits + counters.late + counters.demand_loads, counters.demand_loads))
    return found


def test_each_loads_what_it_would_on_an_engine_of_its_own(mixtral_pair: Pair) -> None:
    numbers = [0, 1, 2]
    alone = {}
    for number in numbers:
        with engine(mixtral_pair, eviction=CONFIGURATIONS[number]["eviction"]) as llm:
            llm.engine.reconfigure(**CONFIGURATIONS[number])
            alone |= loads(llm, lambda number: None, [number])
    with engine(mixtral_pair) as llm:
        apart = Apart(llm.engine)
        assert loads(llm, lambda number: apart.enter(number, CONFIGURATIONS[number]), numbers) == alone
    with engine(mixtral_pair) as llm:
        together = loads(llm, lambda number: llm.engine.reconfigure(**CONFIGURATIONS[number]), numbers)
    assert together != alone, "or nothing had to be kept apart"


def test_what_moves_for_it_is_not_counted_and_nothing_is_forgotten(mixtral_pair: Pair) -> None:
    with engine(mixtral_pair) as llm:
        apart, cache = Apart(llm.engine), llm.engine.source.cache
        left: dict[int, tuple[Any, ...]] = {}
        for turn in range(3):
            for number, changes in enumerate(CONFIGURATIONS):
                counters = llm.engine.counters.copy()
                apart.enter(number, changes)
                moved = llm.engine.counters.minus(counters)
                assert (moved.hits, moved.demand_loads, moved.demand_bytes, moved.steps) == (0, 0, 0, 0)
                present = {entry.key for entry in cache.entries()}
                if turn:
                    assert left[number] == (present, cache.eviction, llm.engine.loop.policy.name)
                else:
                    assert not present
                llm.generate(PROMPTS[number], PARAMS)
                left[number] = ({e.key for e in cache.entries()}, cache.eviction, llm.engine.loop.policy.name)
        assert len({id(eviction) for _, eviction, _ in left.values()}) == len(CONFIGURATIONS)
        held = int(cache.prefetched.sum()) * llm.engine.experts.pool.blob_bytes
        assert llm.engine.counters.held_bytes == held, "what left without having been needed was wasted"


def test_each_learns_its_cutoff_from_its_own_steps(mixtral_pair: Pair) -> None:
    """Also where they differ in nothing else, so that they share the profile that is kept on disk."""
    shared = {"prefetch": "draft-gate", "num_speculative_tokens": 3}
    changes = [{**shared, "cutoff": Cutoff(mode)} for mode in (CutoffMode.AUTO, CutoffMode.ALL)]
    with engine(mixtral_pair) as llm:
        apart, steps = Apart(llm.engine), [0, 0]
        for prompt in PROMPTS:
            for number in (0, 1):
                apart.enter(number, changes[number])
                assert llm.engine.counters.minus(llm.engine.since).steps == steps[number]
                steps[number] += llm.generate(prompt, PARAMS)[0].stats.counters.steps
        assert len(llm.engine.learnt) == 1
    assert min(steps) > 0


def test_with_slots_for_all_nothing_leaves(mixtral_pair: Pair) -> None:
    with engine(mixtral_pair, expert_memory="100%") as llm:
        apart = Apart(llm.engine)
        for number, changes in enumerate(CONFIGURATIONS):
            apart.enter(number, changes)
            llm.generate("every expert, sooner or later: abcdefghijklmnopqrstuvwxyz 0123456789", PARAMS)
        before = llm.engine.counters.demand_loads
        apart.enter(0, CONFIGURATIONS[0])
        llm.generate("every expert, sooner or later: abcdefghijklmnopqrstuvwxyz 0123456789", PARAMS)
        assert llm.engine.counters.demand_loads == before


def test_a_copy_that_fails_is_told(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(mixtral_pair) as llm:
        apart, source = Apart(llm.engine), llm.engine.source
        apart.enter(0, CONFIGURATIONS[0])
        llm.generate(PROMPTS[0], PARAMS)
        apart.enter(1, CONFIGURATIONS[1])
        _break(monkeypatch, source)
        with pytest.raises(SpmoeError, match="broken"):
            apart.enter(0, CONFIGURATIONS[0])


def _break(monkeypatch: pytest.MonkeyPatch, source: ExpertSource) -> None:
    def copy(self: FileTransfer, jobs: Any, *, urgent: bool) -> Any:
        raise TransferError("broken")

    monkeypatch.setattr(type(source.transfer), "copy", copy)


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "read badly"])
def test_after_a_copy_that_failed_rules_know_what_is_in_slots(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    with engine(mixtral_pair) as llm:
        apart, cache = Apart(llm.engine), llm.engine.source.cache
        for number in (0, 1):
            apart.enter(number, CONFIGURATIONS[number])
            llm.generate(PROMPTS[number], PARAMS)
        with monkeypatch.context() as broken:
            if refused:
                _break(broken, llm.engine.source)
            else:
                broken.setattr(FutureHandle, "wait", _fail)
            with pytest.raises(SpmoeError, match="broken"):
                apart.enter(0, CONFIGURATIONS[0])
        for number in (0, 1, 0, 1):
            apart.enter(number, CONFIGURATIONS[number])
            rule = cache.eviction
            assert isinstance(rule, ScoredEviction)
            assert (rule._resident == cache.present).all()
            assert rule is llm.engine.learned.evictions[CONFIGURATIONS[number]["eviction"]]
            llm.generate(PROMPTS[number], PARAMS)


def _fail(self: FutureHandle) -> None:
    raise TransferError("broken")
