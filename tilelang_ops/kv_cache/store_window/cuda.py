"""store_window on CUDA: a thread encodes 16 channels, two neighbours share a scale."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import (
    amax_bits,
    e8m0_inverse,
    fp8_scale_byte,
    record_row,
)
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import E4M3, MX_GROUP
from tilelang_ops.common.records import flat_rows, rows_per_part
from tilelang_ops.kv_cache.copy_records.cuda import run_store_floats

CHANNELS = 16  # of a thread
THREADS = 128


@cuda_kernel(builds=lambda model: [{"width": model.head_dim, "source": "bfloat16"}])
def kernel(width: int, source: str):
    n, rows = T.dynamic("n"), T.dynamic("rows")
    chunks, fields = width // CHANNELS, width + width // MX_GROUP

    @T.prim_func
    def store_window(
        values: T.Tensor((n, width), source),
        index: T.Tensor((n,), "int64"),
        codes: T.Tensor((rows, fields), "float8_e4m3fn"),
        scales: T.Tensor((rows, fields), "uint8"),
        records: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * chunks, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, chunk = flat // chunks, flat % chunks
            x = T.alloc_local((CHANNELS,), "float32")
            code = T.alloc_local((CHANNELS,), "float8_e4m3fn")
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
            amax = T.max(amax, T.shfl_xor(amax, 1))
            if record >= 0:
                target = T.alloc_var("int32", init=record_row(record, records, stride))
                byte = T.alloc_var("int32", init=fp8_scale_byte(amax))
                inverse = T.alloc_var("float32", init=e8m0_inverse(byte))
                for j in T.vectorized(CHANNELS):
                    code[j] = T.cast(x[j] * inverse, "float8_e4m3fn")
                for j in T.vectorized(CHANNELS):
                    codes[target, chunk * CHANNELS + j] = code[j]
                if chunk % 2 == 0:
                    scales[target, width + chunk // 2] = T.cast(byte, "uint8")

    return store_window


def run(values: Tensor, pool: Tensor, index: Tensor) -> None:
    if pool.dtype != torch.uint8:
        run_store_floats(values, pool, index)
        return
    source, width = str(values.dtype).removeprefix("torch."), values.shape[1]
    records = flat_rows(pool)
    program = kernel(width=width, source=source)
    program(
        values.contiguous(),
        index.contiguous(),
        records.view(E4M3),
        records,
        pool.shape[1],
        rows_per_part(pool),
    )
