"""Measure `-k auto` against fixed values of K on this machine, in turns in one engine: milliseconds per token.

    python tools/governor_speed.py extras/diverse --draft src/spmoe/pair/draft --shape deepseek-v2-lite --device cuda

Every prompt is decoded with every K before the next one. Each K has its own slots, eviction policy and learned state,
all of them new at the first prompt. `--off 1,4` adds these values of K without prefetching. JSON, one object per share
of slots; `of best` and `of plain` are speeds relative to the fastest fixed K, and to K=0: of the first prompt, and of
the others together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from typing import Any

from engines import EngineSequence

from spmoe import LLM, SamplingParams
from spmoe.config import ONE_BY_ONE
from spmoe.engine.outputs import RequestOutput
from spmoe.engine.parts import LearnedState
from spmoe.errors import SpmoeError
from spmoe.models.shipped import sample_text

PROMPT_TOKENS = 64
WARMUP_TOKENS = 32


def main() -> None:
    """Read the options, then print one JSON object per share of slots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--shape", help="sizes to widen the model to; CUDA only")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--expert-memory", default="25%,50%,90%", help="slots, as shares of all experts")
    parser.add_argument("-k", default="0,1,2,4,8,12", help="fixed values of K")
    parser.add_argument("--off", default="", help="values of K that also run without prefetching")
    parser.add_argument("--prefetch", default="auto")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=2)
    options = parser.parse_args()
    try:
        with EngineSequence() as engines:
            for share in options.expert_memory.split(","):
                print(json.dumps(measure(engines, options, share)), flush=True)
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def measure(engines: EngineSequence, options: argparse.Namespace, share: str) -> dict[str, object]:
    """Run all requests with this share of slots."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["SPMOE_HOME"] = home  # nothing is known of earlier runs
        with engines.build(
            options.model,
            options.draft,
            num_speculative_tokens="auto",
            expert_memory=share,
            shape=options.shape,
            device=options.device,
            dtype=options.dtype,
            progress=False,
            **ONE_BY_ONE,
        ) as llm:
            return _run_all(llm, options, share)


def _run_all(llm: LLM, options: argparse.Namespace, share: str) -> dict[str, object]:
    ids = llm.get_tokenizer()(sample_text())["input_ids"]
    step = len(ids) // (options.prompts + 1)
    prompts = [ids[number * step :][:PROMPT_TOKENS] for number in range(options.prompts + 1)]
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=0.0)
    fixed = [int(k) for k in options.k.split(",")]
    configs: dict[str, dict[str, Any]] = {str(k): {"num_speculative_tokens": k} for k in fixed}
    configs |= {f"{k} off": {"num_speculative_tokens": int(k), "prefetch": "on-demand"} for k in _parts(options.off)}
    configs["auto"] = {"num_speculative_tokens": "auto"}
    configs = {name: {"prefetch": options.prefetch, **config} for name, config in configs.items()}
    states = {name: LearnedState() for name in configs}
    found: dict[str, list[float]] = {name: [] for name in configs}
    chosen: list[str] = []

    def run(name: str, prompt: list[int], state: LearnedState, tokens: int = options.tokens) -> RequestOutput:
        llm._thread.call(lambda: llm.engine.reconfigure(learned=state, **configs[name]))
        llm._thread.call(llm.engine.loop.prepare)
        return llm.generate([prompt], replace(params, max_tokens=tokens))[0]

    for name in configs:  # so that nothing is captured later
        run(name, prompts[-1], LearnedState(), min(WARMUP_TOKENS, options.tokens))
    for number, prompt in enumerate(prompts[:-1]):
        first = (3 * number + len(configs) // 2) % len(configs)  # so that no configuration is always the first
        for name in [*list(configs)[first:], *list(configs)[:first]]:
            stats = run(name, prompt, states[name]).stats
            found[name].append(1e3 * stats.decode_seconds / (options.tokens - 1))
            if stats.speculation is not None:
                chosen.append(stats.speculation.summary() or "")
    return {
        "model": options.model,
        "shape": options.shape,
        "expert_memory": share,
        "ms_per_token": {name: [round(one, 3) for one in times] for name, times in found.items()},
        "speculation": chosen,
        **{
            f"{part} request": _ratios(found, fixed, requests)
            for part, requests in (("first", slice(0, 1)), ("later", slice(1, None)))
            if options.prompts > 1 or part == "first"
        },
    }


def _ratios(found: dict[str, list[float]], fixed: list[int], requests: slice) -> dict[str, object]:
    """Return the speed of `auto` against fixed K, and of prefetching against none at the same K."""
    total = {name: sum(times[requests]) for name, times in found.items()}
    best = min((str(k) for k in fixed), key=lambda name: total[name])
    result: dict[str, object] = {"best": best, "of best": round(total[best] / total["auto"], 3)}
    if "0" in total:
        result["of plain"] = round(total["0"] / total["auto"], 3)
    on = {name: name.removesuffix(" off") for name in total if name.endswith(" off")}
    return result | {f"prefetching at K={k}": round(total[off] / total[k], 3) for off, k in on.items()}


def _parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


if __name__ == "__main__":
    main()
