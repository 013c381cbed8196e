"""Measure steps whose experts are all in slots, against the same steps with every expert resident, and one miss.

    python tools/hit_speed.py extras/fine --draft src/spmoe/pair/draft --shape deepseek-v2-lite
    python tools/hit_speed.py qwen3-30b-a3b --draft none --load-format dummy --expert-memory 25%,50%,90%

The target runs the same tokens again and again, so the experts that they need are in slots. `step` is the time of such
a step; `to resident` divides it by that with every expert resident; `host CPU` is the processor time of the process
per second; `misses` are the experts that a step had to load all the same, since its rows need more than there are slots
for. Without them, one expert of the middle layer is dropped before each step: `miss us` is what a step takes longer,
and `copy us` the part of it that the link needs for the expert. `TPOT ms` is that of a request of 64 tokens after an
equal one, with so many rows per step, and draft-gate prefetching if there is a draft; there, experts are missing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from engines import EngineSequence

from spmoe import LLM, SamplingParams
from spmoe.config import ONE_BY_ONE
from spmoe.errors import SpmoeError
from spmoe.models.kv import KvState
from spmoe.models.shipped import sample_text
from spmoe.types import ExpertKey, PrefetchRequests

POSITION = 64  # of the step's first token
TOKENS = 64  # of a request
CHECKS = ("host", "device")


class Speed(NamedTuple):
    """One number of rows on one engine."""

    step: float  # seconds
    cpu: float  # seconds of processor time per second
    misses: float  # experts that a step loads
    miss: float | None  # seconds that a step takes longer; None: there are misses, or no expert can be dropped
    copy: float | None  # seconds
    tpot: float = 0.0  # seconds per token of a request


def main() -> None:
    """Read the options, then print one line per engine and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--shape", help="sizes to widen the model to; CUDA only")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--expert-format", default="auto")
    parser.add_argument("--expert-memory", default="25%,50%,90%", help="slots, as shares of all experts")
    parser.add_argument("--residency-check", default=",".join(CHECKS))
    parser.add_argument("--rows", default="1,5", help="rows of a step: K + 1")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    rows = [int(number) for number in options.rows.split(",")]
    engines = [("100%", "host")]
    engines += [(memory, c) for memory in options.expert_memory.split(",") for c in options.residency_check.split(",")]
    head = f"{'slots':>6} {'check':>6} {'rows':>4} {'step ms':>8} {'to resident':>11} {'host CPU':>8} {'misses':>6}"
    print(f"{head}  miss us  copy us  TPOT ms")
    resident: dict[int, float] = {}
    try:
        with EngineSequence() as sequence:
            for memory, check in engines:
                with build(sequence, options, memory, check, max(rows)) as llm:
                    for notice in llm.notices:
                        print(f"note: {notice}", file=sys.stderr)
                    for count in rows:
                        speed = measure(llm, count, options.steps)._replace(tpot=decode(llm, count - 1))
                        resident.setdefault(count, speed.step)
                        report(memory, check, count, speed, resident[count])
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def build(
    sequence: EngineSequence, options: argparse.Namespace, memory: str, check: str, rows: int
) -> AbstractContextManager[LLM]:
    """Build an engine that captures forwards of up to so many rows."""
    return sequence.build(
        options.model,
        options.draft,
        num_speculative_tokens=rows - 1 if options.draft != "none" else 0,
        expert_memory=memory,
        shape=options.shape,
        device=options.device,
        dtype=options.dtype,
        load_format=options.load_format,
        expert_format=options.expert_format,
        residency_check=check,
        prefetch="on-demand",
        progress=False,
        **ONE_BY_ONE,
    )


def measure(llm: LLM, rows: int, steps: int) -> Speed:
    """Time steps of so many rows on the engine's thread."""
    return llm._thread.call(lambda: _measure(llm, rows, steps))


def _measure(llm: LLM, rows: int, steps: int) -> Speed:
    target, tokens = llm.engine.target, [7 + 3 * i for i in range(rows)]
    with target.temporary_kv(POSITION + 2 * rows) as kv:
        target.forward(list(range(POSITION)), kv, 1)
        for _ in range(10):
            step(llm, kv, tokens)
        ledger = llm.engine.experts.ledger
        before = time.process_time(), time.perf_counter(), ledger.snapshot().loads
        times = [step(llm, kv, tokens)[0] for _ in range(steps)]
        cpu, wall = time.process_time() - before[0], time.perf_counter() - before[1]
        usual, misses = statistics.median(times), (ledger.snapshot().loads - before[2]) / steps
        if llm.engine.parts.all_resident or misses:
            return Speed(usual, cpu / wall, misses, None, None)
        layers = step(llm, kv, tokens)[1]
        key = ExpertKey(len(layers) // 2, layers[len(layers) // 2][0])
        longer, copies = [], []
        for _ in range(steps):
            drop(llm, key)
            longer.append(step(llm, kv, tokens)[0] - usual)
        for _ in range(10):
            drop(llm, key)
            copies.append(timed(llm, lambda: list(llm.engine.experts.access.use(key.layer, [key.expert]))))
        return Speed(usual, cpu / wall, misses, statistics.median(longer), statistics.median(copies))


def decode(llm: LLM, k: int) -> float:
    """Return the seconds per token of a request with K draft tokens per step."""
    if k and not llm.engine.parts.drafter.proposes:
        return 0.0
    llm._thread.call(
        lambda: llm.engine.reconfigure(num_speculative_tokens=k, prefetch="draft-gate" if k else "on-demand")
    )
    llm._thread.call(llm.engine.loop.prepare)
    vocabulary = llm.engine.target.vocab_size
    prompt = [token % vocabulary for token in llm.get_tokenizer()(sample_text())["input_ids"][:POSITION]]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    return [llm.generate([prompt], params)[0].stats.tpot_seconds or 0.0 for _ in range(2)][-1]


def step(llm: LLM, kv: KvState, tokens: list[int]) -> tuple[float, list[list[int]]]:
    """Run tokens behind the same position; return the seconds, and the experts that each layer was routed to."""
    engine, found = llm.engine, list[list[int]]()

    def on_routed(layer: int, experts: object) -> PrefetchRequests:
        found.append(list(experts))  # type: ignore[call-overload]
        return PrefetchRequests.of([])

    kv.rewind(POSITION)
    engine.experts.step.begin(0, on_routed)
    seconds = timed(llm, lambda: engine.target.forward(tokens, kv, len(tokens)).argmax())
    engine.experts.step.end()
    engine.experts.step.finish_compute()
    return seconds, found


def timed(llm: LLM, work: Callable[[], object]) -> float:
    """Return the seconds of some work, from an idle device to an idle device."""
    synchronize = llm.engine.parts.runtime.backend.synchronize
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def drop(llm: LLM, key: ExpertKey) -> None:
    """Take an expert's slot away."""
    pool = llm.engine.experts.pool
    with pool._lock:
        pool.reap()
        pool._cache._remove(key)


def report(memory: str, check: str, rows: int, speed: Speed, resident: float) -> None:
    """Print one line."""
    miss, copy = (f"{1e6 * one:8.0f}" if one is not None else f"{'':8}" for one in (speed.miss, speed.copy))
    print(
        f"{memory:>6} {check:>6} {rows:4} {1e3 * speed.step:8.3f} {speed.step / resident:11.2f} {speed.cpu:8.2f} "
        f"{speed.misses:6.1f} {miss} {copy} {1e3 * speed.tpot:8.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
