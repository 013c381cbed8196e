"""The pool of KV caches: prefixes, limits, growth, and the arena that they lie in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import longrope, mixtral, qwen3_next, seeded
from spmoe.models.kv import KvArena, KvState
from spmoe.models.kv_pool import KvPool, common_prefix, kv_sizes
from spmoe.models.runner import ModelRunner

CONFIG = mixtral(num_hidden_layers=1).config
STATEFUL = qwen3_next().config


def new_pool(limit: int | None = None, spare_limit: int = 100, *, reuse: bool = True) -> KvPool:
    pool = KvPool(CONFIG)
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


def test_a_kept_cache_grows_for_a_longer_sequence() -> None:
    pool = new_pool()
    run(pool, [1, 2, 3, 4], capacity=4)
    run(pool, [7, 7, 7, 7], capacity=4)
    kv = pool.take(9, [1, 2, 3, 4, 5])
    assert kv.capacity == 9
    assert held(kv) == [1, 2, 3]
    assert [held(one) for one in pool.spare] == [[7, 7, 7]]


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


@pytest.mark.parametrize(("limit", "kept"), [(99, False), (100, True)])
def test_a_long_common_prefix_is_copied_if_no_other_cache_is_freed_for_it(limit: int, kept: bool) -> None:
    pool, prefix = new_pool(limit), list(range(30))
    run(pool, [*prefix, *range(50, 71)], capacity=51)
    assert run(pool, [*prefix, 99], capacity=50) == 30
    assert run(pool, [*prefix, *range(50, 71)], capacity=51) == (50 if kept else 30)


def test_nothing_is_reused_unless_it_is_planned() -> None:
    pool = new_pool(reuse=False)
    assert run(pool, [1, 2, 3]) == run(pool, [1, 2, 3]) == 0
    assert not pool.spare
    assert pool.arena.used == 0


def test_state_that_cannot_be_cut_is_not_kept() -> None:
    pool = KvPool(STATEFUL)
    pool.plan(None, 100, reuse_prefixes=True)
    kv = pool.take(20, [1, 2, 3])
    kv.length = 2
    pool.give_back(kv)
    assert not pool.spare


# ---- limits


def test_the_oldest_caches_are_dropped() -> None:
    pool = new_pool(spare_limit=10)
    texts = [[number] * 5 for number in range(4)]
    for text in texts:
        run(pool, list(text))
    assert [kv.tokens[0] for kv in pool.spare] == [2, 3]
    assert [run(pool, [*text, 9]) for text in texts[::-1]] == [4, 4, 0, 0]


def test_a_cache_larger_than_the_limit_is_not_kept() -> None:
    pool = new_pool(spare_limit=10)
    run(pool, [1] * 12)
    assert not pool.spare
    assert pool.arena.used == 0


def test_a_sequence_has_a_place_if_kept_caches_can_be_freed_for_it() -> None:
    pool = new_pool(limit=50)
    run(pool, [1, 2, 3], capacity=30)
    assert pool.has_place(50)
    assert not pool.has_place(51)
    used = pool.take(49, [7, 8, 9])
    assert not pool.spare, "its place was needed"
    assert pool.has_place(1)
    assert not pool.has_place(2)
    pool.give_back(used)
    assert pool.has_place(50)


def test_a_prefix_is_taken_over_if_there_is_no_place_for_a_copy() -> None:
    pool = new_pool(limit=20)
    run(pool, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4], capacity=10)
    kv = pool.take(15, [1, 2, 3, 5])
    assert held(kv) == [1, 2, 3]
    assert not pool.spare
    assert pool.arena.used == 15


def test_a_prefix_that_is_taken_over_keeps_no_place_of_its_old_text() -> None:
    pool = new_pool(limit=12)
    run(pool, list(range(10)), capacity=10)
    kv = pool.take(4, [0, 1, 99])
    assert held(kv) == [0, 1]
    assert kv.capacity == 4
    assert pool.has_place(8)


def test_a_discarded_cache_takes_no_place() -> None:
    pool = new_pool(limit=20)
    kv = pool.take(20)
    assert not pool.has_place(1)
    pool.discard(kv)
    assert pool.has_place(20)


# ---- growth


def test_a_sequence_gets_more_positions_than_it_needs_while_there_is_place() -> None:
    assert kv_sizes(100, 5, 1000) == (105, 361)
    assert kv_sizes(100, 5, 200) == (105, 200)
    assert kv_sizes(100, 5, 103) == (103, 103)
    pool = new_pool(limit=100)
    first = pool.take(10, [1, 2], preferred=60)
    assert first.capacity == 60
    second = pool.take(10, [3, 4], preferred=60)
    assert second.capacity == 10
    assert pool.usage == 0.7
    assert pool.reserve(second, 8, 60)
    assert second.capacity == 10
    assert pool.reserve(second, 35, 60)
    assert second.capacity == 35
    assert not pool.reserve(second, 41, 60)
    assert second.capacity == 35
    pool.give_back(first)
    assert pool.reserve(second, 41, 60)
    assert second.capacity == 60


def test_kept_caches_are_freed_for_a_growing_one() -> None:
    pool = new_pool(limit=30)
    run(pool, [7] * 11)
    kv = pool.take(15, [1, 2, 3])
    fill(kv)
    assert len(pool.spare) == 1
    assert pool.reserve(kv, 21, 21)
    assert not pool.spare
    assert held(kv) == [1, 2]


def test_a_lone_sequence_may_grow_beyond_the_limit() -> None:
    pool = new_pool(limit=20)
    kv = pool.take(20, [1, 2, 3])
    fill(kv)
    assert not pool.reserve(kv, 30, 40)
    pool.grow(kv, 30)
    assert kv.capacity == 30
    assert held(kv) == [1, 2]


def test_a_swapped_out_cache_takes_no_place_and_comes_back() -> None:
    pool = new_pool(limit=30)
    kv = pool.take(20, [1, 2, 3])
    fill(kv)
    pool.swap_out(kv)
    assert kv.is_swapped_out
    assert pool.has_place(30)
    other = pool.take(10, list(range(50, 60)))
    fill(other)
    pool.swap_in(kv, 15, 20)
    assert not kv.is_swapped_out
    assert kv.capacity == 20
    assert held(kv) == [1, 2]
    assert held(other) == list(range(50, 59))
    pool.swap_out(kv)
    pool.give_back(kv)
    assert not pool.spare
    assert pool.arena.used == 10


def test_what_was_launched_is_invalid_once_caches_move() -> None:
    moves: list[int] = []
    pool = KvPool(CONFIG, lambda: moves.append(1))
    pool.plan(60, 0, reuse_prefixes=False)
    assert pool.scratch.start == 0
    first, second, third = (pool.take(20, [number] * 5) for number in (1, 2, 3))
    for kv in (first, second, third):
        fill(kv)
    pool.give_back(second)
    assert pool.reserve(first, 30, 30)
    assert not moves, "in place"
    generation = pool.arena.generation
    assert pool.reserve(third, 30, 30)
    assert moves
    assert pool.arena.generation == generation, "within the same memory"
    assert (held(first), held(third)) == ([1] * 4, [3] * 4)


# ---- the arena


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=30), st.sampled_from([0, 20, 60]))
def test_ranges_never_overlap_and_keep_their_contents(changes: list[tuple[int, int]], planned: int) -> None:
    arena, states = KvArena(), dict[int, KvState]()
    arena.plan(planned)
    for number, capacity in changes:
        if number not in states:
            states[number] = kv = KvState(CONFIG, capacity, arena)
            kv.tokens = [100 * number + position for position in range(capacity + 1)]
            fill(kv)
        elif capacity % 3 == 0:
            arena.remove(states.pop(number))
        else:
            kv = states[number]
            arena.place(kv, max(capacity, kv.length))
        places = sorted((kv.start, kv.start + kv.capacity) for kv in states.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        assert all(end <= arena.positions for _, end in places)
        for kv in states.values():
            assert held(kv) == kv.tokens[: kv.length]


def test_a_row_too_many_is_refused_instead_of_written_into_another_range() -> None:
    arena = KvArena()
    first, second = KvState(CONFIG, 3, arena), KvState(CONFIG, 3, arena)
    second.tokens = [5, 6, 7]
    fill(second)
    first.tokens = [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="3 positions cannot hold 4"):
        fill(first)
    assert held(second) == [5, 6]


def test_memory_that_runs_out_while_ranges_grow_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = KvArena()
    states = [KvState(CONFIG, 5, arena) for _ in range(2)]
    for number, kv in enumerate(states):
        kv.tokens = [number + 1] * 5
        fill(kv)
    with monkeypatch.context() as patch:
        patch.setattr("spmoe.models.kv._positions", lambda *args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            arena.place(states[0], 30)
    assert [(kv.capacity, held(kv)) for kv in states] == [(5, [1] * 4), (5, [2] * 4)]
    arena.place(states[0], 30)
    assert [(kv.capacity, held(kv)) for kv in states] == [(30, [1] * 4), (5, [2] * 4)]


def test_a_reused_cache_for_which_memory_runs_out_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool()
    run(pool, [1, 2, 3, 4])
    with monkeypatch.context() as patch:
        patch.setattr("spmoe.models.kv._positions", lambda *args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            pool.take(300, [1, 2, 3, 9])
    assert pool.arena.used == sum(kv.capacity for kv in pool.spare), "no range without an owner"
    assert run(pool, [1, 2, 3, 9], capacity=300) == 3


def test_contents_that_were_lost_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = KvArena()
    arena.plan(30)
    first, second, third = (KvState(CONFIG, 10, arena) for _ in range(3))
    for kv in (first, second, third):
        kv.tokens = [1] * 5
        fill(kv)
    arena.remove(first)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            arena.place(third, 15)
    for kv in (second, third):
        with pytest.raises(RuntimeError, match="lost when memory ran out"):
            fill(kv, 5)
    fresh = KvState(CONFIG, 10, arena)
    fresh.tokens = [3] * 5
    fill(fresh)
    assert held(fresh) == [3] * 4


# ---- any order of events


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, list[int]]]:
    """Draw sequences that start, and numbers of running ones that end, grow, or are swapped."""
    event = st.sampled_from(["start", "start", "grow", "end", "swap"])
    tokens = st.lists(st.integers(1, 2), min_size=1, max_size=8)
    return draw(st.lists(st.tuples(event, st.integers(0, 9), tokens), max_size=25))


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from([None, 40, 60]))
def test_caches_hold_the_keys_of_their_own_tokens(history: list[tuple[str, int, list[int]]], limit: int | None) -> None:
    """In any order of events no sequence sees another one's tokens, and limits hold."""
    pool, running, swapped = new_pool(limit, 50), list[KvState](), list[KvState]()
    for event, number, tokens in history:
        if event == "start" and pool.has_place(len(tokens)):
            kv = pool.take(len(tokens), list(tokens), preferred=20)
            assert kv.length < len(tokens)
            assert all(kv is not other for other in (*running, *swapped, *pool.spare))
            running.append(kv)
            fill(kv)
        elif event == "grow" and running:
            kv = running[number % len(running)]
            if pool.reserve(kv, len(kv.tokens) + len(tokens), len(kv.tokens) + 20):
                kv.tokens += tokens
                fill(kv)
        elif event == "swap" and swapped and pool.has_place(swapped[0].length + 1):
            kv = swapped.pop(0)
            pool.swap_in(kv, kv.length + 1, kv.length + 20)
            running.append(kv)
        elif event == "swap" and running:
            swapped.append(running.pop(number % len(running)))
            pool.swap_out(swapped[-1])
        elif event == "end" and running:
            pool.give_back(running.pop(number % len(running)))
        for kv in (*running, *pool.spare):
            assert held(kv) == kv.tokens[: kv.length]
        kept, used = (sum(kv.capacity for kv in states) for states in (pool.spare, running))
        assert pool.arena.used == kept + used
        assert kept + used <= limit if limit is not None else kept <= 50


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


@settings(max_examples=200, deadline=None, derandomize=True)
@given(length=st.integers(0, 1100), first=st.integers(0, 300), second=st.integers(0, 300))
def test_common_prefix(length: int, first: int, second: int) -> None:
    """Both sequences begin alike and go on with different tokens."""
    shared = [7 * place % 50 for place in range(length)]
    found = common_prefix(shared + [100] * first, shared + [101] * second)
    assert found == length
    assert common_prefix(shared, shared) == length
