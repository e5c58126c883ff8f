"""load_records on CUDA: a thread decodes 16 channels."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import e2m1_value, e8m0_value, record_row
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import E4M3, FP4_GROUP, MX_GROUP
from tilelang_ops.common.records import flat_rows, rows_per_part

CHANNELS = 16  # of a thread
THREADS = 128


@cuda_kernel(builds=lambda model: [{"width": model.head_dim, "result": "bfloat16"}])
def load_fp8(width: int, result: str):
    n, rows = T.dynamic("n"), T.dynamic("rows")
    chunks, fields = width // CHANNELS, width + width // MX_GROUP

    @T.prim_func
    def load_fp8(
        codes: T.Tensor((rows, fields), "float8_e4m3fn"),
        scales: T.Tensor((rows, fields), "uint8"),
        index: T.Tensor((n,), "int64"),
        out: T.Tensor((n, width), result),
        records: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * chunks, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, chunk = flat // chunks, flat % chunks
            x = T.alloc_local((CHANNELS,), "float32")
            if row < n:
                record = T.alloc_var("int32", init=T.cast(index[row], "int32"))
                for j in T.unroll(CHANNELS):
                    x[j] = 0.0
                if record >= 0:
                    record = record_row(record, records, stride)
                    byte = T.cast(scales[record, width + chunk * CHANNELS // MX_GROUP], "int32")
                    scale = T.alloc_var("float32", init=e8m0_value(byte))
                    for j in T.vectorized(CHANNELS):
                        x[j] = T.cast(codes[record, chunk * CHANNELS + j], "float32") * scale
                for j in T.vectorized(CHANNELS):
                    out[row, chunk * CHANNELS + j] = T.cast(x[j], result)

    return load_fp8


@cuda_kernel(builds=lambda model: [{"width": model.head_dim, "result": "bfloat16"}])
def load_fp4(width: int, result: str):
    n, rows = T.dynamic("n"), T.dynamic("rows")
    chunks, fields = width // CHANNELS, width // 2 + width // FP4_GROUP

    @T.prim_func
    def load_fp4(
        codes: T.Tensor((rows, fields // 4), "int32"),
        scales: T.Tensor((rows, fields), "float8_e4m3fn"),
        index: T.Tensor((n,), "int64"),
        out: T.Tensor((n, width), result),
        records: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * chunks, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, chunk = flat // chunks, flat % chunks
            word = T.alloc_local((2,), "int32")
            x = T.alloc_local((CHANNELS,), "float32")
            if row < n:
                record = T.alloc_var("int32", init=T.cast(index[row], "int32"))
                for j in T.unroll(CHANNELS):
                    x[j] = 0.0
                if record >= 0:
                    record = record_row(record, records, stride)
                    for i in T.vectorized(2):
                        word[i] = codes[record, chunk * 2 + i]
                    stored = scales[record, width // 2 + chunk]
                    scale = T.alloc_var("float32", init=T.cast(stored, "float32"))
                    for j in T.unroll(CHANNELS):
                        x[j] = e2m1_value((word[j // 8] >> (j % 8 * 4)) & 15) * scale
                for j in T.vectorized(CHANNELS):
                    out[row, chunk * CHANNELS + j] = T.cast(x[j], result)

    return load_fp4


@cuda_kernel(builds=lambda model: [])
def load_floats(width: int, result: str):
    n, rows = T.dynamic("n"), T.dynamic("rows")

    @T.prim_func
    def load_floats(
        pool: T.Tensor((rows, width), "float32"),
        index: T.Tensor((n,), "int64"),
        out: T.Tensor((n, width), result),
        records: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * width, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, channel = flat // width, flat % width
            x = T.alloc_var("float32", init=0.0)
            if row < n:
                record = T.alloc_var("int32", init=T.cast(index[row], "int32"))
                if record >= 0:
                    record = record_row(record, records, stride)
                    x = pool[record, channel]
                out[row, channel] = T.cast(x, result)

    return load_floats


def run(pool: Tensor, index: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    index = index.contiguous()
    out = torch.empty(index.shape[0], width, dtype=dtype, device=pool.device)
    sizes = {"width": width, "result": str(dtype).removeprefix("torch.")}
    rows = flat_rows(pool)
    places = pool.shape[1], rows_per_part(pool)
    if pool.dtype != torch.uint8:
        load_floats(**sizes)(rows, index, out, *places)
    elif pool.shape[2] == width + width // MX_GROUP:
        load_fp8(**sizes)(rows.view(E4M3), rows, index, out, *places)
    else:
        assert width % 64 == 0, f"{width=}: codes are read in words"
        load_fp4(**sizes)(rows.view(torch.int32), rows.view(E4M3), index, out, *places)
    return out
