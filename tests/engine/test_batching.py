"""Continuous batching: requests that run together have the text, results and statistics of lone ones."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import Pair, greedy, greedy_tokens, memory_for, reference
from recovery import SECONDS, Resources, within
from spmoe import LLM, RequestOutput, SamplingParams
from spmoe.config import ONE_BY_ONE
from spmoe.draft.model import DraftModel
from spmoe.draft.ngram import NgramDraft
from spmoe.engine.async_llm import AsyncLLM
from spmoe.engine.engine import Engine
from spmoe.engine.llm import Generation, combined_output
from spmoe.engine.loop import Loop
from spmoe.engine.threads import IntraOpThreads
from spmoe.errors import DraftError, TransferError, UsageError
from spmoe.experts.store import ExpertFile
from spmoe.models.kv import KvState
from spmoe.models.kv_pool import KvPool
from spmoe.models.ragged import BATCH_ROWS
from spmoe.models.runner import ModelRunner
from spmoe.observe.ledger import Counters
from spmoe.types import Draft, Turn
from spmoe.types import Sequence as TokenSequence

COUNT = 9
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
LENGTHS = (4, 1, 23, 9, 2, 14, 6, 3, 30)
PROMPTS = [[(37 * number + 11 * place + 5) % 250 for place in range(length)] for number, length in enumerate(LENGTHS)]


@cache
def expected_tokens(target: Path) -> list[list[int]]:
    """Return the tokens of transformers for every prompt, computed once per checkpoint."""
    model = reference(target)
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def draft_name(pair: Pair, draft: str | None) -> str | None:
    return str(getattr(pair, draft)) if draft in ("good", "random") else draft


def build(pair: Pair, draft: str | None = "good", **options: Any) -> LLM:
    options = {"num_speculative_tokens": 3, "expert_memory": "50%", "prefill_chunk": 8, **options}
    return LLM(str(pair.target), draft_name(pair, draft), dtype="float32", progress=False, **options)


def start_together(llm: LLM, generations: Sequence[Generation]) -> None:
    """Start generations so that all of them arrive, in this order, before any of them has a step."""
    llm._thread.call(lambda: [generation.start() for generation in generations])


def run_together(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    generations = [llm.stream(prompt, params) for prompt in prompts]
    start_together(llm, generations)
    return [generation.run() for generation in generations]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def left_over(llm: LLM) -> list[str]:
    """Return a line for each thing that ended requests have left in the engine."""

    def look() -> list[str]:
        found, states = [], getattr(llm.engine.parts.drafter, "_states", {})
        if llm._scheduler.running or llm._scheduler.waiting:
            found.append(f"{llm._scheduler.running} sequences run, {llm._scheduler.waiting} wait")
        if states or llm.engine.parts.target_kv:
            found.append("a KV cache is not released")
        if llm.engine.target.kv_pool._used:
            found.append("a KV cache counts as used")
        if llm.engine.experts.ledger._accounts:
            found.append("a request is still charged")
        return found

    return list(within(SECONDS, lambda: llm._thread.call(look)))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of sequences of each step."""
    found: list[int] = []
    step = Loop.step

    def counted(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
        found.append(len(turns))
        return step(self, turns)

    monkeypatch.setattr(Loop, "step", counted)
    return found


@pytest.fixture(scope="module")
def shared(mixtral_pair: Pair) -> Iterator[LLM]:
    """One engine for tests that leave nothing in it."""
    with build(mixtral_pair, expert_memory=memory_for(3)) as llm:
        run_together(llm, PROMPTS)
        yield llm


@pytest.fixture(scope="module")
def tight(mixtral_pair: Pair) -> Iterator[LLM]:
    """An engine whose KV memory holds one sequence and a little more."""
    with pytest.MonkeyPatch.context() as monkeypatch, build(mixtral_pair, expert_memory=memory_for(3)) as llm:
        limit_kv(llm, max(LENGTHS) + COUNT + 10, monkeypatch)
        run_together(llm, PROMPTS)
        assert llm.num_preemptions > 0
        yield llm


def limit_kv(llm: LLM, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the KV memory of target and draft; let sequences take little more of it than they need."""
    monkeypatch.setattr("spmoe.models.kv_pool._GROWTH", 2)
    for runner in (llm.engine.target, llm.engine.parts.drafter.runner):
        if runner is not None:
            runner.kv_pool.plan(positions, positions, reuse_prefixes=runner.can_rewind)


@pytest.fixture(scope="module")
def expected(mixtral_pair: Pair) -> list[list[int]]:
    return expected_tokens(mixtral_pair.target)


# ---- greedy text

MINIMUM = memory_for(2)
COMBINATIONS = [  # prefetch, draft, K, expert memory, max_num_seqs, number of prompts, prefill chunk
    ("auto", "good", "auto", "50%", 8, 9, 8),
    ("auto", "random", 3, MINIMUM, 8, 5, 512),
    ("auto", None, 0, MINIMUM, 8, 9, 3),
    ("auto", "self:int4", 3, "50%", 2, 4, 8),
    ("on-demand", "good", 3, "100%", 8, 9, 512),
    ("on-demand", "ngram", "auto", MINIMUM, 2, 3, 8),
    ("draft-gate", "good", 3, MINIMUM, 2, 5, 8),
    ("draft-gate", "random", "auto", "50%", 8, 8, 4),
    ("next-gate", "ngram", 3, "50%", 8, 9, 5),
    ("next-gate", "self:int4", "auto", MINIMUM, 8, 6, 512),
    ("adaptive", "good", 3, "50%", 1, 3, 8),
    ("adaptive", None, 0, "50%", 8, 7, 4),
    ("activation", "random", 3, "100%", 2, 2, 3),
    ("activation", "ngram", 0, "50%", 8, 4, 8),
    ("draft-gate+next-gate", "good", 3, "50%", 8, 9, 24),
]


@pytest.mark.parametrize(
    ("family", "combination"),
    [(("mixtral", "qwen")[number % 2], one) for number, one in enumerate(COMBINATIONS)],
    ids=str,
)
def test_greedy_text_equals_that_of_transformers(
    family: str, combination: tuple[Any, ...], request: pytest.FixtureRequest, batches: list[int]
) -> None:
    pair: Pair = request.getfixturevalue(f"{family}_pair")
    prefetch, draft, k, memory, max_num_seqs, count, chunk = combination
    options = {"prefetch": prefetch, "num_speculative_tokens": k, "expert_memory": memory, "prefill_chunk": chunk}
    with build(pair, draft, max_num_seqs=max_num_seqs, **options) as llm:
        for prompts in (slice(count), slice(count - 1, None, -1)):  # again with caches that are warm, in another order
            assert tokens_of(run_together(llm, PROMPTS[prompts])) == expected_tokens(pair.target)[prompts]
        assert max(batches) == min(max_num_seqs, count)
        assert llm.engine.experts.pool.peak_slots <= llm.engine.slots
        assert left_over(llm) == []


def test_text_beyond_the_sliding_window(windowed_pair: Pair, batches: list[int]) -> None:
    model, params = reference(windowed_pair.target), replace(GREEDY, max_tokens=20)
    with build(windowed_pair, prefill_chunk=16) as llm:
        found = tokens_of(run_together(llm, PROMPTS[:4], params))
    assert found == [greedy(model, prompt, 20) for prompt in PROMPTS[:4]]
    assert max(batches) == 4


def test_state_that_cannot_roll_back_runs_in_turns(recurrent_target: Path, batches: list[int]) -> None:
    model = reference(recurrent_target)
    with LLM(str(recurrent_target), "ngram", progress=False, num_speculative_tokens=3) as llm:
        found = tokens_of(run_together(llm, PROMPTS[:4]))
        assert found == [greedy(model, prompt, COUNT) for prompt in PROMPTS[:4]]
        assert left_over(llm) == []
        assert [one for one in llm.notices if "run in turns, not together (the model keeps other state" in one]
    assert max(batches) == 1


def test_max_tokens_is_exact_in_company(
    shared: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step adds more tokens than its sequence may have, also if others may have more."""
    step, wrong = Loop.step, list[str]()  # an error in a shared step would only make its sequences try again alone

    def checked(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
        found = step(self, turns)
        for turn, new in zip(turns, found, strict=True):
            if not 1 <= len(new) <= turn.max_new_tokens:
                wrong.append(f"{len(new)} tokens instead of at most {turn.max_new_tokens}")
            if len(turn.sequence.tokens) > turn.sequence.capacity:
                wrong.append(f"{len(turn.sequence.tokens)} tokens, but {turn.sequence.capacity} positions")
        return found

    monkeypatch.setattr(Loop, "step", checked)
    for counts in ((1, 9, 2, 8, 3, 7, 4, 6), (9, 5, 1, 1, 2, 9, 3, 2), (2, 3, 2, 3)):
        prompts = PROMPTS[: len(counts)]
        generations = [
            shared.stream(prompt, replace(GREEDY, max_tokens=count))
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        start_together(shared, generations)
        found = tokens_of([generation.run() for generation in generations])
        assert found == [tokens[:count] for tokens, count in zip(expected, counts, strict=False)]
    assert wrong == []


# ---- options of requests

OPTIONS = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.2, "seed": 9, "min_p": 0.05, "n": 3},
    {"logprobs": 4},
    {"temperature": 1.0, "seed": 3, "logprobs": 2, "n": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "logit_bias": {65: 4.0}, "logprobs": 0},
    {"min_tokens": 6, "ignore_eos": False, "logit_bias": {256: 30.0}},
    {"stop": ["STOP"]},
    {},
]


def same_results(found: RequestOutput, alone: RequestOutput) -> bool:
    """Return whether two results are equal, log-probabilities within rounding."""
    for one, other in zip(found.outputs, alone.outputs, strict=True):
        exact = [(o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in (one, other)]
        if exact[0] != exact[1] or (one.logprobs is None) != (other.logprobs is None):
            return False
        for ours, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            if ours.keys() != theirs.keys():
                return False
            if not all(math.isclose(ours[t].logprob, theirs[t].logprob, abs_tol=1e-4) for t in ours):
                return False
    return True


@pytest.mark.parametrize("draft", [None, "good", "self:int4"])
def test_results_do_not_depend_on_company(mixtral_pair: Pair, draft: str | None, batches: list[int]) -> None:
    """Seeded samples, log-probabilities, penalties, stop strings, `n` and `min_tokens`."""
    prompts, k = [[*b"abc"], [*b"defghi"], *PROMPTS], 2 if draft else 0
    with build(mixtral_pair, None, num_speculative_tokens=0, **ONE_BY_ONE) as llm:
        stop = llm.generate(prompts[8], GREEDY)[0].text[4:6]
        params = [
            SamplingParams(
                **{"max_tokens": COUNT, "ignore_eos": True, **one, **({"stop": [stop]} if "stop" in one else {})}
            )
            for one in OPTIONS
        ]
        alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=False)]
    assert alone[8].finish_reason == "stop"
    assert len(alone[7].token_ids) == 7, "the end of text is the most likely token, from the seventh on"
    assert max(batches) == 1
    with build(mixtral_pair, draft, num_speculative_tokens=k, prefill_chunk=64) as llm:
        found = llm.generate(prompts[: len(params)], params)
        for one, other, options in zip(found, alone, OPTIONS, strict=True):
            assert same_results(one, other), options
    assert max(batches) == 8


# ---- arrivals and cancellations


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Draw events: requests that start, streams that are read on, and four ways to end one early."""
    kinds = ("start", "start", "start", "read", "read", "drop", "stop", "cancel", "close")
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 8)), min_size=4, max_size=24))


@settings(max_examples=12, deadline=None)
@given(histories())
def test_arrivals_and_cancellations_do_not_change_texts(
    shared: LLM, expected: list[list[int]], history: list[tuple[str, int]]
) -> None:
    check_history(shared, expected, history)


@settings(max_examples=12, deadline=None)
@given(histories())
def test_arrivals_and_cancellations_with_little_kv_memory(
    tight: LLM, expected: list[list[int]], history: list[tuple[str, int]]
) -> None:
    """Sequences are preempted, resumed, and cancelled while they wait."""
    check_history(tight, expected, history)


def check_history(shared: LLM, expected: list[list[int]], history: list[tuple[str, int]]) -> None:
    live: dict[int, tuple[Generation, Iterator[str]]] = {}  # by number of the prompt
    ended: list[tuple[int, Generation]] = []
    for event, number in history:
        if event == "start" and number not in live:
            generation = shared.stream(PROMPTS[number], GREEDY)
            generation.start()
            live[number] = generation, iter(generation)
        elif number in live:
            generation, pieces = live[number]
            if event == "read":
                next(pieces, None)
            elif event in ("stop", "cancel"):
                getattr(generation, event)()
                ended.append((number, live.pop(number)[0]))
            elif event == "close":
                pieces.close()  # type: ignore[attr-defined]
                ended.append((number, live.pop(number)[0]))
            elif event == "drop":
                del live[number], generation, pieces
                gc.collect()
    for number, (generation, pieces) in live.items():
        for _ in pieces:
            pass
        assert generation.token_ids == expected[number]
    for number, generation in ended:
        generation.run()  # waits for its end
        assert generation.token_ids == expected[number][: len(generation.token_ids)]
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    """Check that nothing is left of requests that have ended, or are about to: a cancelled one ends at its turn."""
    llm._thread.job(lambda: iter(())).cancel()
    within(SECONDS, lambda: [None for _ in iter(lambda: llm._thread.call(lambda: len(llm._thread._jobs)), 0)])
    assert left_over(llm) == []


def test_abort_and_cancelled_tasks_end_their_requests_only(
    shared: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, long = AsyncLLM(llm=shared), replace(GREEDY, max_tokens=200)
    step = Loop.step
    ended = {5: threading.Event(), 2: threading.Event()}  # an aborted and a cancelled request, by number of the prompt

    def wait_for_ends(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
        for sequence in [turn.sequence for turn in turns]:
            for number, event in ended.items():
                if sequence.has_output and sequence.tokens[: len(PROMPTS[number])] == PROMPTS[number]:
                    event.wait(SECONDS)
        return step(self, turns)

    monkeypatch.setattr(Loop, "step", wait_for_ends)

    async def run(number: int) -> list[int]:
        async for output in engine.generate(PROMPTS[number], GREEDY):
            result = output
        assert result.finished
        return result.token_ids

    async def run_aborted() -> list[int]:
        async for output in engine.generate(PROMPTS[5], long, request_id="aborted"):
            await engine.abort("aborted")
            ended[5].set()
            result = output
        assert not result.finished
        return result.token_ids

    async def run_long(started: asyncio.Future[Generation]) -> None:
        async for _ in engine.generate(PROMPTS[2], long, request_id="cancelled"):
            if not started.done():
                started.set_result(engine._active["cancelled"]._generations[0])

    async def main() -> tuple[list[list[int]], list[int], Generation]:
        started: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(run_long(started))
        others = [asyncio.create_task(run(number)) for number in (0, 1, 3, 4)]
        aborted = asyncio.create_task(run_aborted())
        generation = await asyncio.wait_for(started, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ended[2].set()
        results = [await other for other in others], await aborted, generation
        assert engine.load == (0, 0)
        return results

    others, aborted, cancelled = asyncio.run(main())
    assert others == [expected[number] for number in (0, 1, 3, 4)]
    assert_idle(shared)
    for number, tokens in ((5, aborted), (2, cancelled.token_ids)):
        assert tokens[:COUNT] == expected[number][: len(tokens)]
        assert len(tokens) < 200


def test_ids_are_taken_before_the_first_iteration(shared: LLM, expected: list[list[int]]) -> None:
    engine = AsyncLLM(llm=shared)

    def generate() -> Any:
        return engine.generate(PROMPTS[0], GREEDY, request_id="one")

    async def tokens_of_all(results: Any) -> list[list[int]]:
        return [output.token_ids async for output in results]

    async def main() -> None:
        aborted = generate()
        assert engine.load == (0, 1)
        with pytest.raises(UsageError, match="a request with the id one runs already"):
            generate()
        await engine.abort("one")
        assert await tokens_of_all(aborted) == [[]]
        assert engine.load == (0, 0), "its id is free"

        closed = generate()
        await closed.aclose()
        dropped = generate()
        del closed
        assert engine.load == (0, 1), "the id is that of the later one"
        del dropped
        last = generate()
        assert (await tokens_of_all(last))[-1] == expected[0]
        assert engine.load == (0, 0)

    asyncio.run(main())
    assert_idle(shared)


def test_a_slow_caller_gets_the_whole_result(shared: LLM, expected: list[list[int]]) -> None:
    """The request ends while its caller is busy with an earlier result."""
    engine = AsyncLLM(llm=shared)

    async def main() -> list[RequestOutput]:
        results = []
        async for output in engine.generate(PROMPTS[0], GREEDY):
            results.append(output)
            while shared._thread.call(lambda: len(shared._thread._jobs)):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)  # takes the last messages
        return results

    first, *_, last = asyncio.run(main())
    assert not first.finished
    assert last.finished
    assert last.token_ids == expected[0]
    assert_idle(shared)


# ---- failures


@contextmanager
def failing_step(
    monkeypatch: pytest.MonkeyPatch, point: str, fails: Callable[[Sequence[TokenSequence]], bool], error: Exception
) -> Iterator[list[int]]:
    """Raise an error at a point of a step if `fails` says so of its sequences; yield their numbers at each failure."""
    failed: list[int] = []
    step, now = Loop.step, list[TokenSequence]()

    def remembered(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
        now[:] = [turn.sequence for turn in turns]
        return step(self, turns)

    own = getattr(Loop, point)

    def maybe_fail(*args: Any, **options: Any) -> Any:
        result = own(*args, **options)
        last = point not in ("_judge", "_accept") or args[1] is now[-1]  # they get one sequence after the other
        if last and fails(now):
            failed.append(len(now))
            raise error
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", remembered)
        patch.setattr(Loop, point, maybe_fail)
        yield failed


POINTS = ("_draft", "_verify", "_judge", "_learn", "_accept", "_account", "_num_draft_tokens")


@pytest.mark.parametrize(
    ("point", "error"),
    [
        *((point, RuntimeError("injected")) for point in POINTS),
        *((point, TransferError("injected")) for point in ("_verify", "_judge")),  # after which slots are kept
    ],
)
def test_a_step_that_fails_once_costs_nothing(
    shared: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, point: str, error: Exception
) -> None:
    resources, params = Resources(shared), replace(GREEDY, logprobs=1)
    alone = [shared.generate(prompt, params)[0] for prompt in PROMPTS[:4]]
    left = [2]

    def fails(sequences: Sequence[TokenSequence]) -> bool:
        left[0] -= len(sequences) > 2
        return left[0] == 0 and len(sequences) > 2

    with failing_step(monkeypatch, point, fails, error) as failed:
        found = run_together(shared, PROMPTS[:4], params)
    assert len(failed) == 1
    assert tokens_of(found) == expected[:4]
    for one, other in zip(found, alone, strict=True):
        assert same_results(one, other)
    assert_idle(shared)
    assert resources.lost() == []


@pytest.mark.parametrize("point", POINTS)
def test_a_sequence_that_always_fails_fails_alone(
    shared: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    resources, bad = Resources(shared), PROMPTS[2]

    def fails(sequences: Sequence[TokenSequence]) -> bool:
        return any(one.tokens[: len(bad)] == bad and len(one.tokens) > len(bad) + 2 for one in sequences)

    with failing_step(monkeypatch, point, fails, ZeroDivisionError("always")) as failed:
        generations = [shared.stream(prompt, GREEDY) for prompt in PROMPTS[:5]]
        start_together(shared, generations)
        for number, generation in enumerate(generations):
            if number == 2:
                with pytest.raises(ZeroDivisionError, match="always"):
                    generation.run()
                assert generation.token_ids == expected[2][: len(generation.token_ids)]
            else:
                assert generation.run().token_ids == expected[number]
    assert failed[-1] == 1
    assert_idle(shared)
    assert resources.lost() == []
    assert tokens_of(run_together(shared, PROMPTS[:5])) == expected[:5]


@pytest.mark.parametrize("fails_alone", [True, False])
def test_batching_ends_only_if_sequences_that_fail_together_succeed_alone(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, fails_alone: bool
) -> None:
    with build(mixtral_pair) as llm:

        def fails(sequences: Sequence[TokenSequence]) -> bool:
            return all(one.has_output for one in sequences) and (fails_alone or len(sequences) > 1)

        with failing_step(monkeypatch, "_verify", fails, ZeroDivisionError("injected")) as failed:
            for _ in range(10):
                generations = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
                start_together(llm, generations)
                for generation in generations:
                    with pytest.raises(ZeroDivisionError) if fails_alone else nullcontext():
                        generation.run()
        assert max(failed) == 2
        assert llm.engine.target.batches == fails_alone
        assert any("run in turns, not together" in one for one in llm.notices) != fails_alone
        assert tokens_of(run_together(llm, PROMPTS[:4])) == expected[:4]
        assert_idle(llm)


def test_failed_expert_reads_fail_the_requests_that_need_them(
    shared: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read fails once, and then the disk is gone for a while."""
    resources, read = Resources(shared), ExpertFile.read
    left = [0, 1]  # reads that succeed, and then fail

    def failing(self: ExpertFile, *args: Any) -> None:
        left[0] -= 1
        if -left[1] <= left[0] < 0:
            raise OSError("the disk is gone")
        read(self, *args)

    monkeypatch.setattr(ExpertFile, "read", failing)
    for succeeding, failing_reads in ((40, 1), (60, 1), (30, 10**6)):
        left[:] = succeeding, failing_reads
        generations = [shared.stream(prompt, GREEDY) for prompt in PROMPTS[:5]]
        start_together(shared, generations)
        errors = []
        for number, generation in enumerate(generations):
            try:
                generation.run()
                assert generation.token_ids == expected[number]
            except TransferError as error:
                errors.append(str(error))
                assert generation.token_ids == expected[number][: len(generation.token_ids)]
        assert left[0] < 0
        assert len(errors) <= (1 if failing_reads == 1 else 5)
        assert (failing_reads == 1) or errors
        left[:] = 10**6, 0
        assert_idle(shared)
        assert resources.lost() == []
        assert tokens_of(run_together(shared, PROMPTS[:5])) == expected[:5]


@pytest.mark.parametrize("draft", ["good", "self:int4", "ngram"])
def test_a_draft_that_fails_in_company_costs_the_draft_of_one_sequence(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """It fails with three sequences or more, and for the second one also alone."""
    with build(mixtral_pair, draft) as llm:
        drafter, failed = llm.engine.parts.drafter, list[int]()
        own = drafter.propose

        def propose(sequences: Any, k: int, observers: Any) -> Any:
            if k and ((len(sequences) > 2 and not failed) or [one.id for one in sequences] == failed):
                failed[:] = [sequences[1].id] if len(sequences) > 1 else [-1]
                if drafter.runner is not None:  # in the middle of a forward: layers have different lengths
                    layer = drafter.runner.model.model.layers[1]
                    with monkeypatch.context() as patch:
                        patch.setattr(layer, "forward", lambda *args, **kwargs: 1 // 0)
                        return own(sequences, k, observers)
                raise ZeroDivisionError
            return own(sequences, k, observers)

        monkeypatch.setattr(drafter, "propose", propose)
        outputs = run_together(llm, PROMPTS[:6])
        assert tokens_of(outputs) == expected[:6]
        assert failed
        assert [notice for notice in llm.notices if "the draft failed" in notice]
        if draft != "ngram":
            with_drafts = [one.stats.counters.drafted > 2 for one in outputs]
            assert with_drafts.count(False) == 1
        assert_idle(llm)
        again = run_together(llm, PROMPTS[:6])
        assert tokens_of(again) == expected[:6]
        if draft != "ngram":
            assert all(one.stats.counters.drafted > 0 for one in again), "later requests draft again"


@pytest.mark.parametrize("draft", ["good", "self:int4", "ngram"])
def test_an_unusable_draft_costs_companions_nothing(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """The first sequence's logits have NaN; n-grams have no logits and propose what is not a token."""
    bad = PROMPTS[0]
    choose, draft_step = DraftModel._choose, Loop._draft

    def is_bad(sequence: TokenSequence) -> bool:
        return sequence.tokens[: len(bad)] == bad

    def choose_or_fail(self: DraftModel, logits: Any, sequence: TokenSequence, drafted: list[int]) -> int:
        if is_bad(sequence):
            raise DraftError("its logits contain NaN")
        return choose(self, logits, sequence, drafted)

    def propose_wrongly(self: NgramDraft, sequences: Sequence[TokenSequence], k: int, observers: Any) -> list[Draft]:
        return [Draft([-1] if is_bad(one) else one.tokens[-1:] * k) for one in sequences]

    lengths: list[int] = []  # of the companions' drafts

    def noted(self: Loop, turns: Sequence[Turn], k: int) -> list[Draft]:
        drafts = draft_step(self, turns, k)
        if k and any(is_bad(turn.sequence) for turn in turns):
            lengths.extend(
                len(one.tokens)
                for turn, one in zip(turns, drafts, strict=True)
                if not is_bad(turn.sequence) and turn.max_new_tokens > k
            )
        return drafts

    monkeypatch.setattr(DraftModel, "_choose", choose_or_fail)
    monkeypatch.setattr(NgramDraft, "propose", propose_wrongly)
    monkeypatch.setattr(Loop, "_draft", noted)
    with build(mixtral_pair, draft) as llm:
        outputs = run_together(llm, PROMPTS[:4])
        assert tokens_of(outputs) == expected[:4]
        assert outputs[0].stats.counters.drafted == 0
        assert lengths
        assert min(lengths) > 0
        assert [notice for notice in llm.notices if "a draft was not used" in notice]
        assert not [notice for notice in llm.notices if "the draft failed" in notice]
        assert_idle(llm)


def test_a_failed_launch_costs_one_sequence_its_drafts(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails once, at the end of the first sequence's prompt; its next step is shared."""
    with build(mixtral_pair) as llm:
        generations = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:4]]
        drafter, failed = llm.engine.parts.drafter, list[int]()
        recover, recovered = Engine.recover, list[int]()

        def launch(sequence: TokenSequence, k: int, observers: Any) -> None:
            if not failed:
                for generation in generations[1:]:
                    generation.start()
            if not failed or sequence.id == failed[0]:
                failed.append(sequence.id)
                raise RuntimeError("injected")

        def noted(self: Engine) -> None:
            recovered.append(1)
            recover(self)

        monkeypatch.setattr(drafter, "launch", launch)
        monkeypatch.setattr(Engine, "recover", noted)
        outputs = [generation.run() for generation in generations]
        assert tokens_of(outputs) == expected[:4]
        assert [one.stats.counters.drafted > 0 for one in outputs] == [False, True, True, True]
        assert len(failed) == 1
        assert len(recovered) <= 2
        assert_idle(llm)


def test_a_failure_after_a_failed_draft_loses_no_tokens(
    shared: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed draft, sequences have the step one by one; then the step of the third one fails."""
    resources, failed = Resources(shared), list[int]()
    drafter, step = shared.engine.parts.drafter, Loop.step
    own = drafter.propose

    def propose(sequences: Any, k: int, observers: Any) -> Any:
        if k and len(sequences) > 2 and not failed:
            failed.append(sequences[2].id)
            raise ZeroDivisionError
        return own(sequences, k, observers)

    def fail_once(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
        if len(failed) == 1 and [turn.sequence.id for turn in turns] == failed:
            failed.append(0)
            raise RuntimeError("injected")
        return step(self, turns)

    monkeypatch.setattr(drafter, "propose", propose)
    monkeypatch.setattr(Loop, "step", fail_once)
    assert tokens_of(run_together(shared, PROMPTS[:5])) == expected[:5]
    assert len(failed) == 2
    assert_idle(shared)
    assert resources.lost() == []


# ---- fairness


class Events:
    """Steps and chunks of prompts, in order, by sequence id; the largest number of sequences that ran."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, ...]] = []  # a chunk of a prompt is negative
        self.most = 0
        step, read = Loop.step, Loop.read_prompt

        def note_step(loop: Loop, turns: Sequence[Turn]) -> list[list[int]]:
            self._note(llm, tuple(turn.sequence.id for turn in turns))
            return step(loop, turns)

        def note_read(loop: Loop, sequence: TokenSequence) -> bool:
            if done := read(loop, sequence):
                self._note(llm, (-sequence.id,))
            return done

        monkeypatch.setattr(Loop, "step", note_step)
        monkeypatch.setattr(Loop, "read_prompt", note_read)

    def _note(self, llm: LLM, ids: tuple[int, ...]) -> None:
        self.steps.append(ids)
        self.most = max(self.most, llm._scheduler.running)

    def first_of(self, sequence_id: int) -> int:
        """Return when a sequence had its first step or chunk."""
        return next(n for n, ids in enumerate(self.steps) if sequence_id in map(abs, ids))


def ids_of(generations: Sequence[Generation]) -> list[int]:
    return [generation.request._sequence_id for generation in generations]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_waiting_requests_are_admitted_in_order_of_arrival(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    with build(mixtral_pair, max_num_seqs=most) as llm:
        events = Events(llm, monkeypatch)
        generations = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        start_together(llm, generations)
        assert tokens_of([generation.run() for generation in generations]) == expected
    firsts = [events.first_of(one) for one in ids_of(generations)]
    assert firsts == sorted(firsts)
    assert events.most == most == max(len(ids) for ids in events.steps)


def test_a_later_request_does_not_overtake_one_that_waits(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last request arrives during the first step of the first one, so that its turn comes right after that one."""
    counts = (2, COUNT, 2, 2)
    with build(mixtral_pair, None, num_speculative_tokens=0, max_num_seqs=2) as llm:
        *generations, late = [
            llm.stream(prompt, replace(GREEDY, max_tokens=count))
            for prompt, count in zip(PROMPTS, counts, strict=False)
        ]
        events, step = Events(llm, monkeypatch), Loop.step

        def start_late(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
            late.start()
            return step(self, turns)

        monkeypatch.setattr(Loop, "step", start_late)
        start_together(llm, generations)
        for generation in (*generations, late):
            generation.run()
    firsts = [events.first_of(one) for one in ids_of([*generations, late])]
    assert firsts == sorted(firsts)


def test_others_have_steps_while_a_long_prompt_is_read(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    long, chunk = [(7 * place) % 250 for place in range(60)], 8
    with build(mixtral_pair, None, num_speculative_tokens=0, prefill_chunk=chunk) as llm:
        events = Events(llm, monkeypatch)
        generations = [llm.stream(prompt, replace(GREEDY, max_tokens=30)) for prompt in (PROMPTS[0], PROMPTS[1], long)]
        start_together(llm, generations)
        found = tokens_of([generation.run() for generation in generations])
        first, second, last = ids_of(generations)
    model = reference(mixtral_pair.target)
    assert found == [greedy(model, prompt, 30) for prompt in (PROMPTS[0], PROMPTS[1], long)]
    chunks = [n for n, ids in enumerate(events.steps) if ids == (-last,)]
    assert len(chunks) == (len(long) - 1) // chunk
    chunks.append(next(n for n, ids in enumerate(events.steps) if ids == (last,)))  # the rest of the prompt
    for begin, end in pairwise(chunks):
        between = {one for ids in events.steps[begin + 1 : end] for one in ids}
        assert between == {first, second}, "a step of both, and nothing else, between two chunks"
    assert any(len(ids) == 3 for ids in events.steps[chunks[-1] :])


@pytest.mark.parametrize("draft", [None, "good", "self:int4"])
def test_one_chunk_of_all_prompts_is_read_between_two_steps(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    """Neither several long prompts nor the draft, which reads them too, hold the first sequence up."""
    chunk, prompts = 8, [PROMPTS[0], *([(7 * place + n) % 250 for place in range(40)] for n in range(4))]
    read, since = list[int](), [0]
    with build(mixtral_pair, draft, num_speculative_tokens=2 if draft else 0, prefill_chunk=chunk) as llm:
        first = llm.stream(prompts[0], replace(GREEDY, max_tokens=60))
        rest = [llm.stream(prompt, replace(GREEDY, max_tokens=2)) for prompt in prompts[1:]]
        events, run = Events(llm, monkeypatch), ModelRunner.run

        def run_counted(self: ModelRunner, tokens: Any, *args: Any, **options: Any) -> Any:
            since[0] += len(tokens) if events.steps and len(tokens) > 3 else 0  # more than a step's rows
            return run(self, tokens, *args, **options)

        step = Loop.step

        def note(loop: Loop, turns: Sequence[Turn]) -> list[list[int]]:
            if loop.has_read(turns[0].sequence):
                read.append(since[0])
                since[0] = 0
            return step(loop, turns)

        monkeypatch.setattr(ModelRunner, "run", run_counted)
        monkeypatch.setattr(Loop, "step", note)
        start_together(llm, [first, *rest])
        outputs = [one.run() for one in (first, *rest)]
    model = reference(mixtral_pair.target)
    counts = (60, *[2] * len(rest))
    assert tokens_of(outputs) == [greedy(model, prompt, n) for prompt, n in zip(prompts, counts, strict=True)]
    assert sum(read[1:]) >= 4 * 40 * (2 if draft == "good" else 1) - 4 * chunk
    assert max(read[1:]) <= 2 * chunk, "the last chunks of target and draft are read in one step"


@pytest.mark.parametrize("prompts", [[0, None, 0, 0], [None, 0, 0], [0, 0]], ids=["first", "last", "alone"])
def test_prompts_are_read_in_order_of_arrival(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, prompts: list[int | None]
) -> None:
    """Wherever the sequence that decodes (None) stands in the turns, no prompt overtakes an older one."""
    chunk, short = 8, [1, 2, 3]
    with build(mixtral_pair, None, num_speculative_tokens=0, prefill_chunk=chunk) as llm:
        events = Events(llm, monkeypatch)
        generations = [
            llm.stream(short if one is None else [(7 * place + number) % 250 for place in range(40)], GREEDY)
            for number, one in enumerate(prompts)
        ]
        start_together(llm, generations)
        for generation in generations:
            generation.run()
    long = [one for one, kind in zip(ids_of(generations), prompts, strict=True) if kind is not None]
    chunks = [-ids[0] for ids in events.steps if ids[0] < 0]
    assert chunks == [one for one in long for _ in range(4)]


def test_sequences_wait_for_a_place_in_kv_memory(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    need = max(LENGTHS) + COUNT
    with build(mixtral_pair) as llm:
        runner = llm.engine.parts.drafter.runner
        assert runner is not None
        for one in (llm.engine.target, runner):
            one.kv_pool.plan(2 * need, 2 * need, reuse_prefixes=True)
        events = Events(llm, monkeypatch)
        usage: list[int] = []
        step = Engine.step

        def checked(self: Engine, turns: Sequence[Turn]) -> list[list[int]]:
            found = step(self, turns)
            usage.append(max(sum(kv.capacity for kv in one.kv_pool._used) for one in (llm.engine.target, runner)))
            return found

        monkeypatch.setattr(Engine, "step", checked)
        assert tokens_of(run_together(llm, PROMPTS * 2)) == expected * 2
        assert max(usage) <= 2 * need
        assert 1 < events.most < 8
        assert left_over(llm) == []
        huge = [(3 * place) % 250 for place in range(3 * need)]  # more than there is: it runs alone
        found = tokens_of(run_together(llm, [PROMPTS[0], huge, PROMPTS[1]]))
        assert found == [expected[0], greedy_tokens(mixtral_pair.target, huge, COUNT), expected[1]]
        assert left_over(llm) == []


def test_small_requests_overtake_a_large_one_but_not_without_end(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the first sequence there is place for small prompts, not for the large one that arrives second."""
    large = [(3 * place) % 250 for place in range(95)]
    prompts = [PROMPTS[0], large, *[[number, 1, 2] for number in range(8)]]
    counts = [60, 2, *[2] * 8]
    with build(mixtral_pair, None, num_speculative_tokens=0, max_num_seqs=3) as llm:
        limit_kv(llm, 100, monkeypatch)
        events = Events(llm, monkeypatch)
        generations = [
            llm.stream(prompt, replace(GREEDY, max_tokens=count)) for prompt, count in zip(prompts, counts, strict=True)
        ]
        start_together(llm, generations)
        found = tokens_of([generation.run() for generation in generations])
        assert left_over(llm) == []
        assert llm.num_preemptions == 0
    model = reference(mixtral_pair.target)
    assert found == [greedy(model, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    first, second, *small = ids_of(generations)
    starts = {one: events.first_of(one) for one in (first, second, *small)}
    assert [*sorted(starts, key=lambda one: starts[one])] == [first, *small[:3], second, *small[3:]]
    end = max(n for n, ids in enumerate(events.steps) if first in ids)
    assert starts[small[2]] < end < starts[second]


@pytest.mark.parametrize("draft", [None, "good", "self:int4", "ngram"])
def test_the_youngest_sequences_are_preempted_when_kv_memory_runs_out(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    count, prompts, model = 40, PROMPTS[:5], reference(mixtral_pair.target)
    params = replace(GREEDY, max_tokens=count)
    with build(mixtral_pair, draft, num_speculative_tokens=3 if draft else 0, prefill_chunk=64) as llm:
        limit_kv(llm, 90, monkeypatch)
        events = Events(llm, monkeypatch)
        usage, step = list[float](), Loop.step

        def noted(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
            found = step(self, turns)
            usage.append(self.target.kv_pool.usage or 0.0)
            return found

        monkeypatch.setattr(Loop, "step", noted)
        generations = [llm.stream(prompt, params) for prompt in prompts]
        start_together(llm, generations)
        found = tokens_of([generation.run() for generation in generations])
        assert left_over(llm) == []
        assert llm.num_preemptions > 0
    assert found == [greedy(model, prompt, count) for prompt in prompts]
    assert max(usage) <= 1.0
    assert events.most == len(prompts), "all of them were admitted: their prompts fit"
    oldest = ids_of(generations)[0]
    end = max(n for n, ids in enumerate(events.steps) if oldest in ids)
    assert all(oldest in ids for ids in events.steps[:end] if len(ids) > 1), "the oldest one never waits"


def test_preempted_sequences_whose_state_cannot_roll_back(
    recurrent_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, model = replace(GREEDY, max_tokens=30), reference(recurrent_target)
    with LLM(str(recurrent_target), None, dtype="float32", progress=False, num_speculative_tokens=0) as llm:
        limit_kv(llm, 70, monkeypatch)
        found = tokens_of(run_together(llm, PROMPTS[:4], params))
        assert llm.num_preemptions > 0
        assert left_over(llm) == []
    assert found == [greedy(model, prompt, 30) for prompt in PROMPTS[:4]]


def test_a_failed_preemption_costs_one_request(
    tight: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_out, failed = KvPool.swap_out, list[KvState]()

    def fail_once(self: KvPool, kv: KvState) -> None:
        if not failed:
            failed.append(kv)
            raise RuntimeError("no host memory")
        swap_out(self, kv)

    monkeypatch.setattr(KvPool, "swap_out", fail_once)
    generations = [tight.stream(prompt, GREEDY) for prompt in PROMPTS]
    start_together(tight, generations)
    errors = []
    for number, generation in enumerate(generations):
        try:
            assert generation.run().token_ids == expected[number]
        except RuntimeError as error:
            errors.append(str(error))
    assert errors == ["no host memory"]
    assert_idle(tight)


def test_sampled_text_does_not_depend_on_preemptions(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=7, logprobs=1)
    with build(mixtral_pair) as llm:
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS[:4]]
        limit_kv(llm, 80, monkeypatch)
        together = run_together(llm, PROMPTS[:4], params)
        assert llm.num_preemptions > 0
    assert tokens_of(together) == tokens_of(alone)
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, rel=1e-4)


def test_no_step_has_more_rows_than_results_allow(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are batch-invariant up to a number of rows."""
    rows: list[int] = []
    run_batch = ModelRunner.run_batch

    def counted(self: ModelRunner, parts: Any, *args: Any) -> Any:
        rows.append(sum(len(part.tokens) for part in parts))
        return run_batch(self, parts, *args)

    monkeypatch.setattr(ModelRunner, "run_batch", counted)
    with build(mixtral_pair, max_num_seqs=20) as llm:
        rows.clear()
        assert tokens_of(run_together(llm, PROMPTS * 2)) == expected * 2
    assert 16 < max(rows) <= BATCH_ROWS[-1]


# ---- prompts that are read together


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the list of forwards that read several prompts, each with the lengths of these, as it grows."""
    reads: list[list[int]] = []
    read_batch = ModelRunner.read_batch

    def noted(self: ModelRunner, parts: Any, *args: Any) -> Any:
        reads.append([len(part.tokens) for part in parts])
        return read_batch(self, parts, *args)

    monkeypatch.setattr(ModelRunner, "read_batch", noted)
    return reads


def test_short_prompts_that_wait_are_read_together(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, loads = noted_reads(monkeypatch), list[int]()
    for together in (False, True):
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(Loop, "can_read_together", lambda self, sequences: False)
            with build(mixtral_pair, None, expert_memory="25%", prefill_chunk=64, num_speculative_tokens=0) as llm:
                outputs = run_together(llm, PROMPTS[:6], replace(GREEDY, max_tokens=1))
                assert tokens_of(outputs) == [tokens[:1] for tokens in expected[:6]]
                loads.append(llm.engine.counters.demand_loads)
                assert_idle(llm)
    assert reads == [list(LENGTHS[:6])]
    assert loads[1] < 0.5 * loads[0]


def test_short_prompts_together_are_read_with_the_threads_of_a_long_one(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_force, rows = IntraOpThreads.in_force, list[int]()

    def noted(self: IntraOpThreads, count: int) -> Any:
        rows.append(count)
        return in_force(self, count)

    with build(mixtral_pair, None, prefill_chunk=64, num_speculative_tokens=0) as llm:
        monkeypatch.setattr(IntraOpThreads, "in_force", noted)
        run_together(llm, PROMPTS[:6])
    assert max(rows) == sum(LENGTHS[:6])
    assert min(rows) == 1


def test_prompts_are_read_together_up_to_one_chunk(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = noted_reads(monkeypatch)
    with build(mixtral_pair, prefill_chunk=20) as llm:
        assert tokens_of(run_together(llm, PROMPTS)) == expected
        assert_idle(llm)
    assert all(sum(lengths) <= 20 and len(lengths) > 1 for lengths in reads)
    assert [4, 1] in reads, "the third one is longer than a chunk"


@pytest.mark.parametrize("reuses", [True, False])
def test_prompts_with_a_new_common_prefix_wait_for_the_first_one(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, reuses: bool
) -> None:
    reads = noted_reads(monkeypatch)
    prompts = [[(3 * place) % 250 for place in range(40)] + [number] for number in range(3)]
    with build(mixtral_pair, prefill_chunk=256, enable_prefix_caching=reuses) as llm:
        found = run_together(llm, prompts)
        assert [one.stats.cached_tokens for one in found] == ([0, 40, 40] if reuses else [0, 0, 0])
        assert reads == ([[1, 1]] if reuses else [[41, 41, 41]])
        model = reference(mixtral_pair.target)
        assert tokens_of(found) == [greedy(model, prompt, COUNT) for prompt in prompts]
        assert_idle(llm)


def test_prompts_that_reuse_the_same_earlier_tokens_are_read_together(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system prompt was read before; only what follows it counts for a chunk."""
    reads, system = noted_reads(monkeypatch), [(3 * place) % 250 for place in range(60)]
    prompts = [system + [7 * number + place for place in range(5 + number)] for number in range(4)]
    with build(mixtral_pair, prefill_chunk=32) as llm:
        run_together(llm, [[*system, 1, 2]])
        found = run_together(llm, prompts)
        assert reads == [[5, 6, 7, 8]]
        assert [one.stats.cached_tokens for one in found] == [60] * 4
        model = reference(mixtral_pair.target)
        assert tokens_of(found) == [greedy(model, prompt, COUNT) for prompt in prompts]
        assert_idle(llm)


def test_prompts_are_read_together_only_as_far_as_kv_memory_goes(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Place is counted for one after the other, before any of them is read."""
    reads = noted_reads(monkeypatch)
    with build(mixtral_pair, prefill_chunk=64) as llm:
        limit_kv(llm, 70, monkeypatch)
        assert tokens_of(run_together(llm, PROMPTS[:6])) == expected[:6]
        assert_idle(llm)
    assert reads
    assert all(len(lengths) < 6 for lengths in reads)


def test_prompts_that_cannot_be_read_together_are_read_alone(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_batch, failed = ModelRunner.read_batch, list[int]()

    def failing(self: ModelRunner, parts: Any, *args: Any) -> Any:
        read_batch(self, parts, *args)
        failed.append(len(parts))
        raise RuntimeError("injected")

    monkeypatch.setattr(ModelRunner, "read_batch", failing)
    with build(mixtral_pair, prefill_chunk=64) as llm:
        assert tokens_of(run_together(llm, PROMPTS[:4])) == expected[:4]
        assert failed == [4]
        assert_idle(llm)


def test_reading_together_ends_only_if_prompts_that_fail_together_succeed_alone(
    mixtral_pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that succeed in between do not count."""
    read_batch, failed = ModelRunner.read_batch, list[int]()

    def failing(self: ModelRunner, parts: Any, *args: Any) -> Any:
        failed.append(len(parts))
        raise RuntimeError("injected")

    monkeypatch.setattr(ModelRunner, "read_batch", failing)
    with build(mixtral_pair, prefill_chunk=64) as llm:
        for _ in range(10):
            assert tokens_of(run_together(llm, PROMPTS[:2])) == expected[:2]
        assert failed == [2] * 8
        assert llm.engine.target.batches
        assert [notice for notice in llm.notices if "are read in turns, not together" in notice]
        monkeypatch.setattr(ModelRunner, "read_batch", read_batch)
        assert tokens_of(run_together(llm, PROMPTS[:4])) == expected[:4]
        assert_idle(llm)


def test_prompts_that_are_read_together_keep_to_what_may_be_read_between_two_steps(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt has a prefix of the first one, and is read after it; the third one would fit to the second."""
    chunk, lengths = 100, (60, 40, 60)
    first, second, third = ([(7 * place + n) % 250 for place in range(length)] for n, length in enumerate(lengths))
    prompts = [first, first[:34] + second[34:], third]
    with build(mixtral_pair, None, num_speculative_tokens=0, prefill_chunk=chunk) as llm:
        running = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=30))
        generations = [llm.stream(prompt, GREEDY) for prompt in prompts]
        steps, step = list[tuple[bool, int]](), Loop.step  # whether it reads, and tokens that it reads

        def noted(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
            unread = [] if self.has_read(turns[0].sequence) else [len(turn.sequence.tokens) for turn in turns]
            if not steps:
                for generation in generations:
                    generation.start()
            steps.append((bool(unread), sum(unread)))
            return step(self, turns)

        monkeypatch.setattr(Loop, "step", noted)
        running.run()
        model = reference(mixtral_pair.target)
        assert tokens_of([one.run() for one in generations]) == [greedy(model, prompt, COUNT) for prompt in prompts]
        assert_idle(llm)
    assert [count for reads, count in steps if reads] == [len(PROMPTS[0]), 60, 40, 60]
    between = [number for number, (reads, _) in enumerate(steps) if reads][-2:]
    assert between[1] - between[0] > 1, "others have a step before the third prompt is read"


# ---- statistics


def difference(later: Counters, earlier: Counters) -> dict[str, Any]:
    return {f.name: getattr(later.minus(earlier), f.name) for f in fields(Counters)}


@pytest.mark.parametrize(
    ("draft", "prefetch"), [("good", "draft-gate"), ("self:int4", "auto"), ("ngram", "next-gate"), (None, "adaptive")]
)
def test_counters_of_requests_add_up_to_those_of_the_process(
    mixtral_pair: Pair, draft: str | None, prefetch: str
) -> None:
    k = 3 if draft else 0
    with build(mixtral_pair, draft, prefetch=prefetch, num_speculative_tokens=k, expert_memory=memory_for(4)) as llm:
        before, counts = llm.engine.counters, (9, 1, 5, 7, 3, 8, 2, 6, 4)
        generations = [llm.stream(p, replace(GREEDY, max_tokens=n)) for p, n in zip(PROMPTS, counts, strict=True)]
        start_together(llm, generations)
        parts = [generation.run().stats.counters for generation in generations]
        total = difference(llm.engine.counters, before)
    whole = parts[0]
    for one in parts[1:]:
        whole = whole.plus(one)
    for name, value in total.items():
        found = getattr(whole, name)
        assert found == pytest.approx(value) if isinstance(value, float) else found == value, name
    assert total["tokens"] == 45
    assert total["hits"] > 0
    assert total["demand_loads"] > 0
    assert all(one.asked > 0 for one in parts), "shared steps are shared by all"


def test_sequences_of_a_step_have_equal_shares(mixtral_pair: Pair, batches: list[int]) -> None:
    """Requests with equal prompts, without reuse, that share all steps but those of their prompts."""
    prompts = [[*PROMPTS[3]] for _ in range(4)]
    with build(
        mixtral_pair, None, num_speculative_tokens=0, prefetch="on-demand", enable_prefix_caching=False,
        expert_memory="100%", prefill_chunk=512,
    ) as llm:  # fmt: skip
        run_together(llm, prompts)  # loads the experts
        stats = [output.stats for output in run_together(llm, prompts)]
    assert {one.counters.steps for one in stats} == {COUNT}
    asked = [one.decode_counters.asked for one in stats]
    lone = 3 * 2 * (COUNT - 1)  # layers, experts per token, steps after the prompt
    assert sum(asked) < 2 * lone, "four equal sequences need the experts of one, once they are in step"
    assert max(asked) < lone


def test_times_of_completions_that_run_together(shared: LLM) -> None:
    """A request takes as long as its longest completion; its time per token is that of one completion."""
    outputs = run_together(shared, [PROMPTS[0]] * 3)
    both = combined_output(outputs).stats
    stats = [output.stats for output in outputs]
    assert both.latency_seconds == max(one.latency_seconds for one in stats)
    assert both.ttft_seconds == stats[0].ttft_seconds
    assert both.decode_seconds == pytest.approx(sum(one.latency_seconds - one.ttft_seconds for one in stats))
    assert both.tpot_seconds == pytest.approx(both.decode_seconds / (3 * (COUNT - 1)))


def test_time_to_first_token_counts_from_the_arrival(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the prompts of others are read, before a request has its first turn."""
    clock = shared.engine.parts.clock
    now = [0.0]
    step = Loop.step

    def slow(self: Loop, turns: Sequence[Turn]) -> list[list[int]]:
        now[0] += 100.0
        return step(self, turns)

    monkeypatch.setattr(type(clock), "now", lambda self: now[0])
    monkeypatch.setattr(Loop, "step", slow)
    monkeypatch.setattr(Loop, "read_prompt", lambda self, sequence: False)
    times = [output.stats.ttft_seconds for output in run_together(shared, PROMPTS[:4])]
    assert times[0] == 100.0
    assert times == sorted(times)
    assert times[-1] >= 400.0
