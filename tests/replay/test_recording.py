"""Traces of a real engine: what is recorded is what ran, and replayed on demand it loads exactly as much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.replay.record import AHEAD, record
from spmoe.replay.replay import Replayer, Setting
from spmoe.replay.trace import Trace

PROMPTS = ["def add(a, b):", "one two three four five six"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache directory for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMOE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def recorded(target: Path, draft: Path | None, **options: object) -> tuple[Trace, list[list[int]]]:
    """A trace, and what was generated while it was recorded."""
    k = 3 if draft is not None else 0
    settings = {"device": "cpu", "dtype": "float32", "progress": False, "num_speculative_tokens": k, **options}
    with LLM(str(target), draft=None if draft is None else str(draft), **settings) as llm:
        policy = llm.engine.loop.policy
        trace = record(llm, PROMPTS, PARAMS)
        assert llm.engine.loop.policy is policy, "the engine is left as it was"
        texts = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    return trace, texts


@pytest.mark.parametrize("eviction", ["lru", "draft-informed", "lfu"])
def test_on_demand_a_replay_loads_what_the_engine_loaded(mixtral_pair: Pair, home: None, eviction: str) -> None:
    """No time is involved in what is loaded on demand, so nothing may differ, expert for expert."""
    options = {"prefetch": "on-demand", "eviction": eviction, "expert_memory": "75%"}
    trace, _ = recorded(mixtral_pair.target, mixtral_pair.good, **options)
    live = trace.about["ledger"]
    replayer = Replayer(with_link(trace))
    run = replayer.start(Setting("on-demand", eviction))
    for number, step in enumerate(run.plan):
        run.step(number, step)
    ours = run.sim.counters
    assert (ours.demand_loads, ours.hits) == (live["demand_loads"], live["hits"])
    assert min(ours.demand_loads, ours.hits) > 5
    decoded = replayer.run(Setting("on-demand", eviction))
    assert decoded.counters.demand_loads == trace.about["live"]["demand_loads"]
    assert (decoded.steps, decoded.tokens) == (trace.about["live"]["steps"], trace.about["live"]["tokens"])


def with_link(trace: Trace) -> Trace:
    """On demand no profile is made, so the trace does not say how fast the link was."""
    assert trace.shape.link_bytes_per_second == 0
    return replace(trace, shape=replace(trace.shape, link_bytes_per_second=1e9))


def test_what_is_recorded_is_what_ran(qwen_pair: Pair, home: None) -> None:
    trace, texts = recorded(qwen_pair.target, qwen_pair.good, prefetch="draft-gate", cutoff="all")
    live = trace.about["ledger"]
    assert live["drafted"] == trace.step_drafted.sum()
    assert live["accepted"] == trace.step_accepted.sum()
    assert live["tokens"] == (trace.step_accepted + 1).sum() == sum(len(text) for text in texts)
    assert trace.step_request.tolist() == sorted(trace.step_request.tolist())
    assert set(trace.step_request) == {0, 1}
    first = np.flatnonzero(np.diff(trace.step_request, prepend=-1))
    assert (trace.step_drafted[first] == 0).all(), "a prompt is read without a draft"
    later = trace.step_drafted > 0
    forwards = np.repeat(np.arange(len(trace)), trace.step_forwards)
    assert (trace.forward_rows[later[forwards]] == trace.step_drafted[later] + 1).all()
    chunks = np.split(np.arange(len(trace.slab_pass)), np.cumsum(trace.step_slabs)[:-1])
    for step in np.flatnonzero(later):
        passes, rows = trace.slab_pass[chunks[step]], trace.slab_rows[chunks[step]]
        assert set(passes) == set(range(trace.step_drafted[step])), "one pass for each draft token"
        whole = later[step - 1] and trace.step_accepted[step - 1] == trace.step_drafted[step - 1]
        assert set(rows[passes == 0]) == {2 if whole else 1}, "the draft has not read the last of what it proposed"
        assert (rows[passes > 0] == 1).all()
    asked = sum(len(np.unique(step[:, layer])) for step in rows_of(trace) for layer in range(trace.shape.layers))
    assert asked == live["hits"] + live["late"] + live["demand_loads"]
    assert (trace.chosen >= 0).all()
    assert np.allclose(trace.foretold_score.astype(float).sum(axis=-1), 1, atol=2e-3)
    for depth in range(min(AHEAD, trace.shape.layers - 1)):
        assert (trace.ahead[depth][:, depth + 1 :] >= 0).all(), "every layer was foretold by the ones before"
    assert (trace.forward_front.sum() + trace.forward_experts.sum()) > 0


def test_a_perfect_draft_foretells_what_is_chosen(qwen_pair: Pair, home: None) -> None:
    """The target drafts for itself, nearly unrounded: its own routers choose nearly what they will choose."""
    trace, _ = recorded(qwen_pair.target, Path("self:int8"), prefetch="draft-gate", cutoff="all")
    width = max(trace.shape.experts)
    steps = [
        (step, rows) for step, rows in zip(Replayer(trace).steps(3), rows_of(trace), strict=True) if step.drafted == 3
    ]
    assert steps
    for step, rows in steps:
        named = {key for chunk in step.chunks for _, _, key in chunk.prefetches.by_rank}
        seen = rows[:-1] + np.arange(trace.shape.layers)[:, None] * width  # no pass has seen the last draft token
        needed = set(seen.ravel().tolist())
        assert len(named & needed) >= 0.9 * len(needed)


def rows_of(trace: Trace) -> list[np.ndarray]:
    """The choices of each forward."""
    return np.split(trace.chosen, np.cumsum(trace.forward_rows)[:-1])
