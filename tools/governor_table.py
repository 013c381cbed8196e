"""Print the governor's speed against fixed values of K, on replayed traces with other acceptance and locality.

    python tools/governor_table.py TRACE.npz [--expert-size 150MiB --draft-pass-ms 0.6 --layer-ms 0.15 --link-gbps 55]

Record the trace with a large K: `spmoe trace record --max-tokens 256 -k 12 -o TRACE.npz`. Every cell decodes the same
texts from empty slots: with each fixed K, and with the K that the governor chooses. The first request is a cold start.
`--starts` repeats this with other texts; first requests are those of all starts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from spmoe.config import Size, parse_prefetch_policy
from spmoe.errors import SpmoeError
from spmoe.interpreter import gc_paused
from spmoe.replay.governed import Comparison, compare, seconds_per_token
from spmoe.replay.replay import ReplayConfig, as_cuda
from spmoe.replay.text import DecodedText, ReplayText, StepTimes, read_texts
from spmoe.replay.trace import Trace

HEADER = "slots  acceptance  locality  plain ms  best K: first, later  of best: first, later  of plain: first, later"


def main() -> None:
    """Read the options, then print one line per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--expert-memory", default="25%,50%,90%", help="slots, as shares of all experts")
    parser.add_argument(
        "--acceptance", default="0.4,0.7,0.9", help="shares of tokens that the draft proposes rightly, or: recorded"
    )
    parser.add_argument("--locality", default="-0.6,0,0.4", help="from -1 (none) over 0 (as recorded) to 1")
    parser.add_argument("--expert-size", default="150MiB")
    parser.add_argument("--draft-pass-ms", type=float, default=0.6)
    parser.add_argument("--layer-ms", type=float, default=0.15, help="a layer of the target, experts resident")
    parser.add_argument("--link-gbps", type=float, default=55.0)
    parser.add_argument("--prefetch", type=parse_prefetch_policy, default="auto")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=3, help="one after the other, after a cold start")
    parser.add_argument("--starts", type=int, default=1, help="cold starts, each with the next texts of the trace")
    options = parser.parse_args()
    try:
        print_table(options)
    except SpmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def print_table(options: argparse.Namespace) -> None:
    """Compare the governor with every fixed K in every cell."""
    trace = Trace.load(options.trace)
    size = Size.parse(options.expert_size).of(0)
    trace = as_cuda(replace(trace, shape=replace(trace.shape, expert_bytes=size)))
    times = StepTimes(1e-3 * options.draft_pass_ms, 1e-3 * options.layer_ms, row=5e-5, rest=1e-4)
    recorded = read_texts(trace)
    print(HEADER, flush=True)
    for slots in options.expert_memory.split(","):
        for acceptance in options.acceptance.split(","):
            for locality in options.locality.split(","):
                texts = [
                    recorded[number % len(recorded)].scaled(
                        None if acceptance == "recorded" else float(acceptance), float(locality), seed=number
                    )
                    for number in range(options.starts * options.requests)
                ]
                config = ReplayConfig(options.prefetch, "auto", memory=Size.parse(slots), link_gbps=options.link_gbps)
                with gc_paused():
                    found = [
                        compare(part, trace.shape, config, times, options.tokens)
                        for part in batched(texts, options.requests)
                    ]
                print(line(slots, acceptance, locality, join(found), options.starts), flush=True)


def batched(texts: list[ReplayText], count: int) -> list[list[ReplayText]]:
    """Return the texts of each start."""
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def join(found: list[Comparison]) -> Comparison:
    """Return the first requests of all starts, then all others."""

    def order(starts: list[list[DecodedText]]) -> list[DecodedText]:
        return [one[0] for one in starts] + [text for one in starts for text in one[1:]]

    fixed = {k: order([one.fixed[k] for one in found]) for k in found[0].fixed}
    return Comparison(order([one.governed for one in found]), fixed)


def line(slots: str, acceptance: str, locality: str, found: Comparison, starts: int) -> str:
    """Return one line of the table."""
    first, later = slice(0, starts), slice(starts, None)
    plain = 1e3 * seconds_per_token(found.fixed[0][first])
    return (
        f"{slots:>5}  {acceptance:>10}  {locality:>8}  {plain:8.2f}  {found.best(first):13d}, {found.best(later):5d}"
        f"  {found.of_best(first):14.3f}, {found.of_best(later):5.3f}"
        f"  {found.of_plain(first):15.3f}, {found.of_plain(later):5.3f}"
    )


if __name__ == "__main__":
    main()
