"""The pool of KV caches: prefixes, limits, and caches that graphs are captured over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import longrope, mixtral, qwen3_next, seeded
from spmoe.models.kv import KvState
from spmoe.models.kv_pool import MIN_CAPACITY, KvPool, kv_capacity
from spmoe.models.runner import ModelRunner

CONFIG = mixtral(num_hidden_layers=1).config
STATEFUL = qwen3_next().config


def new_pool(limit: int | None = None, spare_limit: int = 100, *, reuse: bool = True, graphs: bool = False) -> KvPool:
    pool = KvPool(CONFIG, lambda: None)
    pool.keeps_graphs = graphs
    pool.plan(limit, spare_limit, reuse_prefixes=reuse)
    return pool


@torch.inference_mode()  # as forwards run
def fill(kv: KvState, count: int | None = None) -> None:
    """Append the keys and values of its sequence's tokens, all but the last or up to a number of them."""
    end = len(kv.tokens) - 1 if count is None else count
    values = torch.tensor(kv.tokens[kv.length : end], dtype=torch.float32).reshape(1, 1, -1, 1)
    for layer in kv.cache.layers:
        layer.update(values, -values)
    kv.length = end


def held(kv: KvState) -> list[int]:
    """Return the tokens whose keys and values a cache holds."""
    (layer,) = kv.cache.layers
    assert layer.length == kv.length
    if not kv.length:
        return []
    found = layer.keys[0, 0, : kv.length, 0].tolist()
    assert (-layer.values[0, 0, : kv.length, 0]).tolist() == found
    return [int(token) for token in found]


def run(pool: KvPool, tokens: list[int], capacity: int = 20) -> int:
    """Run a sequence from its first to its last token; return how many tokens it found in its cache."""
    kv = pool.take(capacity, tokens)
    cached = kv.length
    assert held(kv) == tokens[:cached]
    fill(kv)
    pool.give_back(kv)
    return cached


# ---- prefixes


def test_a_sequence_starts_from_the_longest_common_prefix() -> None:
    pool = new_pool()
    run(pool, [1, 2, 3, 4, 5, 6, 7])
    run(pool, [1, 2, 9, 9, 9, 9, 9])
    assert run(pool, [1, 2, 3, 8]) == 3
    assert run(pool, [1, 2, 9, 9, 8, 8]) == 4
    assert run(pool, [5, 1, 2, 3]) == 0


def test_the_last_token_is_left_to_be_read() -> None:
    pool = new_pool()
    run(pool, [1, 2, 3, 4])
    assert run(pool, [1, 2, 3]) == 2
    assert run(pool, [1]) == 0


def test_the_newest_token_is_not_in_the_cache() -> None:
    """A step appends a token to the text that the model reads in the next step."""
    pool = new_pool()
    kv = pool.take(20, tokens := [1, 2, 3])
    fill(kv, 3)
    tokens.append(4)
    pool.give_back(kv)
    assert run(pool, [1, 2, 3, 4, 5]) == 3


def test_tokens_that_were_rolled_back_are_not_reused() -> None:
    pool = new_pool()
    kv = pool.take(20, tokens := [1, 2, 3, 8, 8])
    fill(kv)
    del tokens[3:]  # a draft that was not accepted
    tokens += [4]
    kv.rewind(3)
    pool.give_back(kv)
    assert run(pool, [1, 2, 3, 8, 8]) == 3


def test_tokens_of_a_cache_whose_step_failed_are_not_reused() -> None:
    pool = new_pool()
    kv = pool.take(20, [1, 2, 3, 4])
    fill(kv)
    kv.tokens = []
    pool.give_back(kv)
    assert run(pool, [1, 2, 3, 4]) == 0


