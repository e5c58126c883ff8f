"""truncate_scores on CUDA: a block per row finds the cut (`cuda_rows`); one more walk applies it."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common import cuda_rows as rows
from tilelang_ops.common.kernels import cuda_kernel

SIZES = {"num_threads": 512, "capacity": 4096, "unroll": 2}


@T.macro
def _survey(r, base, group):
    if rows.largest(r.scores, base) >= r.floor[0]:
        rows.survey_group(r, base)
        if rows.largest(r.places, 0) >= r.lowest[0]:
            rows.collect(r, base, group)
        else:
            rows.whole_branch(r)
    else:
        rows.whole_branch(r)


@T.macro
def _keep(r, base, group):
    for j in T.unroll(4):
        key = rows.pack(r, r.scores[base + j], group * 4 + j)
        if key < r.cut[0] or not (r.scores[base + j] >= r.floor[0]):
            r.scores[base + j] = -T.infinity("float32")
    if r.vocab % 4 == 0:
        if group < r.groups:
            for j in T.vectorized(4):
                r.out[r.row, group * 4 + j] = r.scores[base + j]
    else:
        for j in T.unroll(4):
            if group * 4 + j < r.vocab:
                r.out[r.row, group * 4 + j] = r.scores[base + j]


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, **SIZES}],
    pass_configs=rows.OPTIONS,
)
def kernel(vocab: int, num_threads: int, capacity: int, unroll: int):
    n = T.dynamic("n")

    @T.prim_func
    def truncate_scores(
        scores: T.Tensor((n, vocab), "float32"),
        top_ks: T.Tensor((n,), "int32"),
        top_ps: T.Tensor((n,), "float32"),
        min_ps: T.Tensor((n,), "float32"),
        out: T.Tensor((n, vocab), "float32"),
    ):
        with T.Kernel(n, threads=num_threads) as row:
            T.annotate_min_blocks_per_sm(2)
            r = rows.CutRow(scores, row, vocab, num_threads, capacity, unroll, out)
            r.top_k[0] = T.if_then_else(top_ks[row] < vocab, top_ks[row], 0)
            r.top_p[0] = top_ps[row]
            log_min_p = rows.keep(T.cast(T.log(T.cast(min_ps[row], "float64")), "float32"))
            is_sure = T.alloc_local((1,), "int32")
            r.scale[0] = T.float32(1.0)
            r.floor[0] = T.float32(rows.LOWEST)
            r.cut[0] = T.uint64(0)
            r.is_exact[0] = 0
            if r.top_k[0] > 0 or r.top_p[0] < T.float32(1.0) or log_min_p > -T.infinity("float32"):
                rows.look(r, log_min_p)
                is_sure[0] = T.if_then_else(rows.is_whole(r), 0, 1)
                r.cut[0] = ~T.uint64(0)
                while is_sure[0] == 0:
                    rows.find_cut(r, _survey)
                    is_sure[0] = 1
                    if r.cut[0] != r.sure_cut[0]:
                        is_sure[0] = 0
                        rows.narrow(r)
                    else:
                        rows.whole_branch(r)
            else:
                rows.whole_branch(r)
            rows.walk(r, _keep)

    return truncate_scores


def run(
    scores: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    out: Tensor,
    **sizes: int,
) -> Tensor:
    program = kernel(vocab=scores.shape[1], **(sizes or SIZES))
    program(scores.contiguous(), top_k.contiguous(), top_p.contiguous(), min_p.contiguous(), out)
    return out
