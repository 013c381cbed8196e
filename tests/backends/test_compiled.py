"""Every kernel compiles for devices that are not here, and fits their multiprocessors: interpreting shows neither."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no triton")

HERE, KERNELS = Path(__file__).parent, Path(__file__).parents[2] / "src" / "spmoe" / "backends" / "kernels"
SHARED = {89: 101_376, 90: 232_448}  # bytes that a program may have: a consumer's card, and a server's


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED)
def test_every_kernel_compiles_and_fits(architecture: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), str(architecture)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    too_large = [line for line in compiled if int(line[1]) > SHARED[architecture]]
    assert not too_large
    launched = {name for file in KERNELS.glob("*.py") for name in re.findall(r"(_\w+_kernel)\[", file.read_text())}
    assert {name for name, _ in compiled} == launched, "kernels that are launched somewhere, and were not tried"