def test_a_running_sequence_shares_its_prefix_and_keeps_it() -> None:
    pool = new_pool()
    first = pool.take(20, [1, 2, 3, 4])
    fill(first)
    second = pool.take(20, [1, 2, 3, 9, 9])
    assert second is not first
    assert held(second) == [1, 2, 3]
    fill(second)
    assert held(first) == [1, 2, 3]
    assert held(second) == [1, 2, 3, 9]


def test_a_larger_cache_gets_a_copy() -> None:
    pool = new_pool()
    run(pool, [1, 2, 3, 4], capacity=4)
    kv = pool.take(9, [1, 2, 3, 4, 5])
    assert kv.capacity == 9
    assert held(kv) == [1, 2, 3]


def test_a_short_common_prefix_does_not_destroy_a_conversation() -> None:
    """Every chat begins with the same few tokens."""
    pool = new_pool()
    texts = [[1, number, *range(number, number + 10)] for number in (20, 40, 60)]
    assert [run(pool, list(text)) for text in texts] == [0, 1, 1]
    assert [run(pool, [*text, 7]) for text in texts] == [11, 11, 11]


def test_a_cache_is_continued_in_place_if_it_loses_little() -> None:
    pool = new_pool()
    run(pool, [1, 2, 3, 4, 5, 6])
    (kept,) = pool.spare
    assert pool.take(20, [1, 2, 3, 4, 9]) is kept


@pytest.mark.parametrize("graphs", [False, True])
def test_nothing_is_reused_unless_it_is_planned(graphs: bool) -> None:
    pool = new_pool(reuse=False, graphs=graphs)
    assert run(pool, [1, 2, 3]) == run(pool, [1, 2, 3]) == 0
    assert len(pool.spare) == graphs


def test_state_that_cannot_be_cut_is_not_kept() -> None:
    pool = KvPool(STATEFUL, lambda: None)
    pool.plan(None, 100, reuse_prefixes=True)
    kv = pool.take(20, [1, 2, 3])
    kv.length = 2
    pool.give_back(kv)
    assert not pool.spare


# ---- limits


def test_the_oldest_caches_are_dropped() -> None:
    pool = new_pool(spare_limit=40)
    texts = [[number] * 5 for number in range(4)]
    for text in texts:
        run(pool, list(text))
    assert [kv.tokens[0] for kv in pool.spare] == [2, 3]
    assert [run(pool, [*text, 9]) for text in texts[::-1]] == [4, 4, 0, 0]


def test_a_cache_larger_than_the_limit_is_not_kept() -> None:
    pool = new_pool(spare_limit=10)
    run(pool, [1, 2, 3], capacity=11)
    assert not pool.spare


def test_a_sequence_has_a_place_if_kept_caches_can_be_freed_for_it() -> None:
    pool = new_pool(limit=50)
    run(pool, [1, 2, 3], capacity=30)
    assert pool.has_place(50)
    assert not pool.has_place(51)
    used = pool.take(30, [7, 8, 9])
    assert not pool.spare, "its place was needed"
    assert pool.has_place(20)
    assert not pool.has_place(21)
    pool.give_back(used)
    assert pool.has_place(50)


def test_a_dropped_cache_is_copied_before_it_is_freed() -> None:
    pool = new_pool(limit=20)
    run(pool, [1, 2, 3, 4], capacity=10)
    kv = pool.take(15, [1, 2, 3, 4, 5])
    assert held(kv) == [1, 2, 3]
    assert not pool.spare


def test_the_device_is_waited_for_before_a_cache_is_freed() -> None:
    calls: list[int] = []
    pool = KvPool(CONFIG, lambda: calls.append(len(pool.spare)))
    pool.plan(None, 10, reuse_prefixes=True)
    run(pool, [1, 2, 3], capacity=10)
    assert calls == []
    run(pool, [4, 5, 6], capacity=10)
    assert calls == [2], "while the cache was still there"
    pool.clear()
    assert calls == [2, 1]
    assert not pool.spare


