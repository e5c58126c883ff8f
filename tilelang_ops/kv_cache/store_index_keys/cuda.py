"""store_index_keys on CUDA: a thread encodes 16 channels to two words, two neighbours share a scale."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import (
    amax_bits,
    e2m1_aligned,
    e8m0_inverse,
    mxfp4_scale_byte,
    pack_e2m1,
    record_row,
)
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import MX_GROUP
from tilelang_ops.common.records import flat_rows, rows_per_part
from tilelang_ops.kv_cache.copy_records.cuda import run_store_floats

CHANNELS = 16  # of a thread: two words of codes
THREADS = 128


@cuda_kernel(builds=lambda model: [{"width": model.index_head_dim, "source": "bfloat16"}])
def kernel(width: int, source: str):
    n, rows = T.dynamic("n"), T.dynamic("rows")
    scale_rows = T.dynamic("scale_rows", "int64")  # a large pool has more than an int32 counts
    chunks = width // CHANNELS

    @T.prim_func
    def store_index_keys(
        keys: T.Tensor((n, width), source),
        index: T.Tensor((n,), "int64"),
        codes: T.Tensor((rows, width // 8), "int32"),
        scales: T.Tensor((scale_rows, width // MX_GROUP), "uint8"),
        records: T.int32,
        stride: T.int32,
        scale_stride: T.int32,
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
                    x[j] = T.cast(keys[row, chunk * CHANNELS + j], "float32")
                for j in T.unroll(CHANNELS):
                    largest = T.max(largest, T.abs(x[j]))
                    total = total + T.abs(x[j])
            amax = T.alloc_var("int32", init=amax_bits(largest, total))
            amax = T.max(amax, T.shfl_xor(amax, 1))
            if record >= 0:
                target = T.alloc_var("int32", init=record_row(record, records, stride))
                byte = T.alloc_var("int32", init=mxfp4_scale_byte(amax))
                inverse = T.alloc_var("float32", init=e8m0_inverse(byte))
                for j in T.unroll(CHANNELS):
                    y[j] = e2m1_aligned(x[j] * inverse)
                word[0] = pack_e2m1([y[j] for j in range(8)], [x[j] for j in range(8)])
                word[1] = pack_e2m1([y[j] for j in range(8, 16)], [x[j] for j in range(8, 16)])
                for i in T.vectorized(2):
                    codes[target, chunk * 2 + i] = word[i]
                if chunk % 2 == 0:
                    scale_target = T.alloc_var("int32", init=record_row(record, records, scale_stride))
                    scales[scale_target, chunk // 2] = T.cast(byte, "uint8")

    return store_index_keys


def run(keys: Tensor, codes: Tensor, scales: Tensor | None, index: Tensor) -> None:
    if scales is None:
        run_store_floats(keys, codes, index)
        return
    width = keys.shape[1]
    program = kernel(width=width, source=str(keys.dtype).removeprefix("torch."))
    words = flat_rows(codes).view(torch.int32)
    keys, index = keys.contiguous(), index.contiguous()
    program(
        keys, index, words, flat_rows(scales), codes.shape[1], rows_per_part(codes), rows_per_part(scales)
    )
