"""A draft that was launched ahead is proposed if it is the one asked for; else another is launched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmoe import SamplingParams
from spmoe.draft.model import DraftModel
from spmoe.experts.run_ahead import RunAhead
from spmoe.types import Sequence
from spmoe.verify.sampling import PositionNoise


class CountingRunner:
    """A model whose argmax is the number of tokens so far; counts the drafts that are launched and read."""

    max_positions = vocab_size = 64
    depth_count = 1
    captures = True

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []  # length and K
        self.pending: list[int] = []  # tokens that each launched draft reads first
        self.read: list[int] = []  # numbers of launched drafts

    def new_kv(self, capacity: int, tokens: list[int], preferred: int) -> Any:
        kv = SimpleNamespace(length=0, capacity=preferred)
        kv.rewind = lambda length: setattr(kv, "length", min(kv.length, length))
        return kv

    def release_kv(self, kv: Any) -> None:
        pass

    def forward(self, tokens: list[int], kv: Any, num_logits: int, observer: Any = None) -> torch.Tensor:
        kv.length += len(tokens)
        return torch.eye(self.vocab_size)[kv.length : kv.length + 1]

    def greedy_launcher(self, tokens: list[int], kv: Any, observers: list[Any], choices: int) -> Callable[[], Any]:
        length = kv.length + len(tokens)

        def launch() -> Callable[[], list[int]]:
            number = len(self.launched)
            self.launched.append((length, len(observers)))
            self.pending.append(len(tokens))

            def read() -> list[int]:
                self.read.append(number)
                kv.length = length + len(observers) - 1
                return [length + place for place in range(len(observers))]

            return read

        return launch


class NoObservers:
    """The policy looks at no hidden states."""

    def observer(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.fixture
def draft() -> DraftModel:
    scheduler = SimpleNamespace(held=nullcontext, submit=lambda until=None: None)
    ahead = RunAhead(SimpleNamespace(), scheduler)  # type: ignore[arg-type]
    return DraftModel(CountingRunner(), 64, 8, ahead)  # type: ignore[arg-type]


def sequence(draft: DraftModel, number: int, length: int, temperature: float = 0.0) -> Sequence:
    """Return a sequence whose prompt was read and which has one new token."""
    made = Sequence(number, list(range(length)), length, SamplingParams(temperature=temperature), PositionNoise(0), 60)
    draft.propose([made], 0, NoObservers())
    made.tokens.append(length)
    return made


def drafted(draft: DraftModel, one: Sequence, k: int) -> list[int]:
    (found,) = draft.propose([one], k, NoObservers())
    draft.rewind({one.id: len(one.tokens)})
    return found.tokens


def test_launched_draft_is_proposed(draft: DraftModel) -> None:
    runner: Any = draft.runner
    one = sequence(draft, 1, 5)
    draft.launch(one, 3, NoObservers())
    assert runner.launched == [(6, 3)]
    assert drafted(draft, one, 3) == [6, 7, 8]
    assert (runner.launched, runner.read) == ([(6, 3)], [0])
    one.tokens += [6, 7]
    assert drafted(draft, one, 2) == [8, 9]
    assert runner.read == [0, 1], "nothing was launched ahead: it is launched when asked for"


def test_another_k_or_text_is_launched_again(draft: DraftModel) -> None:
    runner: Any = draft.runner
    one = sequence(draft, 1, 5)
    draft.launch(one, 3, NoObservers())
    assert drafted(draft, one, 2) == [6, 7]
    draft.launch(one, 2, NoObservers())
    one.tokens += [6]
    assert drafted(draft, one, 2) == [7, 8]
    assert (len(runner.launched), runner.read) == (4, [1, 3])


def test_draft_of_another_sequence_replaces_it(draft: DraftModel) -> None:
    runner: Any = draft.runner
    one, other = sequence(draft, 1, 5), sequence(draft, 2, 9)
    draft.launch(one, 3, NoObservers())
    assert drafted(draft, other, 3) == [10, 11, 12]
    assert drafted(draft, one, 3) == [6, 7, 8]
    assert runner.read == [1, 2]


def test_sampled_draft_is_not_launched(draft: DraftModel) -> None:
    runner: Any = draft.runner
    one = sequence(draft, 1, 5, temperature=1.0)
    draft.launch(one, 3, NoObservers())
    assert len(drafted(draft, one, 3)) == 3
    assert runner.launched == []


def test_nothing_is_launched_beyond_the_drafts_positions(draft: DraftModel) -> None:
    runner: Any = draft.runner
    one = sequence(draft, 1, 59)
    draft.launch(one, 5, NoObservers())
    assert runner.launched == []
    assert drafted(draft, one, 5) == []


def test_draft_after_plain_steps_is_launched_for_one_pending_token(draft: DraftModel) -> None:
    """Drafts are captured for few pending tokens; the others are read before."""
    runner: Any = draft.runner
    one = sequence(draft, 1, 5)
    one.tokens += [6, 7, 8]
    draft.launch(one, 3, NoObservers())
    assert (runner.launched, runner.pending) == ([(9, 3)], [1])
    assert drafted(draft, one, 3) == [9, 10, 11]
    assert (runner.launched, runner.read) == ([(9, 3)], [0])


def test_nothing_is_launched_beyond_the_kv_cache(draft: DraftModel) -> None:
    """Kernels would drop the rows, and later drafts would read what was there before; the next step gets more place."""
    runner: Any = draft.runner
    one = sequence(draft, 1, 5)
    draft._states[1].capacity = 7
    draft.launch(one, 3, NoObservers())
    assert runner.launched == []
    draft._states[1].capacity = 8  # the last token is selected and not appended
    draft.launch(one, 3, NoObservers())
    assert runner.launched == [(6, 3)]
