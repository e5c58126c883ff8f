"""verify_ratio on CUDA: a block per row, see `common/cuda_rows` for walks, masses and draws.

no draft       one walk draws from the target
a draft        one walk over both rows sums their exponentials in float32, which decides but for one row in
               thousands. Where it does not, and where the draft is refused, a walk sums the integers. A
               refused draft costs one more walk of the target, which draws; of the draft's row it reads no
               more than what may win.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common import cuda_rows as rows
from tilelang_ops.common.cuda_noise import keep, log_exact, noise_near, philox_words_by_keys
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.sampling.verify_ratio.op import Streams

SIZES = {"num_threads": 256, "capacity": 1024, "unroll": 1}
# Float32 sums are off by less than 2^-15 of themselves, and so is an exponential or its integer of this size.
DOUBT = 2.0**-12
SURE_DISTANCE = -18.0


class DraftRow:
    """The row that a draft was drawn from; a part of `rows.Row`'s attributes."""

    def __init__(self, scores, vocab, unroll):
        self.logits, self.vocab, self.groups = scores, vocab, -(-vocab // 4)
        self.number, self.token = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        self.raw = T.alloc_local((4 * unroll,), "float32")
        self.peak, self.reference, self.near_all = (T.alloc_local((1,), "float32") for _ in range(3))
        self.mass_all = T.alloc_local((1,), "int64")
        self.is_whole = T.alloc_local((1,), "int32")

    @property
    def row(self):
        return self.number[0]


class TargetRow(rows.Row):
    """A row of the target with its draft's."""

    def __init__(self, draft, *args):
        super().__init__(*args)
        self.draft = draft
        self.log_sum = T.alloc_local((1,), "float32")


@T.macro
def _walk_both(r, d, body):
    """Calls body(r, d, base, group) for every group, its scores in r.raw and d.raw."""
    for step in T.serial(-(-r.groups // (r.unroll * r.num_threads))):
        for u in T.unroll(r.unroll):
            rows.load_group(r, (step * r.unroll + u) * r.num_threads + r.thread, 4 * u, r.raw)
            rows.load_group(d, (step * r.unroll + u) * r.num_threads + r.thread, 4 * u, d.raw)
        for u in T.unroll(r.unroll):
            body(r, d, 4 * u, (step * r.unroll + u) * r.num_threads + r.thread)


@T.macro
def _sum_near(r, d, base, group):
    r.raw_peak[0] = T.max(r.raw_peak[0], rows.largest(r.raw, base))
    r.near_all[0] = r.near_all[0] + rows.near_mass(r.raw, base, r.reference[0])
    d.peak[0] = T.max(d.peak[0], rows.largest(d.raw, base))
    d.near_all[0] = d.near_all[0] + rows.near_mass(d.raw, base, d.reference[0])


@T.macro
def _sum_exactly(r, d, base, group):
    if rows.largest(r.raw, base) - r.peak[0] > T.float32(-28.0):
        for j in T.unroll(4):
            r.mass_all[0] = r.mass_all[0] + rows.mass_of(r.raw[base + j] - r.peak[0])
    if d.is_whole[0] == 1 and rows.largest(d.raw, base) - d.peak[0] > T.float32(-28.0):
        for j in T.unroll(4):
            d.mass_all[0] = d.mass_all[0] + rows.mass_of(d.raw[base + j] - d.peak[0])


@T.macro
def _probability(distance, total):
    """Of a score at this distance from its row's largest, float64."""
    return keep(T.cast(rows.mass_of(distance), "float64") / T.cast(total, "float64"))


@T.macro
def _draft_probability(r, d, token):
    q = T.alloc_local((1,), "float64")
    q[0] = T.if_then_else(token == d.token[0], T.float64(1.0), T.float64(0.0))
    if d.is_whole[0] == 1:
        q[0] = _probability(d.logits[d.row, token] - d.peak[0], d.mass_all[0])
    return q[0]


@T.macro
def _residual_score(r, score, token):
    """float32 log(p - q) of a token with this score of the target, -inf where that is not positive."""
    rest = keep(_probability(score - r.peak[0], r.mass_all[0]) - _draft_probability(r, r.draft, token))
    log_rest = log_exact(T.max(rest, T.float64(2.0**-80)))
    return keep(T.if_then_else(rest > T.float64(0.0), T.cast(log_rest, "float32"), -T.infinity("float32")))


@T.macro
def _residual_at(r, token):
    return _residual_score(r, r.logits[r.row, token], token)


@T.macro
def _queue_residual(r, base, group):
    """Queues the tokens of a group that may win; log p bounds their scores."""
    top = rows.largest(r.raw, base) - r.peak[0] - r.log_sum[0]
    if top > -T.infinity("float32"):
        philox_words_by_keys(r.words, group, r.keys, r.domain[0])
        fewest = T.min(T.min(r.words[0], r.words[1]), T.min(r.words[2], r.words[3]))
        most = T.__exp(top - rows.winner_bound(r)) * T.float32(2.0**32)
        if T.cast(fewest, "float32") <= most:
            for j in T.unroll(4):
                near = keep(noise_near(r.words[j]))
                # Behind the last token all is -inf.
                may_win = r.raw[base + j] - r.peak[0] - r.log_sum[0] + near >= rows.winner_bound(r)
                if may_win and r.raw[base + j] >= T.float32(rows.LOWEST):
                    r.near[j] = _residual_score(r, r.raw[base + j], group * 4 + j) + near
                    least = rows.winner_bound(r)
                    if r.near[j] > -T.infinity("float32") and r.near[j] >= least:
                        T.atomic_max(r.bound[0], rows.ordered(r.near[j]))
                        at = T.atomic_add(r.ints[rows.QUEUE_SIZE], 1, return_prev=True)
                        if at < r.queue_capacity:
                            r.queue[at] = group * 4 + j


@T.macro
def _draw_from_target(r):
    rows.start_plain_draw(r)
    rows.walk(r, rows.draw_group)
    rows.finish_watch(r)
    rows.finish_draw(r)


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, **SIZES}],
    pass_configs=rows.OPTIONS,
)
def kernel(vocab: int, num_threads: int, capacity: int, unroll: int):
    n, num_drafts = T.dynamic("n"), T.dynamic("num_drafts")

    @T.prim_func
    def verify_ratio(
        target: T.Tensor((n, vocab), "float32"),
        draft: T.Tensor((num_drafts, vocab), "float32"),
        draft_rows: T.Tensor((n,), "int64"),
        draft_ids: T.Tensor((n,), "int32"),
        seeds: T.Tensor((n,), "int64"),
        token_index: T.Tensor((n,), "int64"),
        passed: T.Tensor((n,), "uint8"),
        token_ids: T.Tensor((n,), "int32"),
        accept_stream: T.int32,
        residual_stream: T.int32,
        fresh_stream: T.int32,
        is_given: T.int32,
    ):
        with T.Kernel(n, threads=num_threads) as row:
            T.annotate_min_blocks_per_sm(3)
            d = DraftRow(draft, vocab, unroll)
            r = TargetRow(d, target, row, vocab, num_threads, capacity, unroll)
            d.number[0] = T.cast(draft_rows[row], "int32")
            is_decided = T.alloc_local((1,), "int32")
            is_accepted = T.alloc_local((1,), "int32")
            token = T.alloc_local((1,), "int32")
            d.token[0] = draft_ids[row]
            token[0] = 0
            is_accepted[0] = 0
            r.scale[0] = T.float32(1.0)
            rows.set_stream(r, seeds[row], token_index[row], fresh_stream)
            if d.token[0] < 0:
                _draw_from_target(r)
                if rows.is_whole(r):
                    token[0] = rows.packed_token(r, r.best[0])
            else:
                rows.load_sample(r, r)
                r.raw_peak[0] = -T.infinity("float32")
                r.near_all[0] = 0.0
                rows.load_sample(r, d)
                d.peak[0] = -T.infinity("float32")
                d.near_all[0] = 0.0
                _walk_both(r, d, _sum_near)
                rows.reduce_block(r, r.near_all, rows.added)
                rows.reduce_block(r, r.raw_peak, rows.larger)
                r.is_broken[0] = rows.is_nan(r.near_all[0])
                r.peak[0] = r.raw_peak[0]
                d.is_whole[0] = 0
                rows.reduce_block(r, d.near_all, rows.added)
                rows.reduce_block(r, d.peak, rows.larger)
                if (
                    is_given == 1
                    and rows.is_nan(d.near_all[0]) == 0
                    and T.abs(d.peak[0]) <= T.float32(-rows.LOWEST)
                ):
                    d.is_whole[0] = 1
                if rows.is_whole(r):
                    philox_words_by_keys(r.words, 0, r.keys, accept_stream)
                    coin = keep((T.cast(r.words[0], "float64") + T.float64(0.5)) * T.float64(2.0**-32))
                    score = target[row, d.token[0]]
                    # Both sides of the test, times both sums.
                    left = T.alloc_local((1,), "float32")
                    right = T.alloc_local((1,), "float32")
                    distance = T.alloc_local((1,), "float32")
                    left[0] = T.__exp(score - r.reference[0])
                    right[0] = T.cast(coin, "float32") * r.near_all[0]
                    distance[0] = 0.0
                    if d.is_whole[0] == 1:
                        own = draft[d.row, d.token[0]]
                        left[0] = left[0] * d.near_all[0]
                        right[0] = right[0] * T.__exp(own - d.reference[0])
                        distance[0] = own - d.peak[0]
                    is_decided[0] = 0
                    most = T.max(left[0], right[0])
                    if (
                        distance[0] > T.float32(SURE_DISTANCE)
                        and most > T.float32(1e-30)
                        and most < T.float32(1e30)
                    ):
                        # Small integers are coarse: they only make p smaller.
                        if left[0] * T.float32(1.0 + DOUBT) < right[0]:
                            is_decided[0] = 1
                        is_more = left[0] > right[0] * T.float32(1.0 + DOUBT)
                        if is_more and score - r.peak[0] > T.float32(SURE_DISTANCE):
                            is_decided[0] = 1
                            is_accepted[0] = 1
                    if is_accepted[0] == 0:
                        r.mass_all[0] = 0
                        d.mass_all[0] = 0
                        _walk_both(r, d, _sum_exactly)
                        rows.reduce_block(r, r.mass_all, rows.added)
                        rows.reduce_block(r, d.mass_all, rows.added)
                        d.mass_all[0] = T.max(d.mass_all[0], T.int64(1))
                        if is_decided[0] == 0:
                            p = _probability(score - r.peak[0], r.mass_all[0])
                            q = _draft_probability(r, d, d.token[0])
                            if q > T.float64(0.0) and p > coin * q:
                                is_accepted[0] = 1
                    if is_accepted[0] == 1:
                        token[0] = d.token[0]
                    else:
                        r.domain[0] = residual_stream
                        share = T.cast(r.mass_all[0], "float32") * T.float32(2.0**-40)
                        r.log_sum[0] = T.log(share)
                        r.floor[0] = T.float32(rows.LOWEST)
                        r.cut[0] = T.uint64(0)
                        rows.start_draw(r)
                        T.sync_threads()
                        rows.walk(r, _queue_residual)
                        rows.finish_draw(r, _residual_at)
                        if r.best[0] == T.uint64(0):
                            _draw_from_target(r)
                        token[0] = rows.packed_token(r, r.best[0])
            if r.thread == 0:
                token_ids[row] = token[0]
                passed[row] = T.cast(is_accepted[0], "uint8")

    return verify_ratio


def run(
    target: Tensor,
    draft: Tensor | None,
    draft_rows: Tensor | None,
    draft_ids: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    streams: Streams,
    **sizes: int,
) -> tuple[Tensor, Tensor]:
    num_rows, vocab = target.shape
    passed = torch.empty(num_rows, dtype=torch.bool, device=target.device)
    token_ids = torch.empty_like(draft_ids)
    if draft_rows is None:
        draft_rows = torch.arange(num_rows, device=target.device)
    program = kernel(vocab=vocab, **(sizes or SIZES))
    inputs = (target, target if draft is None else draft, draft_rows, draft_ids, seeds, token_index)
    outputs = passed.view(torch.uint8), token_ids
    domains = int(streams.accept), int(streams.residual), int(streams.fresh)
    program(*(t.contiguous() for t in inputs), *outputs, *domains, int(draft is not None))
    return passed, token_ids
