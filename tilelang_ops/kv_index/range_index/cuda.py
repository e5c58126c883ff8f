"""range_index on CUDA: a thread finds its run by bisection and its record in it."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
STEPS = 20  # of the bisection: runs of up to 2^20 sequences


@cuda_kernel(builds=lambda model: [{"is_paged": p} for p in (False, True)])
def kernel(is_paged: bool):
    num_seqs, width, total = T.dynamic("num_seqs"), T.dynamic("width"), T.dynamic("total")
    num_bounds = T.dynamic("num_bounds")

    @T.prim_func
    def range_index(
        cu_lens: T.Tensor((num_bounds,), "int32"),
        firsts: T.Tensor((num_seqs,), "int32"),
        tables: T.Tensor((num_seqs, width), "int32"),
        out: T.Tensor((total,), "int64"),
        part_size: T.int32,
    ):
        with T.Kernel(T.ceildiv(total, THREADS), threads=THREADS) as block:
            # Conditions on a register lower several times faster than on an expression of threads.
            place = T.alloc_var("int32", init=block * THREADS + T.get_thread_binding())
            low = T.alloc_var("int32", init=0)  # the run begins at or before the place
            high = T.alloc_var("int32", init=num_seqs)  # and this one behind it
            record = T.alloc_var("int64", init=T.int64(-1))
            if place < total:
                for _ in T.serial(STEPS):
                    if high - low > 1:
                        middle = T.alloc_var("int32", init=(low + high) // 2)
                        if cu_lens[middle] <= place:
                            low = middle
                        else:
                            high = middle
                item = T.alloc_var("int32", init=firsts[low] + place - cu_lens[low])
                if place < cu_lens[low + 1] and item >= 0:
                    part = T.cast(T.cast(item, "uint32") // T.cast(part_size, "uint32"), "int32")
                    rest = T.cast(T.cast(item, "uint32") % T.cast(part_size, "uint32"), "int32")
                    column = T.alloc_var("int32", init=0)
                    if is_paged:
                        column = part
                    record = T.cast(tables[low, column], "int64") * part_size + rest
                out[place] = record

    return range_index


def run(
    cu_lens: Tensor, firsts: Tensor, tables: Tensor, total: int, part_size: int, is_paged: bool
) -> Tensor:
    out = torch.empty(total, dtype=torch.int64, device=cu_lens.device)
    kernel(is_paged=is_paged)(cu_lens, firsts, tables.contiguous(), out, part_size)
    return out
