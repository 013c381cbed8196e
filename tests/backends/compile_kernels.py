"""Compile every kernel for an architecture that need not be there, as the code that launches it would have it.

    python compile_kernels.py 89

prints, for every kernel, its name and the bytes of shared memory that it takes. Without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

LAUNCH = triton.JITFunction.run


class Absent:
    """A device that can be compiled for."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    compiled = LAUNCH(self, *args, grid=grid, warmup=True, **kwargs)
    print(self.__name__, compiled.metadata.shared)
    return compiled


def compile_all() -> None:
    from spmoe.backends.kernels import attention, dense, experts, fused_qkv, gates, inputs, quantized, rotary

    def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    x, one = zeros(5, 4096), zeros(1, dtype=torch.int64)
    dense.rms_norm(x, zeros(4096), 1e-6)
    for n in (512, 1024, 4096, 8192):
        dense.skinny_linear(x, zeros(n, 4096))
    dense.skinny_linear(zeros(5, 8192), zeros(256, 8192), zeros(256))
    dense.skinny_linear(x.float(), zeros(64, 4096, dtype=torch.float32))
    for counts, k in (((2048, 2048, 2048), 2048), ((4096, 1024, 1024), 4096), ((1536, 576), 7168), ((600, 70), 2880)):
        weights = [zeros(n, k) for n in counts]
        fused_qkv.skinny_linears(zeros(5, k), weights, [None, *(zeros(n) for n in counts[1:])])
    fused_qkv.skinny_linears(x.float(), [zeros(n, 4096, dtype=torch.float32) for n in (64, 32)], [None, None])
    for n in (1408, 2048, 8192):
        dense.gated_linear(zeros(5, 2048), zeros(n, 2048), zeros(n, 2048), "silu")
    dense.route(x, zeros(8, 4096), 2, dense.Answer(torch.bfloat16))
    dense.route(x, zeros(64, 4096), 8, dense.Answer(torch.float32))
    gates.route_layers(zeros(4, 1, 2048), zeros(4, 2048), 1e-6, zeros(4, 64, 2048), 8)
    query, key, angles = zeros(1, 5, 32, 128).transpose(1, 2), zeros(1, 5, 8, 128).transpose(1, 2), zeros(1, 5, 128)
    rotary.rotate(query, key, angles, angles)
    cache = zeros(1, 8, 4096, 128)
    attention.append(cache, cache, key, key, one)
    attention.decode_attention(query, cache, cache, one, 0.1, 1024)
    for dim, value_dim in ((64, 64), (192, 128), (256, 256), (512, 512)):
        for dtype in (torch.bfloat16, torch.float32):
            for rows in (1, 5, 64):
                heads = zeros(1, 8, rows, dim, dtype=dtype)
                keys, values = zeros(1, 1, 4096, dim, dtype=dtype), zeros(1, 1, 4096, value_dim, dtype=dtype)
                attention.decode_attention(heads, keys, values, one, 0.1)
    chain, ids = inputs.new_chain(torch.device("cpu")), zeros(1, 5, dtype=torch.int64)
    inputs.stage(zeros(6, dtype=torch.int64), chain, chain, ids, ids, one)
    inputs.stage_chained(chain, one, one, one)
    inputs.go_on(chain, one[0], 1)
    inputs.take_batch(zeros(8, 60, dtype=torch.int32), one, zeros(60, dtype=torch.int32))
    for hidden, ffn, top_k in ((4096, 4096, 2), (2048, 1408, 8)):
        geometry = experts.Geometry(hidden, ffn, 0, 2 * hidden * ffn)
        arena, table = zeros(1, 3 * hidden * ffn), zeros(8, dtype=torch.int32)
        for rows in (5, experts.MAX_KERNEL_ROWS):
            states, index = zeros(rows, hidden), zeros(rows, top_k, dtype=torch.int64)
            scratch = experts.Places(top_k, geometry, torch.bfloat16, "cpu").scratch(rows)
            weights = index.float()
            experts.run_expert_batch(states, index, weights, table, arena, geometry, "silu", scratch)
            experts.add_up(scratch, states)
    bits, group, hidden, ffn = 4, 64, 2048, 1408
    gate_up = quantized.Codes(hidden, 2 * ffn, 0, 1 << 20)
    down = quantized.Codes(ffn, hidden, 1 << 21, 1 << 22)
    coded, index = quantized.CodedGeometry(bits, group, gate_up, down), zeros(1, 2, dtype=torch.int64)
    quantized.run_coded(zeros(1, hidden), index, index.float(), zeros(2, 1 << 23, dtype=torch.int32), coded, "silu")


if __name__ == "__main__":
    driver.set_active(Absent(int(sys.argv[1])))
    triton.JITFunction.run = compile_only
    compile_all()
