"""copy_records on CUDA: a thread moves up to three times 16 bytes of a record."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import record_row
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.records import flat_rows, rows_per_part

THREADS = 128


def _builds(model):
    return [{"words": (model.head_dim + model.head_dim // 32) // 4, "lanes": 4}]  # window records


@cuda_kernel(builds=_builds)
def kernel(words: int, lanes: int):
    """Records of `words` 32-bit words, `lanes` of them for a thread."""
    n, src_rows, dst_rows = T.dynamic("n"), T.dynamic("src_rows"), T.dynamic("dst_rows")
    repeats = 3 if words // lanes % 3 == 0 else 1  # a record of 528 bytes has 33 pieces
    pieces = words // lanes // repeats

    @T.prim_func
    def copy_records(
        src: T.Tensor((src_rows, words), "int32"),
        src_index: T.Tensor((n,), "int64"),
        dst: T.Tensor((dst_rows, words), "int32"),
        dst_index: T.Tensor((n,), "int64"),
        src_records: T.int32,
        src_stride: T.int32,
        dst_records: T.int32,
        dst_stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * pieces, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            pair, piece = flat // pieces, flat % pieces
            source = T.alloc_var("int32", init=-1)
            target = T.alloc_var("int32", init=-1)
            moved = T.alloc_local((repeats, lanes), "int32")
            if pair < n:
                source = T.cast(src_index[pair], "int32")
                target = T.cast(dst_index[pair], "int32")
            if source >= 0 and target >= 0:
                source = record_row(source, src_records, src_stride)
                target = record_row(target, dst_records, dst_stride)
                for i in T.unroll(repeats):
                    for j in T.vectorized(lanes):
                        moved[i, j] = src[source, (i * pieces + piece) * lanes + j]
                for i in T.unroll(repeats):
                    for j in T.vectorized(lanes):
                        dst[target, (i * pieces + piece) * lanes + j] = moved[i, j]

    return copy_records


@cuda_kernel(builds=lambda model: [])
def store_floats(width: int, source: str):
    """Vectors written as they are, to pools of float32."""
    n, rows = T.dynamic("n"), T.dynamic("rows")

    @T.prim_func
    def store_floats(
        values: T.Tensor((n, width), source),
        index: T.Tensor((n,), "int64"),
        pool: T.Tensor((rows, width), "float32"),
        records: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * width, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, channel = flat // width, flat % width
            record = T.alloc_var("int32", init=-1)
            if row < n:
                record = T.cast(index[row], "int32")
            if record >= 0:
                record = record_row(record, records, stride)
                pool[record, channel] = T.cast(values[row, channel], "float32")

    return store_floats


def run(src: Tensor, src_index: Tensor, dst: Tensor, dst_index: Tensor) -> None:
    src_words, dst_words = (flat_rows(pool).view(torch.int32) for pool in (src, dst))
    is_aligned = all(
        words.shape[1] % 4 == 0 and words.data_ptr() % 16 == 0 for words in (src_words, dst_words)
    )
    program = kernel(words=src_words.shape[1], lanes=4 if is_aligned else 1)
    program(
        src_words,
        src_index.contiguous(),
        dst_words,
        dst_index.contiguous(),
        src.shape[1],
        rows_per_part(src),
        dst.shape[1],
        rows_per_part(dst),
    )


def run_store_floats(values: Tensor, pool: Tensor, index: Tensor) -> None:
    """The store of any record kind into a pool of float32."""
    program = store_floats(width=values.shape[1], source=str(values.dtype).removeprefix("torch."))
    values, index = values.contiguous(), index.contiguous()
    program(values, index, flat_rows(pool), pool.shape[1], rows_per_part(pool))
