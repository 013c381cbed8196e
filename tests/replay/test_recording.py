"""Traces of a real engine: recorded values, and replays that load exactly what the engine loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.replay.record import AHEAD, record
from spmoe.replay.replay import ReplayConfig, Replayer
from spmoe.replay.trace import Trace

PROMPTS = ["def add(a, b):", "one two three four five six"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache directory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMOE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def recorded(target: Path, draft: Path | None, **options: object) -> tuple[Trace, list[list[int]]]:
    """Return a trace, and the token ids generated with the same engine."""
    k = 3 if draft is not None else 0
    settings = {"device": "cpu", "dtype": "float32", "progress": False, "num_speculative_tokens": k, **options}
    with LLM(str(target), draft=None if draft is None else str(draft), **settings) as llm:
        policy = llm.engine.loop.policy
        trace = record(llm, PROMPTS, PARAMS)
        assert llm.engine.loop.policy is policy, "the engine has its own policy back"
        texts = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    return trace, texts


@pytest.mark.parametrize("eviction", ["lru", "draft-informed", "lfu"])
def test_on_demand_replay_loads_the_same_experts_as_the_engine(mixtral_pair: Pair, home: None, eviction: str) -> None:
    """On-demand loads do not depend on time, so counts must be equal."""
    options = {"prefetch": "on-demand", "eviction": eviction, "expert_memory": "75%"}
    trace, _ = recorded(mixtral_pair.target, mixtral_pair.good, **options)
    live = trace.about["ledger"]
    replayer = Replayer(with_link(trace))
    run = replayer.start(ReplayConfig("on-demand", eviction))
    for number, step in enumerate(run.plan):
        run.step(number, step)
    ours = run.engine.counters
    assert (ours.demand_loads, ours.hits) == (live["demand_loads"], live["hits"])
    assert min(ours.demand_loads, ours.hits) > 5
    decoded = replayer.run(ReplayConfig("on-demand", eviction))
    assert decoded.counters.demand_loads == trace.about["live"]["demand_loads"]
    assert (decoded.steps, decoded.tokens) == (trace.about["live"]["steps"], trace.about["live"]["tokens"])


def with_link(trace: Trace) -> Trace:
    """Return the trace with a link speed, which is not measured without prefetching."""
    assert trace.shape.link_bytes_per_second == 0
    return replace(trace, shape=replace(trace.shape, link_bytes_per_second=1e9))


def test_recorded_arrays_match_the_run(qwen_pair: Pair, home: None) -> None:
    trace, texts = recorded(qwen_pair.target, qwen_pair.good, prefetch="draft-gate", cutoff="all")
    live = trace.about["ledger"]
    assert live["drafted"] == trace.step_drafted.sum()
    assert live["accepted"] == trace.step_accepted.sum()
    assert live["tokens"] == (trace.step_accepted + 1).sum() == sum(len(text) for text in texts)
    assert trace.step_sequence.tolist() == sorted(trace.step_sequence.tolist())
    assert set(trace.step_sequence) == {0, 1}
    first = np.flatnonzero(np.diff(trace.step_sequence, prepend=-1))
    assert (trace.step_drafted[first] == 0).all(), "a prompt is read without a draft"
    later = trace.step_drafted > 0
    forwards = np.repeat(np.arange(len(trace)), trace.step_forwards)
    assert (trace.forward_rows[later[forwards]] == trace.step_drafted[later] + 1).all()
    chunks = np.split(np.arange(len(trace.chunk_pass)), np.cumsum(trace.step_chunks)[:-1])
    for step in np.flatnonzero(later):
        passes, rows = trace.chunk_pass[chunks[step]], trace.chunk_rows[chunks[step]]
        assert set(passes) == set(range(trace.step_drafted[step])), "one pass for each draft token"
        whole = later[step - 1] and trace.step_accepted[step - 1] == trace.step_drafted[step - 1]
        assert set(rows[passes == 0]) == {2 if whole else 1}, "the draft has not yet read its last proposal"
        assert (rows[passes > 0] == 1).all()
    asked = sum(len(np.unique(step[:, layer])) for step in rows_of(trace) for layer in range(trace.shape.layers))
    assert asked == live["hits"] + live["late"] + live["demand_loads"]
    assert (trace.routed >= 0).all()
    assert np.allclose(trace.predicted_score.astype(float).sum(axis=-1), 1, atol=2e-3)
    for depth in range(min(AHEAD, trace.shape.layers - 1)):
        assert (trace.ahead[depth][:, depth + 1 :] >= 0).all(), "every layer was predicted by the layers before"
    assert (trace.forward_front.sum() + trace.forward_experts.sum()) > 0


def test_nearly_unrounded_self_draft_predicts_nearly_all_routed_experts(qwen_pair: Pair, home: None) -> None:
    """The target drafts for itself in int8, so its routers select nearly the same experts."""
    trace, _ = recorded(qwen_pair.target, Path("self:int8"), prefetch="draft-gate", cutoff="all")
    layers = range(trace.shape.layers)
    steps = [
        (step, rows) for step, rows in zip(Replayer(trace).steps(3), rows_of(trace), strict=True) if step.drafted == 3
    ]
    assert steps
    for step, rows in steps:
        predicted = {
            (layer, expert)
            for chunk in step.chunks
            for layer, experts in zip(chunk.prediction.layers, chunk.prediction.routing.experts.tolist(), strict=True)
            for expert in np.ravel(experts).tolist()
        }
        # no pass has read the last draft token
        needed = {(layer, expert) for layer in layers for expert in rows[:-1, layer].ravel().tolist()}
        assert len(predicted & needed) >= 0.9 * len(needed)


def rows_of(trace: Trace) -> list[np.ndarray]:
    """Return the routed experts of each forward."""  # each: [rows, layers, top_k]
    return np.split(trace.routed, np.cumsum(trace.forward_rows)[:-1])
