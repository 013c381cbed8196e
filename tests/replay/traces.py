"""Synthetic traces for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

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
    """Return a trace of two sequences, each with a prompt: skewed routing, and predictions that are often right."""
    rng = np.random.default_rng(seed)
    rows, passes = [], []
    for step in range(steps):
        first = step % (steps // 2) == 0
        rows.append(prompt if first else k + 1)
        passes.append([prompt] if first else [1] * k)
    preference = rng.dirichlet(np.full(experts, 0.7), size=layers)

    def draw(count: int) -> np.ndarray:
        noise = rng.gumbel(size=(count, layers, experts))
        return np.argsort(-(np.log(preference + 1e-9) + noise), axis=-1)[..., :top_k].astype(np.int16)

    def blur(truth: np.ndarray) -> np.ndarray:
        wrong = rng.random(truth.shape[:-1]) > accuracy
        return np.where(wrong[..., None], draw(len(truth)), truth)

    def scores(shape: tuple[int, ...]) -> np.ndarray:
        raw = rng.random(shape) + 0.05
        return (raw / raw.sum(axis=-1, keepdims=True)).astype(np.float16)

    routed = draw(sum(rows))
    starts = np.concatenate(([0], np.cumsum(rows)))
    chunk_pass, chunk_layers, chunk_rows, predicted = [], [], [], []
    half = layers // 2
    step_chunks = []
    for step in range(steps):
        guessed, count, done = blur(routed[starts[step] : starts[step + 1]]), 0, 0
        for number, size in enumerate(passes[step]):
            part, done = guessed[done : done + size], done + size  # [rows, layers, top_k]
            for low, high in ((0, half), (half, layers)) if number == 0 else ((0, layers),):
                chunk_pass.append(number)
                chunk_layers.append((low, high))
                chunk_rows.append(size)
                predicted.append(part[:, low:high].transpose(1, 0, 2).reshape(-1, top_k))
                count += 1
        step_chunks.append(count)
    drafted = np.array([0 if step % (steps // 2) == 0 else k for step in range(steps)])
    flat = np.concatenate(predicted)
    ahead = np.stack([blur(routed) for _ in range(3)])
    for depth in range(3):
        ahead[depth, :, : depth + 1] = -1
    shape = Shape((experts,) * layers, top_k, EXPERT_BYTES, layers, k, 2, None, 2, layers * experts // 2, LINK)
    return Trace(
        shape,
        {},
        np.repeat([0, 1], steps // 2).astype(np.int32),
        drafted.astype(np.int16),
        np.minimum(drafted, rng.integers(0, k + 1, steps)).astype(np.int16),
        np.array(step_chunks, dtype=np.int16),
        np.ones(steps, dtype=np.int16),
        rng.random(steps).astype(np.float32) * 1e-3,
        np.array(chunk_pass, dtype=np.int16),
        np.array(chunk_layers, dtype=np.int16),
        (rng.random(len(chunk_pass)) * 2e-3).astype(np.float32),
        np.array(chunk_rows, dtype=np.int32),
        flat,
        scores(flat.shape),
        np.array(rows, dtype=np.int32),
        (rng.random((steps, layers)) * 1e-3).astype(np.float32),
        (rng.random((steps, layers)) * 2e-3).astype(np.float32),
        routed,
        scores(routed.shape),
        ahead,
        scores(ahead.shape),
    )


def with_further_passes(trace: Trace) -> Trace:
    """Return the trace with one more pass after each draft, as older traces have, with other predictions."""
    layers, top_k = trace.shape.layers, trace.shape.top_k
    at = np.cumsum(trace.step_chunks)[trace.step_drafted > 0]  # end of the chunks of each step with a draft
    sizes = trace.chunk_rows * (trace.chunk_layers[:, 1] - trace.chunk_layers[:, 0])
    rows = np.concatenate(([0], np.cumsum(sizes)))[at].repeat(layers)
    other = np.arange(top_k, dtype=np.int16)
    return replace(
        trace,
        step_chunks=trace.step_chunks + (trace.step_drafted > 0).astype(np.int16),
        chunk_pass=np.insert(trace.chunk_pass, at, trace.step_drafted[trace.step_drafted > 0]),
        chunk_layers=np.insert(trace.chunk_layers, at, (0, layers), axis=0),
        chunk_seconds=np.insert(trace.chunk_seconds, at, np.float32(0.5)),
        chunk_rows=np.insert(trace.chunk_rows, at, 1),
        predicted=np.insert(trace.predicted, rows, other, axis=0),
        predicted_score=np.insert(trace.predicted_score, rows, np.float16(1.0), axis=0),
    )


def on_link(trace: Trace, **changes: object) -> Trace:
    """Return the trace with other values in its shape."""
    return replace(trace, shape=replace(trace.shape, **changes))
