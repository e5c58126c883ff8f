"""gather_logprobs on CUDA: a block per row, see `common/cuda_rows`.

One walk sums, counts what comes before the given token, and lists the tokens above a bound that a sample
gives; the best are the first of the list, sorted. Where it has too many or too few, `bisect_cut` finds the
k-th key, and one more walk collects just the best.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common import cuda_rows as rows
from tilelang_ops.common.kernels import cuda_kernel

SIZES = {"num_threads": 512, "capacity": 4096, "unroll": 2}


class GivenRow(rows.CutRow):
    """A row with a given token."""

    def __init__(self, *args):
        super().__init__(*args)
        self.own = T.alloc_local((1,), "float32")
        self.token = T.alloc_local((1,), "int32")


@T.macro
def _sum(r, base, group):
    r.raw_peak[0] = T.max(r.raw_peak[0], rows.largest(r.raw, base))
    for j in T.unroll(4):
        r.near[j] = T.exp(r.scores[base + j] - r.reference[0])
    r.total[0] = r.total[0] + T.cast((r.near[0] + r.near[1]) + (r.near[2] + r.near[3]), "float64")
    if rows.largest(r.scores, base) >= r.own[0]:
        for j in T.unroll(4):
            score = r.scores[base + j]
            if score > r.own[0] or (score == r.own[0] and group * 4 + j < r.token[0]):
                r.count[0] = r.count[0] + T.int64(1)
    rows.list_above(r, base, group)


@T.macro
def _collect_best(r, base, group):
    for j in T.unroll(4):
        key = rows.pack(r, r.scores[base + j], group * 4 + j)
        r.picks[j] = T.if_then_else(key >= r.cut[0] and group * 4 + j < r.vocab, 1, 0)
    rows.list_picked(r, base, group)


@T.macro
def _normalise(score, log_total, floor):
    value = T.alloc_local((1,), "float32")
    value[0] = T.cast(T.cast(score, "float64") - log_total, "float32")
    return T.if_then_else(value[0] >= floor, T.min(value[0], T.float32(0.0)), floor)  # NaN: the floor


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, **SIZES}],
    pass_configs=rows.OPTIONS,
)
def kernel(vocab: int, num_threads: int, capacity: int, unroll: int):
    n, num_top = T.dynamic("n"), T.dynamic("num_top")

    @T.prim_func
    def gather_logprobs(
        scores: T.Tensor((n, vocab), "float32"),
        token_ids: T.Tensor((n,), "int64"),
        chosen: T.Tensor((n,), "float32"),
        ranks: T.Tensor((n,), "int32"),
        top_ids: T.Tensor((n, num_top), "int32"),
        top: T.Tensor((n, num_top), "float32"),
        wanted: T.int32,
        floor: T.float32,
    ):
        with T.Kernel(n, threads=num_threads) as row:
            T.annotate_min_blocks_per_sm(2)
            r = GivenRow(scores, row, vocab, num_threads, capacity, unroll)
            log_total = T.alloc_local((1,), "float64")
            at = T.alloc_local((1,), "int32")
            is_done = T.alloc_local((1,), "int32")
            r.scale[0] = T.float32(1.0)
            r.top_k[0] = wanted
            r.top_p[0] = T.float32(1.0)
            r.token[0] = T.cast(token_ids[row], "int32")
            r.own[0] = scores[row, r.token[0]]
            rows.bound_list(r, wanted * 2)
            is_done[0] = 0
            while is_done[0] == 0:
                T.sync_threads()
                if r.thread == 0:
                    r.ints[rows.LIST_SIZE] = 0
                r.raw_peak[0] = -T.infinity("float32")
                r.count[0] = T.int64(0)
                r.total[0] = T.float64(0.0)
                T.sync_threads()
                rows.walk(r, _sum)
                rows.reduce_block(r, r.total, rows.added)
                rows.reduce_block(r, r.count, rows.added)
                rows.reduce_block(r, r.raw_peak, rows.larger)
                is_done[0] = 1
                if r.raw_peak[0] > r.reference[0] + T.float32(60.0) and r.raw_peak[0] <= T.float32(
                    -rows.LOWEST
                ):
                    # The sample was far below the best: what is relative to it is too large.
                    r.reference[0] = r.raw_peak[0]
                    is_done[0] = 0
            r.is_broken[0] = rows.is_nan(T.cast(r.total[0], "float32"))
            r.peak[0] = r.raw_peak[0]
            log_total[0] = T.log(r.total[0]) + T.cast(r.reference[0], "float64")
            if r.is_broken[0] != 0:
                log_total[0] = T.cast(T.reinterpret(T.int32(0x7FC00000), "float32"), "float64")
            if r.thread == 0:
                chosen[row] = _normalise(r.own[0], log_total[0], floor)
                ranks[row] = T.cast(r.count[0], "int32") + 1
            if wanted > 0:
                if r.ints[rows.LIST_SIZE] > capacity or r.ints[rows.LIST_SIZE] < wanted:
                    r.floor[0] = -T.infinity("float32")
                    if r.is_broken[0] == 0:
                        rows.bisect_cut(r)
                    else:
                        r.cut[0] = ~T.uint64(0)
                    T.sync_threads()
                    if r.thread == 0:
                        r.ints[rows.LIST_SIZE] = 0
                    T.sync_threads()
                    rows.walk(r, _collect_best)
                    T.sync_threads()
                rows.pack_list(r)
                rows.sort_list(r)
                at[0] = r.thread
                while at[0] < wanted:
                    if at[0] < r.ints[rows.LIST_SIZE]:
                        best = rows.packed_token(r, r.list[at[0]])
                        top_ids[row, at[0]] = best
                        top[row, at[0]] = _normalise(rows.packed_score(r, r.list[at[0]]), log_total[0], floor)
                    else:
                        top_ids[row, at[0]] = at[0]  # a row with NaN
                        top[row, at[0]] = floor
                    at[0] = at[0] + num_threads

    return gather_logprobs


def run(
    scores: Tensor,
    token_ids: Tensor,
    num_top: int,
    floor: float,
    **sizes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, vocab = scores.shape
    sizes = sizes or SIZES
    assert num_top <= sizes["capacity"], f"{num_top=} {sizes=}"

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=scores.device)

    chosen, ranks = empty(num_rows, dtype=torch.float32), empty(num_rows, dtype=torch.int32)
    # A program has no tensors without elements: one column too many where none is wanted.
    columns = max(1, num_top)
    top_ids = empty(num_rows, columns, dtype=torch.int32)
    top = empty(num_rows, columns, dtype=torch.float32)
    if num_rows > 0:
        program = kernel(vocab=vocab, **(sizes or SIZES))
        inputs = scores.contiguous(), token_ids.contiguous()
        program(*inputs, chosen, ranks, top_ids, top, num_top, floor)
    return chosen, ranks, top_ids[:, :num_top], top[:, :num_top]
