"""store_main on CUDA: a thread encodes 16 channels, which share a scale, to two words."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import (
    amax_bits,
    e2m1_aligned,
    fp4_quotient,
    fp4_scale,
    pack_e2m1,
    record_row,
)
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import FP4_GROUP
from tilelang_ops.common.records import flat_rows, rows_per_part
from tilelang_ops.kv_cache.copy_records.cuda import run_store_floats

CHANNELS = 16  # of a thread: two words of codes
THREADS = 128
# Bits of 6 * 2^-6 and 6 * 448: between them a scale has four bits and no quotient reaches 7.
SMALLEST, LARGEST = 0x3DC00000, 0x45280000


@cuda_kernel(builds=lambda model: [{"width": model.head_dim, "source": "bfloat16"}])
def kernel(width: int, source: str):
    n, rows = T.dynamic("n"), T.dynamic("rows")
    chunks, fields = width // CHANNELS, width // 2 + width // FP4_GROUP

    @T.prim_func
    def store_main(
        values: T.Tensor((n, width), source),
        index: T.Tensor((n,), "int64"),
        codes: T.Tensor((rows, fields // 4), "int32"),
        scales: T.Tensor((rows, fields), "float8_e4m3fn"),
        records: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * chunks, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, chunk = flat // chunks, flat % chunks
            x = T.alloc_local((CHANNELS,), "float32")
            y = T.alloc_local((CHANNELS,), "int32")
            word = T.alloc_local((2,), "int32")
            record = T.alloc_var("int32", init=-1)
            largest = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            if row < n:
                record = T.cast(index[row], "int32")
                for j in T.vectorized(CHANNELS):
                    x[j] = T.cast(values[row, chunk * CHANNELS + j], "float32")
                for j in T.unroll(CHANNELS):
                    largest = T.max(largest, T.abs(x[j]))
                    total = total + T.abs(x[j])
            amax = T.alloc_var("int32", init=amax_bits(largest, total))
            if record >= 0:
                target = T.alloc_var("int32", init=record_row(record, records, stride))
                stored = T.alloc_var("float8_e4m3fn", init=fp4_scale(amax))
                scale = T.alloc_var("float32", init=T.cast(stored, "float32"))
                inverse = T.alloc_var("float32", init=T.ieee_frcp(scale))
                for j in T.unroll(CHANNELS):
                    y[j] = e2m1_aligned(fp4_quotient(x[j], scale, inverse))
                if amax < SMALLEST or amax > LARGEST:
                    for j in T.unroll(CHANNELS):
                        y[j] = T.min(y[j], 7 << 22)
                word[0] = pack_e2m1([y[j] for j in range(8)], [x[j] for j in range(8)])
                word[1] = pack_e2m1([y[j] for j in range(8, 16)], [x[j] for j in range(8, 16)])
                for i in T.vectorized(2):
                    codes[target, chunk * 2 + i] = word[i]
                scales[target, width // 2 + chunk] = stored

    return store_main


def run(values: Tensor, pool: Tensor, index: Tensor) -> None:
    if pool.dtype != torch.uint8:
        run_store_floats(values, pool, index)
        return
    source, width = str(values.dtype).removeprefix("torch."), values.shape[1]
    assert width % 64 == 0, f"{width=}: codes are written in words"
    records = flat_rows(pool)
    program = kernel(width=width, source=source)
    codes, scales = records.view(torch.int32), records.view(torch.float8_e4m3fn)
    values, index = values.contiguous(), index.contiguous()
    program(values, index, codes, scales, pool.shape[1], rows_per_part(pool))