def test_a_discarded_cache_takes_no_place() -> None:
    pool = new_pool(limit=20)
    kv = pool.take(20)
    assert not pool.has_place(1)
    pool.discard(kv)
    assert pool.has_place(20)


# ---- caches that graphs are captured over


def test_sizes_of_caches_with_graphs() -> None:
    assert [kv_capacity(n) for n in (1, MIN_CAPACITY, MIN_CAPACITY + 1, 5000)] == [1024, 1024, 2048, 8192]
    pool = new_pool(limit=3 * MIN_CAPACITY, graphs=True)
    kv = pool.take(5, [1, 2])
    assert kv.capacity == MIN_CAPACITY
    assert pool.has_place(2 * MIN_CAPACITY)
    assert not pool.has_place(2 * MIN_CAPACITY + 1)


def test_a_cache_with_graphs_is_taken_first() -> None:
    pool = new_pool(graphs=True)
    states = [pool.take(5, [number]) for number in (1, 2, 3)]
    states[1].graphs["key"] = "graph"
    for kv in states:
        pool.give_back(kv)
    assert pool.take(5, [9, 9]) is states[1]
    assert pool.take(5, [9, 9]) is states[0], "then the one that was used first"


@pytest.mark.parametrize("reuse", [False, True])
def test_small_caches_with_graphs_are_freed_for_a_large_one(reuse: bool) -> None:
    pool = new_pool(limit=2 * MIN_CAPACITY, reuse=reuse, graphs=True)
    run(pool, [1, 2, 3], capacity=5)
    kv = pool.take(MIN_CAPACITY + 1, [1, 2, 3])
    assert kv.capacity == 2 * MIN_CAPACITY
    assert not pool.spare


# ---- any order of events


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, list[int]]]:
    """Draw sequences that start, and numbers of running ones that end or grow."""
    event = st.sampled_from(["start", "start", "grow", "end"])
    tokens = st.lists(st.integers(1, 2), min_size=1, max_size=8)
    return draw(st.lists(st.tuples(event, st.integers(0, 9), tokens), max_size=25))


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from([None, 40, 60]), st.booleans())
def test_caches_hold_the_keys_of_their_own_tokens(
    history: list[tuple[str, int, list[int]]], limit: int | None, graphs: bool
) -> None:
    """In any order of events no sequence sees another one's tokens, and limits hold."""
    pool = new_pool(None if limit is None else limit * (MIN_CAPACITY // 20 if graphs else 1), 50, graphs=graphs)
    running: list[KvState] = []
    for event, number, tokens in history:
        if event == "start" and pool.has_place(20):
            kv = pool.take(20, list(tokens))
            assert kv.length < len(tokens)
            assert all(kv is not other for other in (*running, *pool.spare))
            running.append(kv)
            fill(kv)
        elif event == "grow" and running:
            kv = running[number % len(running)]
            if len(kv.tokens) + len(tokens) <= 20:
                kv.tokens += tokens
                fill(kv)
        elif event == "end" and running:
            pool.give_back(running.pop(number % len(running)))
        for kv in (*running, *pool.spare):
            assert held(kv) == kv.tokens[: kv.length]
        kept, used = (sum(kv.capacity for kv in states) for states in (pool.spare, running))
        if pool._limit is not None:
            assert kept + used <= pool._limit
        elif not graphs:
            assert kept <= 50


# ---- families


@pytest.mark.parametrize(
    "rope", [longrope(16), {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}], ids=["longrope", "dynamic"]
)
def test_prefixes_are_not_reused_if_positions_depend_on_the_length(rope: dict[str, Any]) -> None:
    runner = ModelRunner(seeded(mixtral, 3, rope_parameters=rope))
    runner.plan_kv(None, 100, reuse_prefixes=True)
    for _ in range(2):
        kv = runner.new_kv(20, [1, 2, 3, 4])
        assert kv.length == 0
        runner.forward([1, 2, 3, 4], kv, 1)
        runner.release_kv(kv)
