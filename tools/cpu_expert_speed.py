"""Measure products of one row with packed expert matrices on this machine's CPU: dequantized per call, and from copies.

    python tools/cpu_expert_speed.py --threads 2
    python tools/cpu_expert_speed.py --formats int4-g128 --dtypes bfloat16 --matrices 4096x14336 --rows 1,4,64
    python tools/cpu_expert_speed.py --operator --rows 1,4,16,64,128

Prints, per matrix, dtype and format, gigabytes of packed weights per second for both ways, their ratio, the time of a
copy in computations from it, and its size relative to the packed matrix. Both ways take turns, and the fastest of the
rounds counts. Every round reads several matrices, so that caches hold few of them. With --operator, prints the times of
PyTorch's 4-bit operator in each dtype, also where it is not used, beside a dense product and dequantizing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from spmoe.backends.cpu_copies import CopyLayout, CpuCopies, needs_copies
from spmoe.formats.base import weight_format
from spmoe.formats.expert import ExpertFormat
from spmoe.formats.layout import torch_dtype
from spmoe.types import ExpertKey

CACHED_BYTES = 2**26  # packed matrices have more bytes together than the caches of most processors hold
FORMATS = "int4-g128,int4-g32,int4-asym-g128,bf16-packed,fp8-block128,int8-g128,mxfp4,nvfp4"
NAME = "up_proj"


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(name: str, dtype: torch.dtype, outs: int, ins: int, rows: int, rounds: int) -> str:
    """Return a line of the table."""
    format, shapes = ExpertFormat(weight_format(name), dtype), {NAME: (outs, ins)}
    if not needs_copies(format):
        raise SystemExit(f"{name} is computed from its blobs in {dtype}: there is nothing to compare")
    layout = format.layout(shapes)
    first = torch.zeros(layout.nbytes, dtype=torch.uint8)
    format.convert({NAME: (0.02 * torch.randn(outs, ins)).bfloat16()}, layout.views(first))
    blobs = [layout.views(first.clone()) for _ in range(max(1, CACHED_BYTES // layout.nbytes))]
    keys, copies = [ExpertKey(0, number) for number in range(len(blobs))], CpuCopies(format, 2**40)
    copy_layout, x = CopyLayout.of(format, shapes), torch.randn(rows, ins).to(dtype)
    copying = min(seconds(lambda k=k, b=b: copies.make(k, b, copy_layout)) for k, b in zip(keys, blobs, strict=True))  # type: ignore[misc]

    def dequantized() -> None:
        for views in blobs:
            linear(x, format.dequantize(views)[NAME])

    def copied() -> None:
        for key in keys:
            copies.get(key).project(NAME, x)

    times = [(seconds(dequantized), seconds(copied)) for _ in range(rounds)]
    slow, fast = (min(column) / len(blobs) for column in zip(*times, strict=True))
    kind = "int4 operator" if copy_layout.repacked else "dense"
    packed = sum(part.nbytes for part in format.parts(blobs[0], NAME).values())
    return (
        f"| {outs} x {ins} | {str(dtype).removeprefix('torch.')} | {name} | {packed / slow / 1e9:.2f} | "
        f"{packed / fast / 1e9:.2f} ({kind}) | {slow / fast:.1f} | {copying / fast:.0f} | "
        f"{copy_layout.nbytes / packed:.1f} |"
    )


def measure_operator(dtype: torch.dtype, rows: int, rounds: int) -> str:
    """Return a line of the operator's table."""
    outs, ins = 2048, 7168
    format = weight_format("int4-asym-g128")
    parts = format.quantize_by_rows(0.02 * torch.randn(outs, ins))
    count = max(1, CACHED_BYTES // (outs * ins // 2))
    packed = [{name: part.clone() for name, part in format.repack(parts, dtype).items()} for _ in range(count)]
    dense = [format.dequantize_by_rows(parts, dtype) for _ in range(count)]
    x = torch.randn(rows, ins).to(dtype)

    def by_operator() -> None:
        for matrix in packed:
            format.repacked_linear(matrix, x)

    def by_dense_product() -> None:
        for matrix in dense:
            linear(x, matrix)

    def dequantize() -> None:
        for _ in range(count):
            format.dequantize_by_rows(parts, dtype)

    works = (by_dense_product, by_operator, dequantize)
    times = [[seconds(work) for work in works] for _ in range(rounds)]
    found = " | ".join(f"{1e3 * min(column) / count:.3g}" for column in zip(*times, strict=True))
    return f"| {str(dtype).removeprefix('torch.')}, {rows} | {found} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--matrices", default="2048x768,4096x14336", help="outputs x inputs")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--operator", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.operator:
        print("| dtype, rows | dense product, ms | 4-bit operator, ms | dequantizing, ms |")
        print("| --- | --- | --- | --- |")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rows in map(int, arguments.rows.split(",") if dtype == torch.bfloat16 else "1"):
                print(measure_operator(dtype, rows, arguments.rounds), flush=True)
        return
    for rows in map(int, arguments.rows.split(",")):
        print(f"\nrows: {rows}, threads: {arguments.threads}, torch {torch.__version__}\n")
        print("| matrix | dtype | format | dequantized, GB/s | copy, GB/s | ratio | copying | copy size |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for matrix in arguments.matrices.split(","):
            outs, ins = map(int, matrix.split("x"))
            for dtype in arguments.dtypes.split(","):
                for name in arguments.formats.split(","):
                    print(measure(name, torch_dtype(dtype), outs, ins, rows, arguments.rounds), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
