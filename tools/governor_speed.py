"""Measure `-k auto` against fixed values of K on this machine, in one engine: milliseconds per token of each request.

    python tools/governor_speed.py extras/diverse --draft src/spmoe/pair/draft --shape deepseek-v2-lite --device cuda

The governor is new. It runs first, then every fixed K, then the governor again, on the same prompts. Before the first
request, one request runs with K=0 and the forwards of all K are captured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

from spmoe import LLM, SamplingParams
from spmoe.errors import SpmoeError
from spmoe.models.shipped import sample_text

PROMPT_TOKENS = 64


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
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=2)
    options = parser.parse_args()
    try:
        for share in options.expert_memory.split(","):
            print(json.dumps(measure(options, share)), flush=True)
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def measure(options: argparse.Namespace, share: str) -> dict[str, object]:
    """Run all requests with this share of slots."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["SPMOE_HOME"] = home  # nothing is known of earlier runs
        with LLM(
            options.model,
            options.draft,
            num_speculative_tokens="auto",
            expert_memory=share,
            shape=options.shape,
            device=options.device,
            dtype=options.dtype,
            progress=False,
        ) as llm:
            return _run_all(llm, options, share)


def _run_all(llm: LLM, options: argparse.Namespace, share: str) -> dict[str, object]:
    ids = llm.get_tokenizer()(sample_text())["input_ids"]
    step = len(ids) // (options.prompts + 1)
    prompts = [ids[number * step :][:PROMPT_TOKENS] for number in range(options.prompts)]
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=0.0)

    def run(k: int | str, chosen: list[list[int]] = prompts) -> list[float]:
        llm._thread.call(lambda: llm.engine.reconfigure(num_speculative_tokens=k))
        stats = [llm.generate([prompt], params)[0].stats for prompt in chosen]
        return [round(1e3 * one.decode_seconds / (options.tokens - 1), 3) for one in stats]

    run(0, prompts[-1:])
    run("auto", [])
    llm._thread.call(llm.engine.loop.prepare)
    found = {"auto": run("auto")}
    found |= {k: run(int(k)) for k in options.k.split(",")}
    return {"model": options.model, "expert_memory": share, "ms_per_token": found | {"auto, again": run("auto")}}


if __name__ == "__main__":
    main()
