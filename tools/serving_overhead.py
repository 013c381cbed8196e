"""Measure what the server adds to the engine's times: one stream at a time, from Python and through HTTP, in turns.

    python tools/serving_overhead.py --tokens 64 --rounds 20
    python tools/serving_overhead.py MODEL --draft DRAFT --device cuda --dtype bfloat16

Engine and server are in this process, as in `spmoe serve`; the HTTP client is in another one. Both read the same
prompts, without reuse of KV caches. The medians of all rounds are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

from spmoe import LLM, AsyncLLM, SamplingParams
from spmoe.errors import SpmoeError
from spmoe.models.shipped import sample_text
from spmoe.serve.address import bind
from spmoe.serve.app import make_app
from spmoe.serve.config import ServeConfig
from spmoe.serve.server import Server

PROMPT_TOKENS = 64


def main() -> None:
    """Read the options, then print the times of engine and server, and their differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--expert-memory", default="50%")
    parser.add_argument("-k", type=int, default=0, help="draft tokens, fixed so that both do the same steps")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    try:
        run(options)
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run(options: argparse.Namespace) -> None:
    """Measure the engine and a server over it, and print the medians."""
    with AsyncLLM(
        options.model,
        options.draft if options.k else None,
        num_speculative_tokens=options.k,
        device=options.device,
        dtype=options.dtype,
        expert_memory=options.expert_memory,
        enable_prefix_caching=False,
        progress=False,
    ) as llm:
        config = ServeConfig(port=0, shutdown_timeout=5.0)
        bound = bind(config)
        server = Server(make_app(llm, config), config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        client = subprocess.Popen(
            [sys.executable, "-c", "from serving_overhead import run_client; run_client()"],
            cwd=sys.path[0], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            while not server.started:
                time.sleep(0.01)
            report(measure(llm.llm, client, bound.getsockname()[1], options.tokens, options.rounds))
        finally:
            client.kill()
            server.stop()
            thread.join()
            bound.close()


def measure(
    llm: LLM, client: subprocess.Popen[str], port: int, tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return TTFT and TPOT, in seconds, of each round after the first; the one that starts alternates."""
    assert client.stdin is not None
    assert client.stdout is not None
    ids = llm.get_tokenizer()(sample_text())["input_ids"]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    found: dict[str, list[tuple[float, float]]] = {"engine": [], "server": []}
    for turn in range(rounds + 1):
        start = turn * PROMPT_TOKENS % (len(ids) - PROMPT_TOKENS)
        prompt = ids[start : start + PROMPT_TOKENS]
        for name in sorted(found, reverse=bool(turn % 2)):
            if name == "engine":
                began = time.perf_counter()
                times = times_of(began, llm.stream(prompt, params), tokens)
            else:
                body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
                print(json.dumps([port, body]), file=client.stdin, flush=True)
                ttft, tpot = json.loads(client.stdout.readline())
                times = ttft, tpot
            if turn:
                found[name].append(times)
    return found


def times_of(began: float, pieces: Iterable[object], tokens: int) -> tuple[float, float]:
    """Return TTFT and TPOT of a stream of pieces."""
    first = None
    for _ in pieces:
        first = time.perf_counter() if first is None else first
    assert first is not None
    return first - began, (time.perf_counter() - first) / (tokens - 1)


def run_client() -> None:
    """Send each request that standard input has, as a port and a body; print its TTFT and TPOT."""
    connection: http.client.HTTPConnection | None = None
    for line in sys.stdin:
        port, body = json.loads(line)
        connection = connection or http.client.HTTPConnection("127.0.0.1", port)
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        events = (event for event in answer if event.startswith(b"data: {"))
        print(json.dumps(times_of(began, events, body["max_tokens"])), flush=True)


def report(found: dict[str, list[tuple[float, float]]]) -> None:
    """Print the medians, and the medians of the rounds' differences."""
    print(f"{'':>8} {'TTFT ms':>8} {'TPOT ms':>8}")
    medians = {}
    for name, times in found.items():
        medians[name] = [1000 * statistics.median(values) for values in zip(*times, strict=True)]
        print(f"{name:>8} {medians[name][0]:8.2f} {medians[name][1]:8.3f}")
    pairs = [*zip(found["server"], found["engine"], strict=True)]
    ttft, tpot = (1000 * statistics.median(one[i] - other[i] for one, other in pairs) for i in range(2))
    print(f"{'added':>8} {ttft:8.2f} {tpot:8.3f}  ({tpot / medians['engine'][1]:+.1%} per token)")


if __name__ == "__main__":
    main()
