"""Every kernel compiles for GPUs that are not present, and fits their shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE, KERNELS = Path(__file__).parent, Path(__file__).parents[2] / "src" / "spmoe" / "backends" / "kernels"
SHARED_MEMORY = {89: 101_376}  # bytes per program, of a consumer GPU; GPU tests compile for the GPU that is there


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_every_kernel_compiles_and_fits_shared_memory(architecture: int, tmp_path: Path) -> None:
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
    assert not [line for line in compiled if int(line[1]) > SHARED_MEMORY[architecture]]
    launched = {name for file in KERNELS.glob("*.py") for name in re.findall(r"(_\w+_kernel)\[", file.read_text())}
    assert {name for name, _ in compiled} == launched, "compile_kernels.py must compile every kernel that is launched"
