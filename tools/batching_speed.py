"""Measure requests that run at the same time on this machine: total tokens per second, and what one request sees.

    python tools/batching_speed.py --link-gbps 0.2 --requests 1,2,4,8
    python tools/batching_speed.py extras/fine --draft src/spmoe/pair/draft --shape deepseek-v2-lite --device cuda

Each round runs every number of requests once, in turns, with other prompts. `speed-up` is the total speed relative to
one request; `MB/token` are bytes of experts that were moved. Prompts share no prefix, and no KV cache is reused.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import NamedTuple

from engines import EngineSequence

from spmoe import LLM, SamplingParams
from spmoe.errors import SpmoeError
from spmoe.models.shipped import sample_text

PROMPT_TOKENS = 64
WARMUP_TOKENS = 8


class Round(NamedTuple):
    """One number of requests, run once."""

    tokens_per_second: float
    tpot: float  # seconds, mean of the requests
    ttft: float  # seconds, mean of the requests
    bytes_per_token: float


def main() -> None:
    """Read the options, then print one line per number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--shape", help="sizes to widen the model to; CUDA only")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--expert-memory", default="25%", help="slots, as shares of all experts")
    parser.add_argument("--link-gbps", type=float)
    parser.add_argument("-k", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", default="1,2,4,8")
    options = parser.parse_args()
    numbers = [int(number) for number in options.requests.split(",")]
    try:
        with EngineSequence() as engines:
            for memory in options.expert_memory.split(","):
                print(f"{memory} of slots")
                with engines.build(
                    options.model,
                    options.draft,
                    num_speculative_tokens=options.k if options.k == "auto" else int(options.k),
                    expert_memory=memory,
                    shape=options.shape,
                    device=options.device,
                    dtype=options.dtype,
                    link_gbps=options.link_gbps,
                    max_num_seqs=max(numbers),
                    enable_prefix_caching=False,
                    progress=False,
                ) as llm:
                    report(measure(llm, numbers, options.tokens, options.rounds))
                    for notice in llm.notices:
                        print(f"note: {notice}", file=sys.stderr)
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def measure(llm: LLM, numbers: list[int], tokens: int, rounds: int) -> dict[int, list[Round]]:
    """Run all rounds, after a short one that does not count."""
    ids = llm.get_tokenizer()(sample_text())["input_ids"]
    found: dict[int, list[Round]] = {number: [] for number in numbers}
    start = 0
    for turn in range(rounds + 1):
        params = SamplingParams(max_tokens=tokens if turn else min(WARMUP_TOKENS, tokens), ignore_eos=True)
        for number in numbers:
            prompts = []
            for _ in range(number):
                prompts.append(ids[start : start + PROMPT_TOKENS])
                start = (start + PROMPT_TOKENS) % (len(ids) - PROMPT_TOKENS)
            before, began = llm.engine.counters, time.perf_counter()
            results = llm.generate(prompts, params)
            seconds, moved = time.perf_counter() - began, llm.engine.counters.minus(before)
            if turn:
                nbytes = moved.demand_bytes + moved.issued_bytes
                stats = [result.stats for result in results]
                found[number].append(
                    Round(
                        number * tokens / seconds,
                        statistics.mean(one.tpot_seconds or 0.0 for one in stats),
                        statistics.mean(one.ttft_seconds for one in stats),
                        nbytes / (number * tokens),
                    )
                )
                print(f"round {turn}, {number} requests: {found[number][-1]}", file=sys.stderr, flush=True)
    return found


def report(found: dict[int, list[Round]]) -> None:
    """Print the medians, and the spread of the total speed."""
    names = f"{'requests':>8} {'tokens/s':>9} {'(least to most)':>18} {'speed-up':>8} {'TPOT ms':>8} {'TTFT ms':>8}"
    print(f"{names}  MB/token", flush=True)
    first = statistics.median(one.tokens_per_second for one in next(iter(found.values())))
    for number, rounds in found.items():
        speeds = [one.tokens_per_second for one in rounds]
        tpot, ttft, nbytes = (statistics.median(values) for values in list(zip(*rounds, strict=True))[1:])
        median, spread = statistics.median(speeds), f"({min(speeds):.1f} to {max(speeds):.1f})"
        print(
            f"{number:8} {median:9.1f} {spread:>18} {median / first:8.2f} {1e3 * tpot:8.1f} {1e3 * ttft:8.0f} "
            f"{nbytes / 1e6:9.2f}"
        )


if __name__ == "__main__":
    main()
