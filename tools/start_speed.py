"""Measure what a new process pays: loading, warm-up, and its first requests compared with later ones.

    python tools/start_speed.py qwen3-30b-a3b --load-format dummy --expert-memory 25%
    python tools/start_speed.py qwen3-30b-a3b --write /tmp/checkpoint --expert-memory 25%

With `--write DIR`, a checkpoint of random bfloat16 weights is written there first, one tensor per expert and matrix as
Qwen3 and DeepSeek publish them, and loaded from there: from the page cache, if there is memory for it.

Prints the seconds in which the engine is built, what the log says of its parts, and TTFT and TPOT of each request. All
requests have different prompts of the same length. `to last` is relative to the last request.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmoe import LLM, SamplingParams
from spmoe.errors import SpmoeError
from spmoe.models.checkpoint import Checkpoint

SHARD_BYTES = 4 * 10**9
NOISE_VALUES = 2**24  # random weights that all tensors are cut from
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of fused experts, as stored

Tensors = dict[str, tuple[int, ...]]


def main() -> None:
    """Read the options, then build one engine and run the requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--expert-format", default="auto")
    parser.add_argument("--expert-memory", default="25%", help="a share of all experts, or a size")
    parser.add_argument("--residency-check", default="host")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--write", type=Path, metavar="DIR", help="a new directory")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4)
    options = parser.parse_args()
    try:
        if options.write is not None:
            started = time.perf_counter()
            size = write_checkpoint(options.model, options.write)
            print(f"wrote {size / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s", flush=True)
        run(options)
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run(options: argparse.Namespace) -> None:
    """Build an engine, run the requests, and print their times."""
    started = time.perf_counter()
    with (
        logged(),
        LLM(
            options.model if options.write is None else str(options.write),
            options.draft,
            num_speculative_tokens=0 if options.draft == "none" else "auto",
            device=options.device,
            dtype=options.dtype,
            load_format=options.load_format,
            expert_format=options.expert_format,
            expert_memory=options.expert_memory,
            residency_check=options.residency_check,
            enforce_eager=options.enforce_eager,
            enable_prefix_caching=False,
            progress=False,
        ) as llm,
    ):
        print(f"built the engine in {time.perf_counter() - started:.1f} s", flush=True)
        vocabulary, times = llm.engine.target.vocab_size, list[tuple[float, float]]()
        params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=0.0)
        for number in range(options.requests):
            prompt = [(7 + 13 * place + 101 * number) % min(vocabulary, 1000) for place in range(options.prompt_len)]
            stats = llm.generate([prompt], params)[0].stats
            times.append((stats.ttft_seconds, stats.tpot_seconds or 0.0))
    print("request  TTFT ms  to last  TPOT ms  to last")
    for number, (ttft, tpot) in enumerate(times, 1):
        last_ttft, last_tpot = times[-1]
        ratios = ttft / last_ttft, tpot / last_tpot if last_tpot else 1.0
        print(f"{number:7} {1e3 * ttft:8.1f} {ratios[0]:8.2f} {1e3 * tpot:8.2f} {ratios[1]:8.2f}")


@contextmanager
def logged() -> Iterator[None]:
    """Print what the engine logs while it is built."""
    log, handler = logging.getLogger("spmoe"), logging.StreamHandler(sys.stdout)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def write_checkpoint(model: str, place: Path) -> int:
    """Write a checkpoint of random weights for a configuration; return its bytes."""
    config = json.loads((Checkpoint.find(model, load_format="dummy").directory / "config.json").read_text())
    shards, end = [dict[str, tuple[int, ...]]()], 0
    for name, shape in stored_tensors(config).items():
        size = 2 * math.prod(shape)
        if end + size > SHARD_BYTES:
            shards.append({})
            end = 0
        shards[-1][name] = shape
        end += size
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    files = [place / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    index = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    noise = (torch.randn(NOISE_VALUES) * 0.02).bfloat16().view(torch.uint8).numpy()
    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(lambda one: write_shard(*one, memoryview(noise)), zip(files, shards, strict=True)))


def stored_tensors(config: dict[str, object]) -> Tensors:
    """Return names and shapes of a checkpoint's tensors, with one per expert and matrix."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        module, _, matrix = name.rpartition(".")
        if not module.endswith(".experts"):
            tensors[name] = tuple(tensor.shape)
            continue
        parts = MATRICES[matrix]
        count, outs, ins = tensor.shape
        for expert in range(count):
            for part in parts:
                tensors[f"{module}.{expert}.{part}.weight"] = (outs // len(parts), ins)
    return tensors


def write_shard(file: Path, tensors: Tensors, noise: memoryview) -> int:
    """Write a safetensors file of bfloat16 tensors, norms of ones and others of noise; return its bytes."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        for number, shape in enumerate(tensors.values()):
            left, place = 2 * math.prod(shape), 4096 * number % len(noise)
            if len(shape) == 1:
                output.write(struct.pack("<H", 0x3F80) * shape[0])
                continue
            while left:
                part = noise[place : place + left]
                output.write(part)
                left, place = left - len(part), 0
        return output.tell()


if __name__ == "__main__":
    main()
