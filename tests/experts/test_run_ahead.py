"""RunAhead: which launches count, and when deferred bookkeeping is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from spmoe.experts.run_ahead import Launched, RunAhead

TOKENS = [6, 7, 8]
RANGES = [(0, 4, 9)]  # of one sequence: start, length, capacity


class Scheduler:
    """Counts submissions."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []

    def held(self) -> Any:
        return nullcontext()

    def submit(self, until: Any = None) -> None:
        self.submitted.append(until)


@pytest.fixture
def ahead() -> RunAhead:
    transfer = SimpleNamespace(wait_and_pump=lambda event: event.append("waited"))
    return RunAhead(transfer, Scheduler())  # type: ignore[arg-type]


def launch_draft(ahead: RunAhead, tokens: list[int] = TOKENS) -> None:
    ahead.launch_draft(1, 5, len(tokens), lambda: lambda: list(tokens))


def launch_both(ahead: RunAhead, graph: object = "graph") -> None:
    launch_draft(ahead)
    ahead.launch_verify(3, [5], RANGES, lambda: graph)


def test_draft_is_taken_once_for_the_same_sequence_length_and_k(ahead: RunAhead) -> None:
    launch_draft(ahead)
    assert ahead.launched is Launched.DRAFT
    assert ahead.take_draft(1, 5, 3) == TOKENS
    assert ahead.launched is Launched.NOTHING
    assert ahead.take_draft(1, 5, 3) is None


@pytest.mark.parametrize(("sequence_ids", "kept"), [([1], True), ([2], False), ([1, 2], False), ([2, 1], False)])
def test_launches_are_kept_for_a_step_of_their_sequence_alone(
    ahead: RunAhead, sequence_ids: list[int], kept: bool
) -> None:
    launch_both(ahead)
    ahead.keep_only(sequence_ids)
    assert ahead.launched is (Launched.VERIFY if kept else Launched.NOTHING)


@pytest.mark.parametrize("wanted", [(2, 5, 3), (1, 6, 3), (1, 5, 2)])
def test_draft_for_anything_else_is_invalidated(ahead: RunAhead, wanted: tuple[int, int, int]) -> None:
    launch_both(ahead)
    assert ahead.take_draft(*wanted) is None
    assert ahead.launched is Launched.NOTHING
    assert ahead.take_draft(1, 5, 3) is None


def test_verification_is_taken_for_the_tokens_of_its_draft(ahead: RunAhead) -> None:
    launch_both(ahead)
    assert ahead.launched is Launched.VERIFY
    tokens = ahead.take_draft(1, 5, 3)
    assert tokens == TOKENS
    assert ahead.take_verify("graph", [5, *tokens], RANGES)
    assert not ahead.take_verify("graph", [5, *tokens], RANGES), "it counts once"


@pytest.mark.parametrize(
    ("graph", "tokens", "length"),
    [
        ("other", [5, *TOKENS], 4),
        ("graph", [4, *TOKENS], 4),
        ("graph", [5, 6, 7, 9], 4),
        ("graph", [5, *TOKENS], 3),
    ],
)
def test_verification_of_anything_else_is_launched_again(
    ahead: RunAhead, graph: str, tokens: list[int], length: int
) -> None:
    launch_both(ahead)
    ahead.take_draft(1, 5, 3)
    assert not ahead.take_verify(graph, tokens, [(0, length, 9)])


def test_verification_does_not_count_before_its_draft_was_read(ahead: RunAhead) -> None:
    launch_both(ahead)
    assert not ahead.take_verify("graph", [5, *TOKENS], RANGES)


def test_verification_is_launched_only_behind_a_draft_of_the_same_k(ahead: RunAhead) -> None:
    launches: list[str] = []
    ahead.launch_verify(3, [5], RANGES, lambda: launches.append("no draft"))
    launch_draft(ahead)
    ahead.launch_verify(2, [5], RANGES, lambda: launches.append("another K"))
    ahead.note_launch()
    ahead.launch_verify(3, [5], RANGES, lambda: launches.append("something between"))
    assert not launches


def launch_plain(ahead: RunAhead) -> None:
    ahead.plan_plain([1])
    ahead.launch_verify(0, [5], RANGES, lambda: "graph")
    assert ahead.launched is Launched.VERIFY


def test_plain_step_is_taken_without_a_draft(ahead: RunAhead) -> None:
    launch_plain(ahead)
    ahead.keep_only([1])
    assert ahead.take_verify("graph", [5], RANGES)
    assert ahead.launched is Launched.NOTHING
    assert not ahead.take_verify("graph", [5], RANGES), "it counts once"


@pytest.mark.parametrize(("graph", "tokens", "length"), [("other", [5], 4), ("graph", [6], 4), ("graph", [5], 5)])
def test_another_plain_step_is_launched_again(ahead: RunAhead, graph: str, tokens: list[int], length: int) -> None:
    launch_plain(ahead)
    assert not ahead.take_verify(graph, tokens, [(0, length, 9)])


