"""Traces made up for tests, and the live classes run on one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from spmoe.experts.eviction import make_eviction
from spmoe.experts.link import VirtualTransfer
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.replay.steps import Prediction, StepPlan
from spmoe.replay.trace import Shape, Trace

LINK = 1e9
EXPERT_BYTES = 10**6  # a millisecond each


def make_trace(
    layers: int = 6,
    experts: int = 8,
    top_k: int = 2,
    k: int = 4,
    steps: int = 24,
    seed: int = 0,
    accuracy: float = 0.85,
    prompt: int = 9,
) -> Trace:
    """Two requests, each with a prompt first; routing with habits, and predictions that are often right."""
    rng = np.random.default_rng(seed)
    rows, passes = [], []
    for step in range(steps):
        first = step % (steps // 2) == 0
        rows.append(prompt if first else k + 1)
        passes.append([prompt] if first else [1] * k)
    taste = rng.dirichlet(np.full(experts, 0.7), size=layers)

    def draw(count: int) -> np.ndarray:
        noise = rng.gumbel(size=(count, layers, experts))
        return np.argsort(-(np.log(taste + 1e-9) + noise), axis=-1)[..., :top_k].astype(np.int16)

    def blur(truth: np.ndarray) -> np.ndarray:
        wrong = rng.random(truth.shape[:-1]) > accuracy
        return np.where(wrong[..., None], draw(len(truth)), truth)

    def scores(shape: tuple[int, ...]) -> np.ndarray:
        raw = rng.random(shape) + 0.05
        return (raw / raw.sum(axis=-1, keepdims=True)).astype(np.float16)

    chosen = draw(sum(rows))
    starts = np.concatenate(([0], np.cumsum(rows)))
    slab_pass, slab_layers, slab_rows, foretold = [], [], [], []
    half = layers // 2
    step_slabs = []
    for step in range(steps):
        told, count, seen = blur(chosen[starts[step] : starts[step + 1]]), 0, 0
        for number, size in enumerate(passes[step]):
            part, seen = told[seen : seen + size], seen + size  # [rows, layers, top_k]
            for low, high in ((0, half), (half, layers)) if number == 0 else ((0, layers),):
                slab_pass.append(number)
                slab_layers.append((low, high))
                slab_rows.append(size)
                foretold.append(part[:, low:high].transpose(1, 0, 2).reshape(-1, top_k))
                count += 1
        step_slabs.append(count)
    drafted = np.array([0 if step % (steps // 2) == 0 else k for step in range(steps)])
    flat = np.concatenate(foretold)
    ahead = np.stack([blur(chosen) for _ in range(3)])
    for depth in range(3):
        ahead[depth, :, : depth + 1] = -1
    shape = Shape((experts,) * layers, top_k, EXPERT_BYTES, layers, k, 2, None, 2, layers * experts // 2, LINK)
    return Trace(
        shape,
        {},
        np.repeat([0, 1], steps // 2).astype(np.int32),
        drafted.astype(np.int16),
        np.minimum(drafted, rng.integers(0, k + 1, steps)).astype(np.int16),
        np.array(step_slabs, dtype=np.int16),
        np.ones(steps, dtype=np.int16),
        rng.random(steps).astype(np.float32) * 1e-3,
        np.array(slab_pass, dtype=np.int16),
        np.array(slab_layers, dtype=np.int16),
        (rng.random(len(slab_pass)) * 2e-3).astype(np.float32),
        np.array(slab_rows, dtype=np.int32),
        flat,
        scores(flat.shape),
        np.array(rows, dtype=np.int32),
        (rng.random((steps, layers)) * 1e-3).astype(np.float32),
        (rng.random((steps, layers)) * 2e-3).astype(np.float32),
        chosen,
        scores(chosen.shape),
        ahead,
        scores(ahead.shape),
    )


def with_further_passes(trace: Trace) -> Trace:
    """As older traces are: each draft is followed by one pass more, which foretells what nobody else does."""
    layers, top_k = trace.shape.layers, trace.shape.top_k
    at = np.cumsum(trace.step_slabs)[trace.step_drafted > 0]  # where each such step's chunks end
    sizes = trace.slab_rows * (trace.slab_layers[:, 1] - trace.slab_layers[:, 0])
    rows = np.concatenate(([0], np.cumsum(sizes)))[at].repeat(layers)
    told = np.arange(top_k, dtype=np.int16)
    return replace(
        trace,
        step_slabs=trace.step_slabs + (trace.step_drafted > 0).astype(np.int16),
        slab_pass=np.insert(trace.slab_pass, at, trace.step_drafted[trace.step_drafted > 0]),
        slab_layers=np.insert(trace.slab_layers, at, (0, layers), axis=0),
        slab_seconds=np.insert(trace.slab_seconds, at, np.float32(0.5)),
        slab_rows=np.insert(trace.slab_rows, at, 1),
        foretold=np.insert(trace.foretold, rows, told, axis=0),
        foretold_score=np.insert(trace.foretold_score, rows, np.float16(1.0), axis=0),
    )


def on_link(trace: Trace, **changes: object) -> Trace:
    """The same trace, as if recorded on another machine."""
    return replace(trace, shape=replace(trace.shape, **changes))


class NoWeights:
    """Slots that hold nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        return {}

    def close(self) -> None:
        pass


def run_live(
    trace: Trace, steps: list[StepPlan], slots: int, eviction: str, *, draft: bool, ahead: bool, cutoff: int
) -> tuple[Counters, float]:
    """The live source, queue, cache and eviction on a virtual clock; the ledger counts experts for bytes."""
    clock, counters = VirtualClock(), Counters()
    width = max(trace.shape.experts)
    rate = trace.shape.link_bytes_per_second / trace.shape.expert_bytes  # experts per second
    transfer = VirtualTransfer(clock, 1, rate, depth=trace.shape.depth)
    rule = make_eviction(eviction, trace.shape.experts)
    source = ExpertSource(NoWeights(slots), transfer, rule, 1, clock, counters, threaded=False)
    source.grants.step_budget = slots
    clock.observer(transfer.link.next_event, source.pump)

    def prefetch(told: Prediction, below: int) -> None:
        source.prefetch(replace(told.prefetches, fetch=told.prefetches.layers < below))

    for step in steps:
        source.begin_step(step.request)
        for chunk in step.chunks:
            clock.sleep(chunk.seconds)
            if draft:
                prefetch(chunk.prefetches, cutoff)
        for forward in step.forwards:
            for layer, needed in enumerate(forward.needed):
                clock.sleep(forward.front[layer])
                if ahead and (told := forward.ahead[layer]) is not None:
                    sure = told.prefetches.scores >= (1 / trace.shape.top_k if draft else 0.0)
                    source.prefetch(told.prefetches.where(sure))
                for batch in source.use(layer, [key % width for key in needed], shares=forward.shares[layer]):
                    clock.sleep(forward.per_expert[layer] * len(batch.experts))
        clock.sleep(step.rest)
        source.end_step()
    seconds = clock.now()
    source.close()
    return counters, seconds
