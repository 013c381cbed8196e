"""Measure the kernels of experts on this machine's GPU: one layer's active experts, in every format.

    python tools/kernel_speed.py
    python tools/kernel_speed.py --models mixtral-8x7b --formats int4-g128,mxfp4 --rows 1,5 --sweep

Prints, per model and format, microseconds per layer, bytes of the active experts per second, and the share of the
device's bandwidth, which a large copy measures. Every layer has experts of its own, so that caches hold none of them.
With --sweep, other tiles are tried too, and the fastest ones are printed: up to 24 variants, which take about a second
each to compile, per model, format and number of rows. Tiles of packed weights keep results independent of the batch:
two warps at most, or for `bf16-packed` any number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from spmoe.backends.base import Gate
from spmoe.backends.devices import memory_bandwidth
from spmoe.backends.kernels.experts import (
    ExpertScratch,
    ExpertTile,
    ExpertTiles,
    ScratchBuffer,
    SlotExperts,
    reduce_experts,
    run_expert_batch,
    slot_experts,
    slot_matrices,
)
from spmoe.formats.base import weight_format
from spmoe.formats.expert import ExpertFormat

CACHED_BYTES = 10**9  # layers have more bytes of experts together than any cache holds
TRIES = 5
FORMATS = (
    "bfloat16,bf16-packed,fp8-block128,fp8-channel,int8-channel,int8-g128,int4-g128,int4-g32,int4-asym-g128,mxfp4,nvfp4"
)
TILES = {  # rows of the matrix (`gate_up` has two for an output), inputs, warps, stages
    "dense": [
        (rows, inputs, warps, stages)
        for rows, warps in ((32, 4), (64, 4), (128, 8))
        for inputs, stages in ((128, 3), (128, 6), (256, 3))
    ],
    "bf16-packed": [
        (rows, 128, warps, stages)
        for rows, warps in ((32, 1), (32, 2), (64, 2), (64, 4))
        for stages in ((2, 3, 4) if warps == 2 else (3,))
    ],
    "quantized": [
        (16, 256, 2, 3), (32, 128, 2, 4), (32, 256, 2, 3), (32, 256, 2, 4), (32, 256, 1, 3), (32, 512, 2, 3),
        (64, 128, 2, 4), (64, 128, 2, 6), (64, 256, 2, 3), (128, 128, 2, 4),
    ],
}  # fmt: skip
SPLITS = (
    1,
    2,
    4,
    8,
)  # of the inputs of `down`; sums of `bf16-packed` have the order of bfloat16, so it keeps its splits


class Model(NamedTuple):
    """Sizes of a model's experts."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    gate: Gate
    bias: bool = False


MODELS = {
    "mixtral-8x7b": Model(4096, 14336, 8, 2, Gate("silu")),
    "gpt-oss-120b": Model(2880, 2880, 128, 4, Gate("silu", 7.0, 1.702, 1.0, interleaved=True), bias=True),
    "deepseek-v2-lite": Model(2048, 1408, 64, 6, Gate("silu")),
}


