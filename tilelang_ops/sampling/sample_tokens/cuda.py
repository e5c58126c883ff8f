"""sample_tokens on CUDA: a block per row, see `common/cuda_rows` for how the cut is found.

greedy         one walk
plain draw     one walk: the draw needs no largest score
truncated      two walks; the draw among the tokens that stay for certain is part of the second, those of
               the list are added behind it
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common import cuda_rows as rows
from tilelang_ops.common.kernels import cuda_kernel

SIZES = {"num_threads": 256, "capacity": 8192, "unroll": 4}


@T.macro
def _first_of(r, base, group):
    rows.watch(r, base, group)
    for j in T.unroll(4):
        if group * 4 + j < r.vocab:
            r.best[0] = T.max(r.best[0], rows.pack(r, r.raw[base + j], group * 4 + j))


@T.macro
def _survey(r, base, group):
    if rows.largest(r.scores, base) >= r.floor[0]:
        rows.survey_group(r, base)
        at = rows.largest(r.places, 0)
        if at >= r.low[0] or at >= r.k_place[0]:
            rows.collect(r, base, group)
        if at > r.high[0]:
            rows.keep_for_draw(r, base, group, r.high[0])


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, **SIZES}],
    pass_configs=rows.OPTIONS,
)
def kernel(vocab: int, num_threads: int, capacity: int, unroll: int):
    n = T.dynamic("n")

    @T.prim_func
    def sample_tokens(
        logits: T.Tensor((n, vocab), "float32"),
        inv_temperature: T.Tensor((n,), "float32"),
        top_ks: T.Tensor((n,), "int32"),
        top_ps: T.Tensor((n,), "float32"),
        log_min_ps: T.Tensor((n,), "float32"),
        seeds: T.Tensor((n,), "int64"),
        token_index: T.Tensor((n,), "int64"),
        token_ids: T.Tensor((n,), "int32"),
        best: T.Tensor((n,), "float32"),
        domain: T.int32,
    ):
        with T.Kernel(n, threads=num_threads) as row:
            T.annotate_min_blocks_per_sm(2)
            r = rows.Row(logits, row, vocab, num_threads, capacity, unroll)
            r.top_k[0] = T.if_then_else(top_ks[row] < vocab, top_ks[row], 0)
            r.top_p[0] = top_ps[row]
            log_min_p = log_min_ps[row]
            rows.set_stream(r, seeds[row], token_index[row], domain)
            is_cut = r.top_k[0] > 0 or r.top_p[0] < T.float32(1.0) or log_min_p > -T.infinity("float32")
            token = T.alloc_local((1,), "int32")
            is_sure = T.alloc_local((1,), "int32")
            token[0] = 0

            r.scale[0] = inv_temperature[row]
            if r.scale[0] == T.float32(0.0):
                r.scale[0] = T.float32(1.0)
                r.best[0] = T.uint64(0)
                rows.start_watch(r)
                rows.walk(r, _first_of)
                rows.finish_watch(r)
                rows.reduce_block(r, r.best, rows.larger)
            else:
                r.is_exact[0] = 0
                is_sure[0] = 0
                if is_cut:
                    rows.count_places(r)
                while is_sure[0] == 0:
                    is_sure[0] = 1
                    if is_cut:
                        if rows.is_whole(r):
                            rows.find_cut(r, log_min_p, _survey)
                            rows.draw_from_list(r)
                    else:
                        rows.start_plain_draw(r)
                        rows.walk(r, rows.draw_group)
                        rows.finish_watch(r)
                    if rows.is_whole(r):
                        rows.finish_draw(r)
                        if is_cut and r.is_exact[0] == 0:
                            winner = rows.packed_token(r, r.best[0])
                            score = rows.keep(logits[row, winner] * r.scale[0])
                            key = rows.pack(r, score, winner)
                            at = rows.place(r, score)
                            if not (at > r.high[0] or key >= r.sure_cut[0]):
                                is_sure[0] = 0
                                r.is_exact[0] = 1
            if rows.is_whole(r):
                token[0] = rows.packed_token(r, r.best[0])
            if r.thread == 0:
                token_ids[row] = token[0]
                best[row] = T.if_then_else(
                    r.is_broken[0] == 0, r.raw_peak[0], T.reinterpret(T.int32(0x7FC00000), "float32")
                )

    return sample_tokens


def run(
    logits: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    domain: int,
    **sizes: int,
) -> tuple[Tensor, Tensor]:
    num_rows, vocab = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    program = kernel(vocab=vocab, **(sizes or SIZES))
    log_min_p = torch.log(min_p.double()).float()
    program(
        logits.contiguous(),
        inv_temperature.contiguous(),
        top_k.contiguous(),
        top_p.contiguous(),
        log_min_p,
        seeds.contiguous(),
        token_index.contiguous(),
        token_ids,
        best,
        domain,
    )
    return token_ids, best
