"""redistribute on CUDA: one block for each sequence ranks its drafts among all.

A draft's rank is the number of drafts before it in the order of the contract, found by comparing it with
every one. All blocks compute all survivals in the same way, so they agree on every comparison.
"""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.speculative.redistribute.reference import EDGE

THREADS = 128


@cuda_kernel(
    builds=lambda model: [
        {"width": drafts, "has_limits": True, "has_odds": True}
        for drafts in range(1, model.dspark_block_size + 1)
    ]
)
def kernel(width: int, has_limits: bool, has_odds: bool):
    num_seqs, num_before = T.dynamic("num_seqs"), T.dynamic("num_before")
    num_limits, num_odds = T.dynamic("num_limits"), T.dynamic("num_odds")

    @T.macro
    def values_of(seq, sources, survivals, limits, odds, value):
        """What the drafts of a sequence are worth."""
        source = T.alloc_var("int32", init=sources[seq])
        for j in tuple(range(width)):
            if source < 0:
                value[j] = 2.0 if has_limits else 0.0
            else:
                value[j] = survivals[source, j]
                if has_odds:
                    if value[j] > 0.0:
                        inside = T.min(T.max(value[j], T.float32(EDGE)), T.float32(1 - EDGE))
                        raised = T.ieee_mul(odds[j], inside)
                        rest = T.ieee_add(T.ieee_sub(T.float32(1.0), inside), raised)
                        value[j] = T.ieee_fdiv(raised, rest)
                    else:
                        value[j] = 0.0
                    if j > 0:
                        value[j] = T.ieee_mul(value[j], value[j - 1])
        if has_limits:
            for j in tuple(range(width)):
                if j + 1 >= limits[seq]:
                    value[j] = -1.0

    @T.prim_func
    def redistribute(
        sources: T.Tensor((num_seqs,), "int32"),
        survivals: T.Tensor((num_before, width), "float32"),
        limits: T.Tensor((num_limits,), "int32"),
        odds: T.Tensor((num_odds,), "float32"),
        seqlens_q: T.Tensor((num_seqs,), "int32"),
        num_extra: T.int32,
    ):
        with T.Kernel(num_seqs, threads=THREADS) as seq:
            thread = T.get_thread_binding()
            own = T.alloc_local((width,), "float32")
            other = T.alloc_local((width,), "float32")
            counted = T.alloc_local((width,), "int32")
            rank = T.alloc_shared((width,), "int32")
            if thread < width:
                rank[thread] = 0
            T.sync_threads()
            values_of(seq, sources, survivals, limits, odds, own)
            for j in T.unroll(width):
                counted[j] = 0
            for i in T.serial(T.ceildiv(num_seqs, THREADS)):
                rival = T.alloc_var("int32", init=i * THREADS + thread)
                if rival < num_seqs:
                    values_of(rival, sources, survivals, limits, odds, other)
                    for j in tuple(range(width)):
                        for k in tuple(range(width)):
                            is_first = rival < seq or (rival == seq and k < j)
                            if other[k] > own[j] or (other[k] == own[j] and is_first):
                                counted[j] = counted[j] + 1
            for j in T.unroll(width):
                T.atomic_add(rank[j], counted[j])
            T.sync_threads()
            if thread == 0:
                rows = T.alloc_var("int32", init=1)
                for j in T.unroll(width):
                    if rank[j] < num_extra:
                        rows = rows + 1
                seqlens_q[seq] = rows

    return redistribute


def run(
    num_rows: int, sources: Tensor, survivals: Tensor, limits: Tensor | None, confidence_odds: Tensor | None
) -> Tensor:
    seqlens_q = sources.new_empty(sources.shape)
    if survivals.shape[1] == 0 or sources.shape[0] == 0:
        return seqlens_q.fill_(1)
    program = kernel(
        width=survivals.shape[1], has_limits=limits is not None, has_odds=confidence_odds is not None
    )
    limits = sources if limits is None else limits  # what is not read may be anything of the kind
    odds = survivals[0] if confidence_odds is None else confidence_odds
    program(sources, survivals, limits, odds, seqlens_q, num_rows - sources.shape[0])
    return seqlens_q
