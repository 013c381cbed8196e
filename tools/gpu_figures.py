"""Run the measurements and tests of docs/results.md that need a GPU, most important first, each with a time limit.

    python tools/gpu_figures.py --list
    python tools/gpu_figures.py --out figures --seconds 570 --only kernels,hits
    python tools/gpu_figures.py --out figures --skip tests

Each one writes DIR/NAME.log and runs in a process of its own, which is ended at its limit: what it has printed until
then is kept. One whose limit is longer than what is left of `--seconds` is left out. Run it from the root of a clone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
DRAFT = "src/spmoe/pair/draft"
TARGETS = {"shipped": "src/spmoe/pair/target", "fine": "extras/fine", "diverse": "extras/diverse"}
SHAPES = {"deepseek-v2-lite": 240, "phi-3.5-moe": 420, "mixtral-8x7b": 570}  # seconds per target, with all values of K


class Measurement(NamedTuple):
    """One command, and the seconds after which it is ended."""

    name: str
    seconds: int
    command: str


MEASUREMENTS = (
    Measurement("tests", 400, "python tools/gpu_tests.py --seconds 380"),
    Measurement("kernels", 60, "python tools/kernel_speed.py --formats bf16-packed,int4-g128,mxfp4,nvfp4"),
    Measurement(
        "hits",
        150,
        f"python tools/hit_speed.py extras/fine --draft {DRAFT} --shape deepseek-v2-lite --expert-memory 25%,90%",
    ),
    Measurement(
        "full-gpt-oss-120b",
        90,
        "python tools/format_speed.py gpt-oss-120b --load-format dummy --device cuda --formats mxfp4 "
        "--expert-memory 24GiB,16GiB,8GiB --prompt-len 512 --tokens 32 --rounds 1",
    ),
    Measurement(
        "full-qwen3-30b-a3b",
        240,
        "python tools/format_speed.py qwen3-30b-a3b --load-format dummy --device cuda --expert-memory "
        "24GiB,16GiB,8GiB --prompt-len 512 --tokens 32 --rounds 1",
    ),
    Measurement(
        "hits-qwen3",
        240,
        "python tools/hit_speed.py qwen3-30b-a3b --load-format dummy --expert-memory 50% --rows 1 --steps 40",
    ),
    Measurement(
        "start-qwen3",
        300,
        "python tools/start_speed.py qwen3-30b-a3b --write /tmp/spmoe-qwen3-30b-a3b --device cuda --expert-memory 25%",
    ),
    Measurement(
        "start-gpt-oss-120b",
        240,
        "python tools/start_speed.py gpt-oss-120b --load-format dummy --device cuda --expert-memory 16GiB",
    ),
    Measurement(
        "formats",
        200,
        "python tools/format_speed.py mixtral-8x7b --load-format dummy --device cuda --expert-memory 25%,8GiB,24GiB "
        "--rounds 1 --tokens 24",
    ),
    *(
        Measurement(
            f"governor-{name}-{shape}",
            seconds,
            f"python tools/governor_speed.py {target} --draft {DRAFT} --shape {shape} --device cuda --off 4",
        )
        for shape, seconds in SHAPES.items()
        for name, target in TARGETS.items()
    ),
    Measurement(
        "batching",
        150,
        f"python tools/batching_speed.py {TARGETS['shipped']} --draft {DRAFT} --shape mixtral-8x7b --device cuda "
        "--requests 1,2,4,8,16 --rounds 1 --tokens 48",
    ),
    Measurement(
        "cpu-experts",
        400,
        "python -m spmoe bench --shape mixtral-8x7b --device cuda --dtype bfloat16 --cpu-experts off,auto "
        "--expert-memory 25%,50% -k 0,4 --output-len 48 --max-prompts 1 --repeat 1",
    ),
    Measurement(
        "serving",
        120,
        f"python tools/serving_overhead.py {TARGETS['shipped']} --draft {DRAFT} --device cuda --dtype bfloat16",
    ),
)


def main() -> None:
    """Read the options, then run or list the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("figures"), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them together")
    parser.add_argument("--only", default="", help="names, separated by commas; run in this order")
    parser.add_argument("--skip", default="", help="names, separated by commas")
    parser.add_argument("--list", action="store_true", help="print names, limits and commands, and run nothing")
    options = parser.parse_args()
    for one in (selected := select(options.only, options.skip)):
        if options.list:
            print(f"{one.name:32} {one.seconds:4} s  {one.command}")
    if options.list:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.seconds, False
    for one in selected:
        if one.seconds > end - time.monotonic():
            print(f"{one.name:32} left out: it may take {one.seconds} s", flush=True)
            continue
        failed |= run(one, options.out / f"{one.name}.log") != 0
    sys.exit(int(failed))


def select(only: str, skip: str) -> list[Measurement]:
    """Return the measurements of these names, or all of them, without the skipped ones."""
    by_name = {one.name: one for one in MEASUREMENTS}
    wanted, unwanted = ([name for name in names.split(",") if name] for names in (only, skip))
    if unknown := [name for name in (*wanted, *unwanted) if name not in by_name]:
        sys.exit(f"error: there is no measurement {unknown[0]!r}; --list prints all names")
    return [by_name[name] for name in wanted or by_name if name not in unwanted]


def run(one: Measurement, log: Path) -> int:
    """Run a measurement, and print how it ended and the end of its output; return its exit status."""
    command = [sys.executable, *shlex.split(one.command)[1:]]
    path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    with log.open("w") as output:
        output.write(f"$ {one.command}\n")
        output.flush()
        process = subprocess.Popen(  # a group of its own, so that its children end with it
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            status: int | str = process.wait(one.seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = f"ended after {one.seconds} s"
    print(f"{one.name:32} {status}  {time.monotonic() - started:.0f} s  {log}", flush=True)
    for line in log.read_text(errors="replace").splitlines()[-12:]:
        print(f"    {line[:200]}", flush=True)
    return status if isinstance(status, int) else 1


if __name__ == "__main__":
    main()
