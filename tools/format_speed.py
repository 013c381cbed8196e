"""Measure formats of experts on this machine, at the same share of slots or the same device memory: ms per token.

    python tools/format_speed.py mixtral-8x7b --load-format dummy --device cuda --expert-memory 25%
    python tools/format_speed.py qwen3-30b-a3b --load-format dummy --device cuda --expert-memory 8GiB,16GiB,24GiB

Each format and budget has an engine of its own, which decodes the same prompt plainly, after a short one that does not
count. The experts of a format are loaded for its first budget; they stay in host memory for the others, so only the
first `load` says how long loading takes. `host` is the memory of all experts there, `GPU` the most that was taken, and
`plan` what was planned for. `gain` is the speed relative to the first format at the same memory. MB per token, hits and
`link`, the share of the time in which the link is busy at the measured rate of pinned copies, are those of decoding,
without the prompt. `text` says whether all tokens are those of the first format.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import NamedTuple

import torch
from engines import EngineSequence

from spmoe import SamplingParams
from spmoe.backends.devices import link_bandwidth
from spmoe.config import ONE_BY_ONE
from spmoe.errors import SpmoeError

PROMPT = "The quick brown fox jumps over the lazy dog. "
WARMUP_TOKENS = 8


class Speed(NamedTuple):
    """One format with one budget."""

    load: float  # seconds to build the engine
    host: float  # GB
    device: float  # GB
    planned: float  # GB
    slots: int
    tpot: float  # seconds per token, median of the rounds
    ttft: float  # seconds
    nbytes: float  # moved per token
    hit_rate: float | None  # None: every expert is resident
    tokens: list[int]


def main() -> None:
    """Read the options, then print one line per budget and format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--shape", help="sizes to widen the model to; CUDA only")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--formats", default="bfloat16,bf16-packed,fp8-block128,int4-g128")
    parser.add_argument("--expert-memory", default="25%", help="shares of all experts, or sizes")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print(
        f"{'memory':>8} {'format':16} {'load s':>6} {'host GB':>7} {'GPU GB':>6} {'plan':>6} {'slots':>5} "
        f"{'TPOT ms':>8} {'gain':>5} {'TTFT ms':>8} {'MB/token':>8} {'hits':>5} {'link':>5}  text"
    )
    try:
        first: dict[str, Speed] = {}  # by budget
        with EngineSequence() as engines:
            for name in options.formats.split(","):
                engines.forget()
                for memory in options.expert_memory.split(","):
                    speed, link = measure(engines, options, memory, name)
                    report(memory, name, speed, first.setdefault(memory, speed), link)
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def measure(engines: EngineSequence, options: argparse.Namespace, memory: str, name: str) -> tuple[Speed, float | None]:
    """Build an engine and decode; also return bytes per second of the link, if there is a device."""
    started = time.perf_counter()
    with engines.build(
        options.model,
        options.draft,
        expert_memory=memory,
        shape=options.shape,
        device=options.device,
        dtype=options.dtype,
        load_format=options.load_format,
        expert_format=name,
        progress=False,
        **ONE_BY_ONE,
    ) as llm:
        load = time.perf_counter() - started
        ids = (llm.get_tokenizer()(PROMPT)["input_ids"] * options.prompt_len)[: options.prompt_len]
        stats, tokens, moved = [], list[int](), llm.engine.counters
        for turn in range(options.rounds + 1):
            count = options.tokens if turn else min(WARMUP_TOKENS, options.tokens)
            generation = llm.stream(ids, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0))
            next(iter(generation))
            before = llm.engine.counters
            result = generation.run()
            if turn:
                stats.append(result.stats)
                tokens = list(result.outputs[0].token_ids)
                moved = llm.engine.counters.minus(before)
        plan, cuda = llm.engine.parts.memory, llm.engine.device.type == "cuda"
        return Speed(
            load,
            llm.engine.spec.nbytes / 1e9,
            torch.cuda.max_memory_reserved() / 1e9 if cuda else 0.0,
            (plan.resident + plan.kv + plan.workspace + plan.slots * plan.slot_bytes) / 1e9,
            plan.slots,
            statistics.median(one.tpot_seconds or 0.0 for one in stats),
            statistics.median(one.ttft_seconds for one in stats),
            (moved.demand_bytes + moved.issued_bytes) / max(1, moved.tokens),
            moved.hit_rate,
            tokens,
        ), link_bandwidth(llm.engine.device) if cuda else None


def report(memory: str, name: str, speed: Speed, first: Speed, link: float | None) -> None:
    """Print one line."""
    busy = f"{speed.nbytes / link / speed.tpot:5.0%}" if link is not None else f"{'':5}"
    hits = "all" if speed.hit_rate is None else f"{speed.hit_rate:.0%}"
    print(
        f"{memory:>8} {name:16} {speed.load:6.1f} {speed.host:7.2f} {speed.device:6.2f} {speed.planned:6.2f} "
        f"{speed.slots:5} {1e3 * speed.tpot:8.2f} "
        f"{first.tpot / speed.tpot:5.2f} {1e3 * speed.ttft:8.0f} {speed.nbytes / 1e6:8.1f} {hits:>5} "
        f"{busy}  {'equal' if speed.tokens == first.tokens else 'differs'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
