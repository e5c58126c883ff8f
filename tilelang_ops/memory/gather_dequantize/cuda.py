"""gather_dequantize on CUDA: a thread widens a few channels of several rows.

The table may lie in the pinned memory of the host: the kernel then reads the rows it needs over the bus.
"""

import math

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import e4m3_value, e8m0_value
from tilelang_ops.common.host_memory import device_view
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import MX_GROUP

THREADS = 128
LANES = 8  # channels of a row that a thread reads at once: a store of 16 bytes in bfloat16
DEPTH = 2  # rows that it has in flight


def _builds(model):
    return [{"width": model.engram_head_dim, "lanes": LANES, "depth": DEPTH, "result": "bfloat16"}]


# The caller's indices are in range; TileLang's own guards would double the loads' code.
@cuda_kernel(builds=_builds, pass_configs={"tl.disable_safe_memory_legalize": True})
def kernel(width: int, lanes: int, depth: int, result: str):
    """Rows of E4M3 with E8M0 scales; `width` is a multiple of 32."""
    n, rows = T.dynamic("n"), T.dynamic("rows", "int64")
    pieces = width // lanes
    stored = min(lanes, 8 if result == "bfloat16" else 4)  # channels of one store

    @T.prim_func
    def gather_dequantize(
        table: T.Tensor((rows, width), "uint8"),
        scales: T.Tensor((rows, width // MX_GROUP), "uint8"),
        index: T.Tensor((n,), "int32"),
        out: T.Tensor((n, width), result),
    ):
        with T.Kernel(T.ceildiv(n * pieces, THREADS * depth), threads=THREADS) as block:
            first = block * THREADS * depth + T.get_thread_binding()
            codes = T.alloc_local((depth, lanes), "uint8")
            scale = T.alloc_local((depth,), "float32")
            row = T.alloc_local((depth,), "int64")
            values = T.alloc_local((stored,), result)
            for d in T.unroll(depth):
                row[d] = T.int64(0)
                if (first + d * THREADS) // pieces < n:
                    row[d] = T.cast(index[(first + d * THREADS) // pieces], "int64")
            for d in T.unroll(depth):
                piece = (first + d * THREADS) % pieces
                for j in T.vectorized(lanes):
                    codes[d, j] = table[row[d], piece * lanes + j]
                scale[d] = e8m0_value(T.cast(scales[row[d], piece * lanes // MX_GROUP], "int32"))
            for d in T.unroll(depth):
                place, piece = (first + d * THREADS) // pieces, (first + d * THREADS) % pieces
                if place < n:
                    for k in T.unroll(lanes // stored):
                        for j in T.unroll(stored):
                            values[j] = T.cast(e4m3_value(codes[d, k * stored + j]) * scale[d], result)
                        for j in T.vectorized(stored):
                            out[place, piece * lanes + k * stored + j] = values[j]

    return gather_dequantize


@cuda_kernel(
    builds=lambda model: [{"width": model.dspark_markov_rank, "source": "bfloat16", "result": "bfloat16"}]
)
def gather_rows(width: int, source: str, result: str):
    """Rows without scales."""
    n, rows = T.dynamic("n"), T.dynamic("rows", "int64")
    lanes = math.gcd(width, 4)
    pieces = width // lanes

    @T.prim_func
    def gather_rows(
        table: T.Tensor((rows, width), source),
        index: T.Tensor((n,), "int32"),
        out: T.Tensor((n, width), result),
    ):
        with T.Kernel(T.ceildiv(n * pieces, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            place, piece = flat // pieces, flat % pieces
            if place < n:
                row = T.cast(index[place], "int64")
                for j in T.vectorized(lanes):
                    out[place, piece * lanes + j] = T.cast(table[row, piece * lanes + j], result)

    return gather_rows


def run(table: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    width, flat = table.shape[1], index.reshape(-1)
    out = torch.empty(flat.shape[0], width, dtype=dtype, device=index.device)
    result = str(dtype).removeprefix("torch.")
    table = device_view(table, index.device)
    if scales is None:
        source = str(table.dtype).removeprefix("torch.")
        gather_rows(width=width, source=source, result=result)(table, flat, out)
    else:
        scales = device_view(scales.view(torch.uint8), index.device)
        kernel(width=width, lanes=LANES, depth=DEPTH, result=result)(
            table.view(torch.uint8), scales, flat, out
        )
    return out.view(*index.shape, width)
