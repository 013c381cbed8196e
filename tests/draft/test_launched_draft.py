"""A draft that is begun before it is asked for is the one that is asked for, or it is made anew."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmoe import SamplingParams
from spmoe.draft.model import DraftModel
from spmoe.types import Sequence


class Counting:
    """A network whose most likely token is the number of tokens so far; it notes what is begun and what is fetched."""

    max_positions = vocab_size = 64
    depth_count = 1

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.fetched: list[int] = []

    def new_kv(self, capacity: int) -> Any:
        kv = SimpleNamespace(length=0)
        kv.rewind = lambda length: setattr(kv, "length", min(kv.length, length))
        return kv

    def release_kv(self, kv: Any) -> None:
        pass

    def forward(self, tokens: list[int], kv: Any, keep: int, observer: Any = None) -> torch.Tensor:
        kv.length += len(tokens)
        return torch.eye(self.vocab_size)[kv.length : kv.length + 1]

    def greedy(self, tokens: list[int], kv: Any, observers: list[Any], choices: int) -> Callable[[], list[int]]:
        number, length = len(self.begun), kv.length + len(tokens)
        self.begun.append((length, len(observers)))

        def fetch() -> list[int]:
            self.fetched.append(number)
            kv.length = length + len(observers) - 1
            return [length + place for place in range(len(observers))]

        return fetch


@pytest.fixture
def draft() -> DraftModel:
    return DraftModel(Counting(), 64, 8)  # type: ignore[arg-type]


def sequence(draft: DraftModel, number: int, length: int, temperature: float = 0.0) -> Sequence:
    """One whose prompt has been read, and which has a token more since."""
    made = Sequence(number, list(range(length)), length, SamplingParams(temperature=temperature), torch.Generator(), 60)
    draft.propose([made], 0, None)
    made.tokens.append(length)
    return made


def drafted(draft: DraftModel, one: Sequence, k: int) -> list[int]:
    (found,) = draft.propose([one], k, None)
    draft.rewind({one.id: len(one.tokens)})
    return found.tokens


def test_what_was_begun_is_what_is_proposed(draft: DraftModel) -> None:
    runner, one = draft.runner, sequence(draft, 1, 5)
    draft.begin(one, 3, None)
    assert runner.begun == [(6, 3)]
    assert drafted(draft, one, 3) == [6, 7, 8]
    assert (runner.begun, runner.fetched) == ([(6, 3)], [0])
    one.tokens += [6, 7]
    assert drafted(draft, one, 2) == [8, 9]
    assert runner.fetched == [0, 1], "nothing was begun: it is now"


def test_another_k_or_text_is_begun_anew(draft: DraftModel) -> None:
    runner, one = draft.runner, sequence(draft, 1, 5)
    draft.begin(one, 3, None)
    assert drafted(draft, one, 2) == [6, 7]
    draft.begin(one, 2, None)
    one.tokens += [6]
    assert drafted(draft, one, 2) == [7, 8]
    assert (len(runner.begun), runner.fetched) == (4, [1, 3])


def test_what_others_did_in_between_makes_it_void(draft: DraftModel) -> None:
    runner, one, other = draft.runner, sequence(draft, 1, 5), sequence(draft, 2, 9)
    draft.begin(one, 3, None)
    assert drafted(draft, other, 3) == [10, 11, 12]
    assert drafted(draft, one, 3) == [6, 7, 8]
    assert runner.fetched == [1, 2]
    draft.begin(one, 3, None)
    sequence(draft, 3, 4)  # a prompt is read
    assert drafted(draft, one, 3) == [6, 7, 8]
    draft.begin(one, 3, None)
    draft.release(one.id)
    assert drafted(draft, other, 3) == [10, 11, 12]
    assert runner.fetched == [1, 2, 4, 6]


def test_what_is_sampled_is_not_begun(draft: DraftModel) -> None:
    one = sequence(draft, 1, 5, temperature=1.0)
    draft.begin(one, 3, None)
    assert len(drafted(draft, one, 3)) == 3
    assert draft.runner.begun == []


def test_nothing_is_begun_beyond_what_the_draft_can_read(draft: DraftModel) -> None:
    one = sequence(draft, 1, 59)
    draft.begin(one, 5, None)
    assert draft.runner.begun == []
    assert drafted(draft, one, 5) == []
