"""sample_tokens on CUDA: a block per row, see `common/cuda_rows` for how the cut is found.

greedy         one walk
plain draw     one walk: the draw needs no largest score
truncated      one walk where all that may stay is in its list, else mostly two; the draw among the tokens
               that stay for certain is part of the second, those of the list are added behind it
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common import cuda_rows as rows
from tilelang_ops.common.kernels import cuda_kernel

SIZES = {"num_threads": 512, "capacity": 4096, "unroll": 2}


class SampledRow(rows.CutRow):
    """With the group of a thread's largest logit."""

    def __init__(self, *args):
        super().__init__(*args)
        self.group = T.alloc_local((1,), "int32")
        self.log_min_p = T.alloc_shared((1,), "float32")
        self.above = rows.keep_for_draw
        self.unroll_guess = 1


@T.macro
def _first_of(r, base, group):
    """A thread's groups ascend, so the first of equal ones stays."""
    top = rows.largest(r.raw, base)
    total = (r.raw[base] + r.raw[base + 1]) + (r.raw[base + 2] + r.raw[base + 3])
    if rows.is_nan(total) == 1:
        r.is_broken[0] = 1
    if top > r.raw_peak[0]:
        r.raw_peak[0] = top
        r.group[0] = group
    else:
        rows.whole_branch(r)


@T.macro
def _pack_first(r):
    """This thread's best token."""
    rows.load_group(r, r.group[0], 0, r.raw)
    r.best[0] = T.uint64(0)
    for j in T.unroll(4):
        if r.group[0] * 4 + j < r.vocab:
            r.best[0] = T.max(r.best[0], rows.pack(r, r.raw[j], r.group[0] * 4 + j))
        else:
            rows.whole_branch(r)


@T.macro
def _put_best(r, best, row):
    if r.thread == 0:
        nan = T.reinterpret(T.int32(0x7FC00000), "float32")
        best[row] = T.if_then_else(r.is_broken[0] == 0, r.raw_peak[0], nan)
    else:
        rows.whole_branch(r)


@T.macro
def _survey(r, base, group):
    if rows.largest(r.scores, base) >= r.floor[0]:
        rows.survey_group(r, base)
        at = rows.largest(r.places, 0)
        if at >= r.lowest[0]:
            rows.collect(r, base, group)
            if at > r.high[0]:
                rows.keep_above(r, base)
                rows.keep_for_draw(r, base, group)
            else:
                rows.whole_branch(r)
        else:
            rows.whole_branch(r)
    else:
        rows.whole_branch(r)


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, **SIZES}],
    pass_configs=rows.OPTIONS,
)
def kernel(vocab: int, num_threads: int, capacity: int, unroll: int, arch: str):
    n = T.dynamic("n")
    unroll = 1 if arch == "sm_100a" else unroll  # two groups on their way would spill there

    @T.prim_func
    def sample_tokens(
        logits: T.Tensor((n, vocab), "float32"),
        inv_temperature: T.Tensor((n,), "float32"),
        top_ks: T.Tensor((n,), "int32"),
        top_ps: T.Tensor((n,), "float32"),
        min_ps: T.Tensor((n,), "float32"),
        seeds: T.Tensor((n,), "int64"),
        token_index: T.Tensor((n,), "int64"),
        token_ids: T.Tensor((n,), "int32"),
        best: T.Tensor((n,), "float32"),
        domain: T.int32,
    ):
        with T.Kernel(n, threads=num_threads) as row:
            T.annotate_min_blocks_per_sm(2)
            r = SampledRow(logits, row, vocab, num_threads, capacity, unroll)
            r.top_k[0] = T.if_then_else(top_ks[row] < vocab, top_ks[row], 0)
            r.top_p[0] = top_ps[row]
            r.log_min_p[0] = T.cast(T.log(T.cast(min_ps[row], "float64")), "float32")
            rows.set_stream(r, seeds[row], token_index[row], domain)
            is_cut = r.top_k[0] > 0 or r.top_p[0] < T.float32(1.0) or r.log_min_p[0] > -T.infinity("float32")
            token = T.alloc_local((1,), "int32")
            is_sure = T.alloc_local((1,), "int32")
            token[0] = 0

            r.scale[0] = inv_temperature[row]
            if r.scale[0] == T.float32(0.0):
                r.scale[0] = T.float32(1.0)
                r.group[0] = r.thread
                rows.start_watch(r)
                rows.walk(r, _first_of)
                _pack_first(r)
                rows.finish_watch(r)
                rows.reduce_block(r, r.best, rows.larger)
                if rows.is_whole(r):
                    token[0] = rows.packed_token(r, r.best[0])
                _put_best(r, best, row)
            elif is_cut:
                is_sure[0] = 0
                if (
                    r.top_k[0] <= 0
                    and r.top_p[0] >= T.float32(rows.LEAST_TOP_P)
                    and r.top_p[0] < T.float32(1.0)
                    and r.log_min_p[0] == -T.infinity("float32")
                ):
                    rows.draw_rivals(r)
                    _put_best(r, best, row)
                    is_sure[0] = T.if_then_else(rows.is_whole(r), 0, 1)
                    if is_sure[0] == 0:
                        rows.choose_rival(r, token, is_sure)
                    else:
                        rows.whole_branch(r)
                else:
                    rows.whole_branch(r)
                r.is_exact[0] = 0
                if is_sure[0] == 0:
                    rows.look(r, r.log_min_p[0])
                    _put_best(r, best, row)
                    is_sure[0] = T.if_then_else(rows.is_whole(r), 0, 1)
                else:
                    rows.whole_branch(r)
                while is_sure[0] == 0:
                    rows.find_cut(r, _survey)
                    rows.draw_from_list(r)
                    rows.finish_draw(r)
                    is_sure[0] = 1
                    token[0] = rows.packed_token(r, r.best[0])
                    if r.is_exact[0] == 0:
                        score = rows.keep(logits[row, token[0]] * r.scale[0])
                        is_sure[0] = T.if_then_else(rows.place(r, score) > r.high[0], 1, 0)
                        if rows.pack(r, score, token[0]) >= r.sure_cut[0]:
                            is_sure[0] = 1
                        if score > r.most_listed[0]:
                            is_sure[0] = 1
                        if is_sure[0] == 0:
                            rows.narrow(r)
                        else:
                            rows.whole_branch(r)
                    else:
                        rows.whole_branch(r)
            else:
                rows.start_plain_draw(r)
                rows.walk(r, rows.draw_group)
                rows.finish_watch(r)
                if rows.is_whole(r):
                    rows.finish_draw(r)
                    token[0] = rows.packed_token(r, r.best[0])
                else:
                    rows.whole_branch(r)
                _put_best(r, best, row)
            if r.thread == 0:
                token_ids[row] = token[0]

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
    program(
        logits.contiguous(),
        inv_temperature.contiguous(),
        top_k.contiguous(),
        top_p.contiguous(),
        min_p.contiguous(),
        seeds.contiguous(),
        token_index.contiguous(),
        token_ids,
        best,
        domain,
    )
    return token_ids, best
