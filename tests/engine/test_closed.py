"""A closed engine refuses everything with one clear error, at once, whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from checkpoints import Pair
from spmoe import LLM, SamplingParams, types
from spmoe.engine.engine_thread import EngineClosed, EngineThread
from spmoe.errors import SpmoeError
from spmoe.verify.sampling import PositionNoise

LIMIT = 30.0
PROMPT = list(b"the cat")
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


def build(pair: Pair, **options: Any) -> LLM:
    return LLM(str(pair.target), str(pair.good), num_speculative_tokens=3, progress=False, **options)


def ends(call: Callable[[], object]) -> BaseException | None:
    """Return the error of a call; fail if it does not end."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert found, f"still running after {LIMIT:g} s"
    return found[0]


def test_every_way_to_generate_is_refused(mixtral_pair: Pair) -> None:
    llm = build(mixtral_pair, expert_memory="50%")
    unread, begun = llm.stream(PROMPT, TEN), llm.stream(PROMPT, TEN)
    next(iter(begun))
    llm.close()
    for use in (
        lambda: llm.generate(PROMPT, TEN),
        lambda: llm.stream(PROMPT, TEN).run(),
        lambda: llm.chat([{"role": "user", "content": "x"}], TEN),
        unread.run,
        begun.run,
    ):
        error = ends(use)
        assert isinstance(error, EngineClosed)
        assert str(error) == "the engine is closed"
    assert unread.completion.token_ids == []
    assert 0 < len(begun.completion.token_ids) < 10


@pytest.mark.parametrize("expert_memory", ["50%", "100%"])
def test_step_of_a_closed_engine_is_refused(mixtral_pair: Pair, expert_memory: str) -> None:
    """Below the engine's thread: no expert is computed from slots that are released."""
    llm = build(mixtral_pair, expert_memory=expert_memory)
    llm.generate(PROMPT, TEN)
    llm.close()
    sequence = types.Sequence(99, list(PROMPT), len(PROMPT), TEN, PositionNoise(0), 32)
    with pytest.raises(SpmoeError, match="the engine was closed"):
        llm.engine.step([types.Turn(sequence, 10)])
    assert sequence.tokens == PROMPT


def test_calls_and_jobs_are_refused_while_the_thread_ends() -> None:
    """A step, the disk or the device may hold the thread up for long; nobody waits for that."""
    thread, began, release = EngineThread(), threading.Event(), threading.Event()

    def last() -> None:
        began.set()
        release.wait(2 * LIMIT)

    closing = threading.Thread(target=lambda: thread.close(last))
    closing.start()
    try:
        assert began.wait(LIMIT)
        for use in (lambda: thread.call(lambda: 1), lambda: list(thread.job(lambda: iter([1]))), thread.require_open):
            assert isinstance(ends(use), EngineClosed)
    finally:
        release.set()
        closing.join(LIMIT)
    assert not closing.is_alive()
    assert isinstance(ends(lambda: thread.call(lambda: 1)), EngineClosed)
    unanswered: SimpleQueue[tuple[str, Any]] = SimpleQueue()  # of a message that was sent as the thread ended
    assert isinstance(ends(lambda: thread._receive(unanswered)), EngineClosed)
