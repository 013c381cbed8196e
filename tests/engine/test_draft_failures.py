"""A draft never fails a request: an exception, NaN or an invalid proposal costs drafts, and a notice says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch

from checkpoints import VOCABULARY, Pair, greedy_tokens
from spmoe import LLM, SamplingParams, types
from spmoe.draft.base import DraftContext, Drafter, Observers
from spmoe.draft.model import DraftModel
from spmoe.draft.ngram import NgramDraft
from spmoe.errors import SpmoeError
from spmoe.registry import DRAFTERS
from spmoe.types import Draft, Stage
from spmoe.verify.sampling import PositionNoise

COUNT = 12
PROMPT = list(b"abcabcabcab")  # n-grams find a draft at once
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.9, seed=3)
KINDS = ("model", "self:int8", "ngram", "plugin")
FAILED = "the draft failed ({}); a request goes on without drafts"


@DRAFTERS.register("test-plugin")
class Plugin(Drafter):
    """Proposes the last token K times, unless a test says otherwise."""

    make: ClassVar[Callable[[list[int], int], Any] | None] = None  # the result of `propose`, from tokens and K
    broken: ClassVar[str] = ""  # the method that raises an exception

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        return cls()

    def propose(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[Draft]:
        (sequence,) = sequences
        if k and Plugin.make is not None:
            return Plugin.make(sequence.tokens, k)  # type: ignore[no-any-return]
        return [Draft(sequence.tokens[-1:] * k)]

    def rewind(self, lengths: Any) -> None:
        self._maybe_fail("rewind")

    def release(self, sequence_id: int) -> None:
        self._maybe_fail("release")

    def launch(self, sequence: types.Sequence, k: int, observers: Observers) -> None:
        self._maybe_fail("launch")

    def _maybe_fail(self, method: str) -> None:
        if Plugin.broken == method:
            raise RuntimeError(f"{method} is broken")


@pytest.fixture(autouse=True)
def _working_plugin() -> Iterator[None]:
    Plugin.make, Plugin.broken = None, ""
    yield
    Plugin.make, Plugin.broken = None, ""


@contextmanager
def engine(pair: Pair, kind: str, **options: Any) -> Iterator[LLM]:
    draft = {"model": str(pair.good), "plugin": "test-plugin"}.get(kind, kind)
    options = {"num_speculative_tokens": 3, "expert_memory": "50%", "cutoff": "all", "progress": False, **options}
    with LLM(str(pair.target), None if kind == "none" else draft, **options) as llm:
        llm.notices.clear()
        yield llm


@cache
def _plain(target: Path, params: SamplingParams) -> list[int]:
    if params.greedy:
        return greedy_tokens(target, PROMPT, COUNT)
    with LLM(str(target), None, progress=False) as llm:
        return llm.generate(PROMPT, params)[0].token_ids


def run(llm: LLM, params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """Return the tokens of a request and the number of drafted ones; check that it leaves nothing behind."""
    output = llm.generate(PROMPT, params)[0]
    assert output.finish_reason == "length"
    assert llm.engine.parts.target_kv == {}
    return output.token_ids, output.stats.counters.drafted


# ---- exceptions


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_exception_in_a_draft_ends_drafting_for_the_request_only(
    mixtral_pair: Pair, kind: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(mixtral_pair, kind) as llm:
        drafter, calls = llm.engine.parts.drafter, list[int]()
        own = drafter.propose

        def propose(sequences: Any, k: int, observers: Any) -> Any:
            calls.append(k)
            if broken and k:
                raise ZeroDivisionError("not today, sorry")
            return own(sequences, k, observers)

        monkeypatch.setattr(drafter, "propose", propose)
        broken = True
        assert run(llm, params) == (_plain(mixtral_pair.target, params), 0)
        assert len([k for k in calls if k]) == 1
        assert llm.notices == [FAILED.format("not today, sorry")]
        broken = False
        tokens, _ = run(llm, params)
        assert len([k for k in calls if k]) > 2, "the next request drafts again"
        assert params is SAMPLED or tokens == _plain(mixtral_pair.target, params)
        assert len(llm.notices) == 1


@pytest.mark.parametrize("kind", ["model", "self:int8"])
def test_exception_in_the_middle_of_a_draft_pass(
    mixtral_pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that ends half-way leaves a KV cache whose layers have different lengths."""
    with engine(mixtral_pair, kind) as llm:
        runner = llm.engine.parts.drafter.runner
        assert runner is not None
        layer = runner.model.model.layers[1]
        own, calls = runner.forward, list[int]()

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) != 5:
                return own(*args, **kwargs)

            def fail(module: Any, given: Any) -> None:
                raise RuntimeError("in the second layer")

            handle = layer.register_forward_pre_hook(fail)
            try:
                return own(*args, **kwargs)
            finally:
                handle.remove()

        monkeypatch.setattr(runner, "forward", forward)
        tokens, drafted = run(llm)
        assert tokens == _plain(mixtral_pair.target, GREEDY)
        assert drafted > 0, "before it failed"
        assert llm.notices == [FAILED.format("in the second layer")]


