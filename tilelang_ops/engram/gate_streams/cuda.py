"""gate_streams on CUDA: a block takes one stream of one row after another.

A thread keeps its channels of the weight in registers for all rows of its block, and those of stream, key and
value from the sums to the result. Sums run over a thread's channels in order, then over the lanes of a warp,
then over warps: the same for every row, wherever it stands.
"""

import math

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel, num_sms
from tilelang_ops.engram.gate_streams.reference import MIN_DOT

THREADS = 128
WARPS = THREADS // 32
BLOCKS_PER_SM = 3  # as many as the registers let run at once


def _builds(model):
    sizes = {"num_streams": model.hc_mult, "width": model.hidden_size, "dtype": "bfloat16"}
    return [{**sizes, "some_pass": some_pass} for some_pass in (False, True)]


# Indices are in range by construction; TileLang's own guards would double the loads' code.
@cuda_kernel(builds=_builds, pass_configs={"tl.disable_safe_memory_legalize": True})
def kernel(num_streams: int, width: int, dtype: str, some_pass: bool):
    n, num_flags = T.dynamic("n"), T.dynamic("num_flags")
    lanes = math.gcd(width, 8 if dtype == "bfloat16" else 4)  # 16 bytes
    vectors = width // lanes
    parts = -(-vectors // THREADS)  # vectors of a thread

    @T.prim_func
    def gate_streams(
        streams: T.Tensor((n, num_streams, width), dtype),
        key_value: T.Tensor((n, num_streams + 1, width), dtype),
        weight: T.Tensor((num_streams, width), "float32"),
        passes: T.Tensor((num_flags,), "uint8"),
        out: T.Tensor((n, num_streams, width), dtype),
        eps: T.float32,
        blocks: T.int32,
    ):
        with T.Kernel(num_streams, blocks, threads=THREADS) as (stream, first):
            thread = T.get_thread_binding()
            factors = T.alloc_local((parts, lanes), "float32")
            old = T.alloc_local((parts, lanes), dtype)
            key = T.alloc_local((parts, lanes), dtype)
            value = T.alloc_local((parts, lanes), dtype)
            result = T.alloc_local((lanes,), dtype)
            sums = T.alloc_local((3,), "float32")  # of products, stream squares, key squares
            of_warps = T.alloc_shared((2, 3, WARPS), "float32")
            gate = T.alloc_var("float32")
            turn = T.alloc_var("int32", init=0)
            for p in T.unroll(parts):
                if p * THREADS + thread < vectors:
                    for j in T.vectorized(lanes):
                        factors[p, j] = weight[stream, (p * THREADS + thread) * lanes + j]
            for step in T.serial(T.ceildiv(n - first, blocks)):
                row = first + step * blocks
                for p in T.unroll(parts):
                    if p * THREADS + thread < vectors:
                        for j in T.vectorized(lanes):
                            old[p, j] = streams[row, stream, (p * THREADS + thread) * lanes + j]
                        for j in T.vectorized(lanes):
                            key[p, j] = key_value[row, stream, (p * THREADS + thread) * lanes + j]
                        for j in T.vectorized(lanes):
                            value[p, j] = key_value[row, num_streams, (p * THREADS + thread) * lanes + j]
                for k in T.unroll(3):
                    sums[k] = 0.0
                for p in T.unroll(parts):
                    if p * THREADS + thread < vectors:
                        for j in T.unroll(lanes):
                            x = T.cast(old[p, j], "float32")
                            y = T.cast(key[p, j], "float32")
                            sums[0] += x * factors[p, j] * y
                            sums[1] += x * x
                            sums[2] += y * y
                # Two places in turn: a thread may still read the last row's sums.
                for k in T.unroll(3):
                    sums[k] = T.warp_reduce_sum(sums[k])
                    if thread % 32 == 0:
                        of_warps[turn, k, thread // 32] = sums[k]
                T.sync_threads()
                for k in T.unroll(3):
                    sums[k] = of_warps[turn, k, 0]
                    for w in T.unroll(1, WARPS):
                        sums[k] += of_warps[turn, k, w]
                norms = T.sqrt(sums[1] / width + eps) * T.sqrt(sums[2] / width + eps)
                dot = sums[0] / norms * width**-0.5
                root = T.sqrt(T.max(T.abs(dot), MIN_DOT))
                gate = 1.0 / (1.0 + T.exp(T.if_then_else(dot < 0.0, root, -root)))
                for p in T.unroll(parts):
                    if p * THREADS + thread < vectors:
                        for j in T.unroll(lanes):
                            change = gate * T.cast(value[p, j], "float32")
                            result[j] = T.cast(T.cast(old[p, j], "float32") + change, dtype)
                            if some_pass and passes[row] != T.uint8(0):
                                result[j] = old[p, j]
                        for j in T.vectorized(lanes):
                            out[row, stream, (p * THREADS + thread) * lanes + j] = result[j]
                turn = 1 - turn

    return gate_streams


def run(
    streams: Tensor, key_value: Tensor, weight: Tensor, eps: float, passes: Tensor | None = None
) -> Tensor:
    num_rows, num_streams, width = streams.shape
    out = torch.empty_like(streams)
    if num_rows == 0:
        return out
    blocks = min(num_rows, -(-BLOCKS_PER_SM * num_sms(streams.device) // num_streams))
    sizes = {"num_streams": num_streams, "width": width, "dtype": str(streams.dtype).removeprefix("torch.")}
    flags = out.new_empty(1, dtype=torch.uint8) if passes is None else passes.view(torch.uint8)
    kernel(**sizes, some_pass=passes is not None)(
        streams, key_value.view(num_rows, num_streams + 1, width), weight, flags, out, eps, blocks
    )
    return out
