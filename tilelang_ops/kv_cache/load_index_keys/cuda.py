"""load_index_keys on CUDA: a thread decodes 8 channels."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import e2m1_value, e8m0_value, record_row
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import MX_GROUP
from tilelang_ops.common.records import flat_rows, rows_per_part
from tilelang_ops.kv_cache.load_records.cuda import run as load_records

CHANNELS = 8  # of a thread: one word of codes
THREADS = 128


@cuda_kernel(builds=lambda model: [{"width": model.index_head_dim, "result": "bfloat16"}])
def kernel(width: int, result: str):
    n, rows = T.dynamic("n"), T.dynamic("rows")
    scale_rows = T.dynamic("scale_rows", "int64")  # a large pool has more than an int32 counts
    chunks = width // CHANNELS

    @T.prim_func
    def load_index_keys(
        codes: T.Tensor((rows, width // 8), "int32"),
        scales: T.Tensor((scale_rows, width // MX_GROUP), "uint8"),
        index: T.Tensor((n,), "int64"),
        out: T.Tensor((n, width), result),
        records: T.int32,
        stride: T.int32,
        scale_stride: T.int32,
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
                    place = T.alloc_var("int32", init=record_row(record, records, stride))
                    word = T.alloc_var("int32", init=codes[place, chunk])
                    place = record_row(record, records, scale_stride)
                    byte = T.cast(scales[place, chunk * CHANNELS // MX_GROUP], "int32")
                    scale = T.alloc_var("float32", init=e8m0_value(byte))
                    for j in T.unroll(CHANNELS):
                        x[j] = e2m1_value((word >> (4 * j)) & 15) * scale
                for j in T.vectorized(CHANNELS):
                    out[row, chunk * CHANNELS + j] = T.cast(x[j], result)

    return load_index_keys


def run(codes: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return load_records(codes, index, codes.shape[2], dtype)
    width = 2 * codes.shape[2]
    index = index.contiguous()
    out = torch.empty(index.shape[0], width, dtype=dtype, device=codes.device)
    program = kernel(width=width, result=str(dtype).removeprefix("torch."))
    words = flat_rows(codes).view(torch.int32)
    strides = rows_per_part(codes), rows_per_part(scales)
    program(words, flat_rows(scales), index, out, codes.shape[1], *strides)
    return out
