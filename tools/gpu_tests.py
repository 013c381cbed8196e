"""Run the tests that need a GPU, in several processes at once.

    python tools/gpu_tests.py --out logs
    python tools/gpu_tests.py --out logs --processes 8 --seconds 240 tests/engine/test_cuda.py -k company

Further arguments are those of pytest. Each process runs every N-th of the tests and writes DIR/tests-NUMBER.log; one
that has not ended after `--seconds` is interrupted, and prints what it has run. Compiling kernels takes most of the
time, so this is several times as fast as one process. Exits with 1 if a test failed or a process was interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_END_SECONDS = 10.0  # for an interrupted process
_NO_TESTS = 5  # exit status of pytest


def main() -> None:
    """Read the options, run the processes and print how each one ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("figures"), metavar="DIR")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4))
    parser.add_argument("--seconds", type=float, default=540.0)
    options, arguments = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    end, running = time.monotonic() + options.seconds, []
    for number in range(options.processes):
        log = options.out / f"tests-{number}.log"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--durations", "5"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--shard", f"{number}/{options.processes}", *arguments],
                stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        running.append((process, log))
    failed = [report(process, log, end) for process, log in running]
    sys.exit(int(any(failed)))


def report(process: subprocess.Popen[bytes], log: Path, end: float) -> bool:
    """Wait for a process until `end`; print failures and the last line of its log, and return whether it failed."""
    late = ""
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = "interrupted; "
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line[:200]}", flush=True)
    print(f"{log.name}: {late}{lines[-1] if lines else 'no output'}", flush=True)
    return bool(late) or process.returncode not in (0, _NO_TESTS)


if __name__ == "__main__":
    main()