# the routers of the target's quantized self are the prediction: nothing else predicts
@pytest.mark.parametrize(
    ("kind", "method"), [("model", "on_chunk"), ("model", "predict_routing"), ("self:int8", "on_chunk")]
)
def test_exception_in_prefetching_from_a_draft(
    mixtral_pair: Pair, kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(mixtral_pair, kind, prefetch="draft-gate") as llm:
        policy = llm.engine.loop.policy
        own = getattr(policy, method)

        def fail(*args: Any) -> Any:
            if args[0] is Stage.DRAFT or getattr(args[0], "stage", None) is Stage.DRAFT:
                raise IndexError("no such gate, sorry")
            return own(*args)

        monkeypatch.setattr(policy, method, fail)
        assert run(llm) == (_plain(mixtral_pair.target, GREEDY), 0)
        assert llm.notices == [FAILED.format("no such gate, sorry")]


@pytest.mark.parametrize("method", ["rewind", "release", "launch"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_exception_in_another_method_of_a_drafter(mixtral_pair: Pair, method: str, params: SamplingParams) -> None:
    with engine(mixtral_pair, "plugin") as llm:
        working, _ = run(llm, params)
        Plugin.broken = method
        tokens, drafted = run(llm, params)
        assert llm.notices == [FAILED.format(f"{method} is broken")]
        assert len(tokens) == COUNT
        if params.greedy or method == "release":
            assert tokens == working
        assert (drafted > 0) == (method == "release"), "a prompt is followed by the first rewind"


# ---- NaN


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["model", "self:int8"])
def test_nan_logits_cost_the_draft_of_a_step(
    mixtral_pair: Pair, kind: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(mixtral_pair, kind) as llm:
        runner = llm.engine.parts.drafter.runner
        assert runner is not None
        own, calls = runner.forward, list[int]()

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            logits = own(*args, **kwargs)
            return torch.full_like(logits, float("nan")) if bad(len(calls)) else logits

        monkeypatch.setattr(runner, "forward", forward)
        bad: Callable[[int], bool] = lambda call: True  # noqa: E731
        assert run(llm, params) == (_plain(mixtral_pair.target, params), 0), "no draft used a random number"
        assert llm.notices == ["a draft was not used: its logits contain NaN"]
        steps = len(calls)
        assert steps > COUNT // 2, "every step tries again"
        bad = lambda call: call == steps + 3  # noqa: E731
        loads = llm.engine.counters.demand_loads
        tokens, drafted = run(llm, params)
        assert drafted > 0, "only one step goes without a draft"
        assert params is SAMPLED or tokens == _plain(mixtral_pair.target, params)
        assert llm.engine.experts.pool.residents(), "experts stay in their slots"
        assert llm.engine.counters.demand_loads - loads < 10 * COUNT


def test_one_nan_among_logits_is_found() -> None:
    """The largest of logits with a NaN is NaN, and so is every probability."""
    draft = DraftModel(None, VOCABULARY, 8, None)  # type: ignore[arg-type]
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7] = float("nan")
    for params in (GREEDY, SAMPLED):
        sequence = types.Sequence(1, [1, 2], 2, params, PositionNoise(0), 8)
        with pytest.raises(SpmoeError, match="NaN"):
            draft._choose(logits, sequence, [])


# ---- proposals that cannot be used


PROPOSALS: dict[str, tuple[Callable[[list[int], int], Any], str]] = {
    "too long": (lambda tokens, k: [Draft([1] * (k + 1))], "has .* tokens, where at most"),
    "negative": (lambda tokens, k: [Draft([-1])], "-1 is not a token"),
    "outside": (lambda tokens, k: [Draft([VOCABULARY])], f"{VOCABULARY} is not a token"),
    "huge": (lambda tokens, k: [Draft([10**30])], "is not a token"),
    "fraction": (lambda tokens, k: [Draft([1.5])], r"1\.5 is not a token"),  # type: ignore[list-item]
    "numpy": (lambda tokens, k: [Draft([np.int64(5)])], "is not a token"),  # type: ignore[list-item]
    "no draft": (lambda tokens, k: [None], "is a NoneType"),
}


@pytest.fixture(scope="module")
def plugin_engine(mixtral_pair: Pair) -> Iterator[LLM]:
    with engine(mixtral_pair, "plugin") as llm:
        yield llm


@pytest.mark.parametrize(
    ("name", "params"),
    [(name, params) for name in PROPOSALS for params in (GREEDY, SAMPLED)],
    ids=lambda value: value if isinstance(value, str) else "greedy" if value.greedy else "sampled",
)
def test_invalid_proposal_is_not_used(
    plugin_engine: LLM, mixtral_pair: Pair, name: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin_engine.notices.clear()
    make, message = PROPOSALS[name]
    monkeypatch.setattr(Plugin, "make", staticmethod(make))
    assert run(plugin_engine, params) == (_plain(mixtral_pair.target, params), 0)
    assert plugin_engine.notices
    assert all(re.match(f"a draft was not used: .*{message}", notice) for notice in plugin_engine.notices)


@pytest.mark.parametrize("answer", [[], None, [Draft([1]), Draft([1])], 7], ids=str)
def test_result_of_another_form_is_a_failure(
    plugin_engine: LLM, mixtral_pair: Pair, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin_engine.notices.clear()
    monkeypatch.setattr(Plugin, "make", staticmethod(lambda tokens, k: answer))
    assert run(plugin_engine) == (_plain(mixtral_pair.target, GREEDY), 0)
    (notice,) = plugin_engine.notices
    assert notice.startswith("the draft failed (")


# ---- devices


def test_device_error_in_a_launched_draft_is_reported(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is broken fails the request, however the draft was launched; the engine says so from then on."""
    with engine(mixtral_pair, "plugin") as llm:

        def synchronize() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(llm.engine.parts.runtime.backend, "synchronize", synchronize)
        Plugin.broken = "launch"
        for _ in range(2):
            with pytest.raises(SpmoeError, match=r"illegal memory access.*could not be restored; build another one"):
                llm.generate(PROMPT, GREEDY)


def test_failed_launch_of_one_request_does_not_reach_another(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(mixtral_pair, "ngram") as llm:
        drafter, failed = llm.engine.parts.drafter, list[int]()
        assert isinstance(drafter, NgramDraft)

        def launch(sequence: types.Sequence, k: int, observers: Any) -> None:
            if not failed or sequence.id == failed[0]:
                failed.append(sequence.id)
                raise RuntimeError("only for the first one")

        monkeypatch.setattr(drafter, "launch", launch)
        streams = [llm.stream(PROMPT, GREEDY) for _ in range(2)]
        running = [iter(stream) for stream in streams]
        while running:
            running = [one for one in running if next(one, None) is not None]
        outputs = [stream.completion for stream in streams]
        assert [output.token_ids for output in outputs] == [_plain(mixtral_pair.target, GREEDY)] * 2
        assert sorted(output.stats.counters.drafted > 0 for output in outputs) == [False, True]
        assert llm.notices == [FAILED.format("only for the first one")]
