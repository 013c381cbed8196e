"""Compile every kernel for a GPU architecture that this machine need not have.

    python compile_kernels.py 89

Prints the name and the bytes of shared memory of each compiled kernel. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

LAUNCH = triton.JITFunction.run


class CompileTarget:
    """Triton driver of a GPU that is not present; it can be compiled for."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    """Compile a kernel for the arguments of a launch, and do not launch it."""
    compiled = LAUNCH(self, *args, grid=grid, warmup=True, **kwargs)
    print(self.__name__, compiled.metadata.shared)
    return compiled


def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype)


def compile_all() -> None:
    """Launch every kernel with the tile sizes that real models lead to."""
    compile_dense()
    compile_attention()
    compile_inputs()
    compile_residency()
    compile_experts()


def compile_dense() -> None:
    from spmoe.backends.kernels import dense

    x = zeros(5, 4096)
    dense.rms_norm(x, zeros(4096), 1e-6)
    for n in (512, 1024, 4096, 8192):
        dense.small_batch_linear(x, zeros(n, 4096))
    dense.small_batch_linear(zeros(5, 8192), zeros(256, 8192), zeros(256))
    dense.small_batch_linear(x.float(), zeros(64, 4096, dtype=torch.float32))
    for counts, k in (((2048, 2048, 2048), 2048), ((4096, 1024, 1024), 4096), ((1536, 576), 7168), ((600, 70), 2880)):
        weights = [zeros(n, k) for n in counts]
        dense.fused_linears(zeros(5, k), weights, [None, *(zeros(n) for n in counts[1:])])
    dense.fused_linears(x.float(), [zeros(n, 4096, dtype=torch.float32) for n in (64, 32)], [None, None])
    for n in (1408, 2048, 8192):
        dense.gated_linear(zeros(5, 2048), zeros(n, 2048), zeros(n, 2048), "silu")
    dense.route(x, zeros(8, 4096), 2, dense.RouterOutputFormat(torch.bfloat16))
    dense.route(x, zeros(64, 4096), 8, dense.RouterOutputFormat(torch.float32))
    dense.norm_and_route_layers(zeros(4, 1, 2048), zeros(4, 2048), 1e-6, zeros(4, 64, 2048), 8)


def compile_attention() -> None:
    from spmoe.backends.kernels import attention, rotary

    ranges, rows = zeros(3, 1, dtype=torch.int64), zeros(3, 5, dtype=torch.int64)
    query, key, angles = zeros(1, 5, 32, 128).transpose(1, 2), zeros(1, 5, 8, 128).transpose(1, 2), zeros(1, 5, 128)
    rotary.apply_rotary(query, key, angles, angles)
    cache = zeros(1, 8, 4096, 128)
    for kind in (ranges, rows):  # one sequence, and a sequence per row
        attention.append_kv(cache, cache, key, key, kind)
        attention.decode_attention(query, cache, cache, kind, 0.1, 1024)
    for dim, value_dim in ((64, 64), (192, 128), (256, 256), (512, 512)):
        for dtype in (torch.bfloat16, torch.float32) if dim > 64 else (torch.bfloat16,):
            heads = zeros(1, 8, 5, dim, dtype=dtype)
            keys, values = zeros(1, 1, 4096, dim, dtype=dtype), zeros(1, 1, 4096, value_dim, dtype=dtype)
            attention.decode_attention(heads, keys, values, ranges, 0.1)


def compile_inputs() -> None:
    from spmoe.backends.kernels import inputs

    chain, ids, one = inputs.new_token_chain(torch.device("cpu")), zeros(1, 5, dtype=torch.int64), zeros(1).long()
    for sequences in (1, 5):
        ranges = zeros(3, sequences, dtype=torch.int64)
        inputs.load_inputs(zeros(5 + 3 * sequences, dtype=torch.int64), chain, chain, ids, ids, ranges)
    inputs.load_chained_inputs(chain, one, one, zeros(3, 1, dtype=torch.int64))
    inputs.append_token(chain, one[0], 1)
    inputs.take_batch(zeros(8, 60, dtype=torch.int32), one, zeros(60, dtype=torch.int32))


def compile_residency() -> None:
    from spmoe.backends.kernels import residency

    def numbers(*size: int) -> torch.Tensor:
        return zeros(*size, dtype=torch.int32)

    words, state = (zeros(size, dtype=torch.int64) for size in (residency.WORDS, residency.STATE))
    for rows, top_k, experts in ((1, 2, 8), (16, 8, 128)):
        entries = numbers(64, 2, rows * top_k), numbers(64, experts + 1)
        buffers = residency.ResidencyBuffers(words, *entries, state, numbers(experts), numbers(experts))
        for waits in (False, True):
            residency.check_residency(zeros(rows, top_k, dtype=torch.int64), numbers(experts), buffers, waits=waits)
        residency.await_missing(numbers(experts), buffers)
    residency.end_forward(buffers)


def compile_experts() -> None:
    from spmoe.backends.base import Gate
    from spmoe.backends.kernels import experts, packed
    from spmoe.formats.base import weight_format
    from spmoe.formats.expert import ExpertFormat

    sizes, gpt_oss = ((4096, 4096, 2), (2048, 1408, 8)), Gate("silu", 7.0, 1.702, 1.0, interleaved=True)
    cases = [("bfloat16", *sizes[0], 5, Gate("silu"))]
    cases += [("bfloat16", *size, experts.MAX_KERNEL_ROWS, Gate("silu")) for size in sizes]
    cases += [(name, *sizes[0], 1, Gate("silu")) for name in ("fp8-block128", "int8-channel", "int4-asym-g32", "nvfp4")]
    cases += [("mxfp4", 2880, 2880, 4, 1, gpt_oss)]
    cases += [("bf16-packed", 2880, 2880, 4, 1, Gate("silu"))]  # with a tail
    # 64 rows: the tiles are those of all kinds, and dense weights and fp8 take the most shared memory
    cases += [(name, *sizes[0], experts.MAX_KERNEL_ROWS, Gate("silu")) for name in ("bf16-packed", "fp8-block128")]
    for name, hidden, ffn, top_k, rows, gate in cases:
        format = ExpertFormat(weight_format(name), torch.bfloat16)
        shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
        if name == "mxfp4":
            shapes |= {"gate_up_proj_bias": (2 * ffn,), "down_proj_bias": (hidden,)}
        slots, table = zeros(1, format.layout(shapes).nbytes, dtype=torch.uint8), zeros(8, dtype=torch.int32)
        found = experts.slot_experts(experts.slot_matrices(slots, format, shapes), shapes)
        assert found is not None
        states, index = zeros(rows, hidden), zeros(rows, top_k, dtype=torch.int64)
        scratch = experts.ScratchBuffer(top_k, found.shape, "cpu").scratch(rows)
        experts.run_expert_batch(states, index, index.float(), table, found, gate, scratch)
        experts.reduce_experts(scratch, states)
        if rows == 1:
            packed.dequantize_matrix(found.down, 0, zeros(hidden, ffn))
    for limit in (None, zeros(1, dtype=torch.int64)):
        experts.place_results(zeros(3, hidden, dtype=torch.float32), index.view(-1), 0, scratch.partial_sums, limit)


if __name__ == "__main__":
    driver.set_active(CompileTarget(int(sys.argv[1])))
    triton.JITFunction.run = compile_only
    compile_all()
