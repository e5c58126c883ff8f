"""hash_ngrams on CUDA: a thread computes one row number.

Products and sums stay below 2^63, so unsigned arithmetic gives the same bits and its remainder is cheaper.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


def _builds(model):
    return [{"max_ngram": model.engram_max_ngram_size, "columns": model.engram_columns}]


@cuda_kernel(builds=_builds)
def kernel(max_ngram: int, columns: int):
    n, tables = T.dynamic("n"), T.dynamic("tables")
    heads = columns // (max_ngram - 1)

    @T.prim_func
    def hash_ngrams(
        ngram_ids: T.Tensor((n, max_ngram), "int32"),
        multipliers: T.Tensor((tables, max_ngram), "int64"),
        primes: T.Tensor((tables, columns), "int64"),
        offsets: T.Tensor((tables, columns), "int64"),
        rows: T.Tensor((tables, n, columns), "int32"),
    ):
        with T.Kernel(T.ceildiv(n * columns, THREADS), tables, threads=THREADS) as (block, table):
            flat = block * THREADS + T.get_thread_binding()
            token, column = flat // columns, flat % columns
            roll = T.alloc_var("uint64", init=T.uint64(0))
            if token < n:
                size = 2 + column // heads
                for back in T.unroll(max_ngram):
                    if back < size:
                        term = T.cast(ngram_ids[token, back], "uint64") * T.cast(
                            multipliers[table, back], "uint64"
                        )
                        roll = roll ^ term
                place = roll % T.cast(primes[table, column], "uint64")
                rows[table, token, column] = T.cast(place + T.cast(offsets[table, column], "uint64"), "int32")

    return hash_ngrams


def run(ngram_ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    (num_tables, columns), (num_rows, max_ngram) = primes.shape, ngram_ids.shape
    rows = torch.empty(num_tables, num_rows, columns, dtype=torch.int32, device=ngram_ids.device)
    program = kernel(max_ngram=max_ngram, columns=columns)
    program(ngram_ids.contiguous(), multipliers, primes, offsets, rows)
    return rows