class Layers:
    """Layers of one model in one format, each with its own experts in slots, and rows that are routed to them."""

    def __init__(self, model: Model, name: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        format = ExpertFormat(weight_format(name), dtype)
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (2 * model.ffn, model.hidden), "down_proj": (model.hidden, model.ffn)
        }  # fmt: skip
        if model.bias:
            shapes |= {"gate_up_proj_bias": (2 * model.ffn,), "down_proj_bias": (model.hidden,)}
        layout = format.layout(shapes)
        generator = torch.Generator(device).manual_seed(0)

        def weights(shape: tuple[int, ...]) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16()

        blob = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        format.convert({key: weights(shape) for key, shape in shapes.items()}, layout.views(blob))
        spread = torch.Generator().manual_seed(1)
        self.index = torch.stack([torch.randperm(model.experts, generator=spread)[: model.top_k] for _ in range(rows)])
        active = self.index.unique()
        self.nbytes = len(active) * sum(field.nbytes for field in layout.fields)
        count = max(2, -(-CACHED_BYTES // self.nbytes))
        slots = blob.repeat(count * len(active), 1)
        found = slot_experts(slot_matrices(slots, format, shapes), shapes)
        if found is None:
            raise SystemExit(f"there is no kernel for {name} at the sizes of this model")
        self.experts: SlotExperts = found
        self.tables = []
        for layer in range(count):
            table = torch.full((model.experts,), -1, dtype=torch.int32)
            table[active] = torch.arange(len(active), dtype=torch.int32) + layer * len(active)
            self.tables.append(table.to(device))
        self.index = self.index.to(device)
        self.hidden = torch.randn(rows, model.hidden, device=device).to(dtype)
        self.weights = torch.rand(rows, model.top_k, device=device)
        self.scratch = ScratchBuffer(model.top_k, found.shape, device).scratch(rows)

    def seconds(self, scratch: ExpertScratch) -> float:
        """Return the time of one layer: the best of several replays of a graph over all layers."""
        out = torch.empty_like(self.hidden)

        def run() -> None:
            for table in self.tables:
                run_expert_batch(
                    self.hidden, self.index, self.weights, table, self.experts, self.model.gate, scratch
                )  # fmt: skip
                reduce_experts(scratch, out)

        return replay_seconds(run) / len(self.tables)


def replay_seconds(run: Callable[[], None]) -> float:
    """Capture a function in a CUDA graph and return the time of its fastest replay."""
    run()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(TRIES):
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) / 1000)
    return min(times)


def sweep(layers: Layers, name: str) -> list[str]:
    """Try other tiles, of one kernel at a time, then other splits; return a line for each with the fastest."""
    scratch, lines = layers.scratch, []
    kind = "dense" if name in ("bfloat16", "float16") else name if name == "bf16-packed" else "quantized"
    for kernel, rows in (("up", 2), ("down", 1)):
        tiles = [ExpertTile(tile[0] // rows, *tile[1:]) for tile in TILES[kind]]
        variants = [(str(tuple(tile)), replace(scratch.tiles, **{kernel: tile})) for tile in tiles]
        lines.append(f"    {kernel}: {fastest(layers, variants)} us")
    if kind == "quantized":
        variants = [(f"x{splits}", replace(scratch.tiles, splits=splits)) for splits in SPLITS]
        lines.append(f"    splits: {fastest(layers, variants)} us")
    return lines


def fastest(layers: Layers, variants: list[tuple[str, ExpertTiles]]) -> str:
    """Run a layer with each of these tiles and return the names and times of the fastest."""
    found, sums = [], layers.scratch.partial_sums
    for variant, tiles in variants:
        partial_sums = sums.new_empty(tiles.splits, *sums.shape[1:])
        try:
            seconds = layers.seconds(replace(layers.scratch, tiles=tiles, partial_sums=partial_sums))
            found.append((seconds, variant))
        except Exception as error:  # too large for the device
            print(f"    {variant}: {type(error).__name__}", file=sys.stderr)
            torch.cuda.synchronize()
    return ", ".join(f"{variant} {seconds * 1e6:.1f}" for seconds, variant in sorted(found)[:5])


def main() -> None:
    """Read the options, then print one line per model, number of rows and format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--rows", default="1,5")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device on this machine")
    if unknown := set(options.models.split(",")) - MODELS.keys():
        raise SystemExit(f"unknown models: {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    bandwidth = memory_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: {bandwidth / 1e9:.0f} GB/s, torch {torch.__version__}")
    print(f"{'model':18} {'rows':>4} {'format':16} {'experts':>7} {'MB':>7} {'us':>8} {'GB/s':>6} {'share':>6}  tiles")
    for model in options.models.split(","):
        for rows in map(int, options.rows.split(",")):
            for name in options.formats.split(","):
                layers = Layers(MODELS[model], name, rows, device, dtype)
                seconds, tiles = layers.seconds(layers.scratch), layers.scratch.tiles
                rate, active = layers.nbytes / seconds, len(layers.index.unique())
                print(
                    f"{model:18} {rows:4} {name:16} {active:7} {layers.nbytes / 1e6:7.1f} {seconds * 1e6:8.1f} "
                    f"{rate / 1e9:6.0f} {rate / bandwidth:6.1%}  {tuple(tiles.up)} {tuple(tiles.down)} x{tiles.splits}",
                    flush=True,
                )
                if options.sweep:
                    print("\n".join(sweep(layers, name)), flush=True)
                del layers
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