def test_plain_step_is_not_that_of_another_sequence_or_a_draft(ahead: RunAhead) -> None:
    launch_plain(ahead)
    ahead.keep_only([2])
    assert not ahead.take_verify("graph", [5], RANGES), "of another sequence, with the same token and length"
    launch_plain(ahead)
    assert ahead.take_draft(1, 5, 3) is None
    assert not ahead.take_verify("graph", [5], RANGES)


@pytest.mark.parametrize(
    ("ids", "tokens", "ranges", "taken"),
    [
        ([1, 2], [5, 6], [(0, 4, 9), (9, 7, 9)], True),
        ([1, 2], [5, 6], [(0, 4, 9), (9, 7, 10)], True),  # it has grown in its place
        ([2, 1], [5, 6], [(0, 4, 9), (9, 7, 9)], False),
        ([1, 2, 3], [5, 6], [(0, 4, 9), (9, 7, 9)], False),
        ([1, 2], [6, 5], [(0, 4, 9), (9, 7, 9)], False),
        ([1, 2], [5, 6], [(0, 4, 9), (20, 7, 9)], False),
    ],
)
def test_plain_step_of_several_sequences(
    ahead: RunAhead, ids: list[int], tokens: list[int], ranges: list[tuple[int, int, int]], taken: bool
) -> None:
    ahead.plan_plain([1, 2])
    ahead.launch_verify(0, [5, 6], [(0, 4, 9), (9, 7, 9)], lambda: "graph")
    ahead.keep_only(ids)
    assert ahead.take_verify("graph", tokens, ranges) == taken


def test_any_other_launch_invalidates(ahead: RunAhead) -> None:
    launch_both(ahead)
    ahead.note_launch()
    assert ahead.launched is Launched.NOTHING
    assert ahead.take_draft(1, 5, 3) is None
    assert not ahead.take_verify("graph", [5, *TOKENS], RANGES)


def test_own_launches_do_not_invalidate(ahead: RunAhead) -> None:
    def launch() -> Callable[[], list[int]]:
        ahead.note_launch()
        return lambda: TOKENS

    ahead.launch_draft(1, 5, 3, launch)
    ahead.launch_verify(3, [5], RANGES, lambda: ahead.note_launch() or "graph")
    assert ahead.launched is Launched.VERIFY


def test_launch_that_fails_leaves_nothing_launched(ahead: RunAhead) -> None:
    def fail() -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        ahead.launch_draft(1, 5, 3, fail)
    assert ahead.launched is Launched.NOTHING
    launch_draft(ahead)
    with pytest.raises(RuntimeError):
        ahead.launch_verify(3, [5], RANGES, fail)
    assert ahead.launched is Launched.NOTHING
    launch_draft(ahead)
    ahead.note_launch()
    assert ahead.launched is Launched.NOTHING, "later launches count as others' again"


def test_failed_launch_of_the_next_step_is_returned_but_interrupts_are_raised(ahead: RunAhead) -> None:
    def fail() -> None:
        launch_draft(ahead)
        raise RuntimeError("out of memory")

    assert str(ahead.launch_next(fail)) == "out of memory"
    assert ahead.launched is Launched.NOTHING
    assert ahead.launch_next(lambda: launch_draft(ahead)) is None
    with pytest.raises(KeyboardInterrupt):
        ahead.launch_next(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_tokens_that_cannot_be_read_invalidate(ahead: RunAhead) -> None:
    def read() -> list[int]:
        raise RuntimeError("the device is broken")

    ahead.launch_draft(1, 5, 3, lambda: read)
    with pytest.raises(RuntimeError):
        ahead.take_draft(1, 5, 3)
    assert ahead.launched is Launched.NOTHING


def test_deferred_layer_is_committed_and_observed_when_the_next_layer_runs(ahead: RunAhead) -> None:
    done: list[str] = []
    ahead.defer(2, lambda: done.append("commit"), [lambda: done.append("observe")])
    assert done == []
    ahead.settle(next_layer=3)
    assert done == ["commit", "observe"]
    ahead.settle(next_layer=4)
    assert done == ["commit", "observe"], "once"


@pytest.mark.parametrize("next_layer", [None, 0, 5])
def test_observations_are_dropped_when_another_layer_runs(ahead: RunAhead, next_layer: int | None) -> None:
    done: list[str] = []
    ahead.defer(2, lambda: done.append("commit"), [lambda: done.append("observe")])
    ahead.settle(next_layer)
    assert done == ["commit"]


def test_deferring_another_layer_commits_the_one_before(ahead: RunAhead) -> None:
    done: list[int] = []
    ahead.defer(2, lambda: done.append(2))
    ahead.defer(3, lambda: done.append(3))
    assert done == [2]
    ahead.settle()
    assert done == [2, 3]


def test_waiting_keeps_copies_going(ahead: RunAhead) -> None:
    event: list[str] = []
    ahead.wait(event)  # type: ignore[arg-type]
    assert event == ["waited"]
