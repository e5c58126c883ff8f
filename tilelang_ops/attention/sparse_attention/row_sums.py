"""What the groups that multiply make of a tile: peaks, weights, and sums of weighted values.

A group has 256 channels of the sums, in two halves: an instruction's registers must fit into those that a
thread is launched with. What belongs to a group's sums goes together: `values`, two fragments;
`accumulated`, the same in tensor memory where an architecture has it; `factors`, a fragment for a number a
row; which group's they are; whether there is tensor memory.
"""

from tilelang.cuda import language as T

from tilelang_ops.attention.sparse_attention.in_float32 import WIDTH
from tilelang_ops.attention.sparse_attention.key_tiles import KEYS

QUARTER = WIDTH // 4
HEADS = KEYS  # of a row that a block takes at once: results pass through a tile
GROUP = 128
SHRUNK, SHRUNK_BITS = 128.0, 7.0  # true keys of the main pool / unpacked ones, and its logarithm
SLACK = 8.0  # a row's largest logit may lag behind by this power of two before sums are rescaled
ASYNC = {"wg_wait": -1}  # the product runs on until T.wait_wgmma
PHASE = "tl.pipeline_mbar_phase_expr"  # which completion of its barrier an operation waits for
COPIED = 6  # named barriers: sums lie in tensor memory; two, one for each group


def two_of(allocate, *arguments):
    """Memory of both halves of something."""
    return allocate(*arguments), allocate(*arguments)


@T.macro
def find_peaks(logits, rows, shrinks, changed, slot, first, count, scale, shrunk):
    """Masks what is beyond the first `count` keys, and raises the rows' peaks where a tile asks for it."""
    peak, last_peak, shrink = rows
    T.copy(peak, last_peak)
    if first + KEYS > count:
        for i, j in T.Parallel(HEADS, KEYS):
            logits[i, j] = T.if_then_else(first + j < count, logits[i, j], -T.infinity("float32"))
    T.reduce_max(logits, peak, dim=1)
    for i in T.Parallel(HEADS):
        peak[i] = T.if_then_else(
            (peak[i] * shrunk - last_peak[i]) * scale > SLACK, peak[i] * shrunk, last_peak[i]
        )
        shrink[i] = T.exp2((last_peak[i] - peak[i]) * scale)
        if peak[i] > last_peak[i]:
            changed[slot] = 1
    T.copy(shrink, shrinks)


@T.macro
def weigh(logits, peak, weights, part, scale, is_window):
    """Weights of half of a tile's keys, as much larger as its keys are smaller."""
    for i, j in T.Parallel(HEADS, KEYS // 2):
        logits[i, part * (KEYS // 2) + j] = T.exp2(
            logits[i, part * (KEYS // 2) + j] * T.if_then_else(is_window, scale, scale * SHRUNK)
            - (peak[i] * scale - T.if_then_else(is_window, 0.0, SHRUNK_BITS))
        )
    T.copy(logits[:, part * (KEYS // 2) : (part + 1) * (KEYS // 2)], weights[part, :, :])
    T.fence_proxy_async()


def _channels(keys, slot, first, count, side, h):
    """Of `count` keys of a tile, the channels that a half of a group's sums adds up."""
    channel = side * 2 * QUARTER + h * QUARTER
    return keys[slot, first : first + count, channel : channel + QUARTER]


@T.macro
def wait_for_products(pending, in_tensor_memory):
    """Until at most `pending` are under way; in tensor memory each has a barrier."""
    if not in_tensor_memory:
        T.wait_wgmma(pending)


@T.macro
def rescale(sums, shrinks):
    """Sums of earlier tiles, now that a peak has moved."""
    values, accumulated, factors, side, in_tensor_memory = sums
    T.copy(shrinks, factors)
    for h in (0, 1):
        if in_tensor_memory:
            T.copy(accumulated[h], values[h])
        for i, j in T.Parallel(HEADS, QUARTER):
            values[h][i, j] = values[h][i, j] * factors[i]
        if in_tensor_memory:
            T.copy(values[h], accumulated[h])
    if in_tensor_memory:
        T.sync_threads(COPIED + side, GROUP)


@T.macro
def add(sums, added, operands, slot, part, clear, phase):
    """Starts to add the weighted values of half of a tile's keys to half of the channels."""
    values, accumulated, _, side, in_tensor_memory = sums
    weights, keys = operands
    for h in (0, 1):
        if in_tensor_memory:
            T.gemm(
                weights[part, :, :],
                _channels(keys, slot, part * (KEYS // 2), KEYS // 2, side, h),
                accumulated[h],
                clear_accum=clear,
                mbar=added[h],
                annotations={PHASE: phase},
            )
        else:
            T.gemm(
                weights[part, :, :],
                _channels(keys, slot, part * (KEYS // 2), KEYS // 2, side, h),
                values[h],
                annotations=ASYNC,
            )


@T.macro
def finish(sums, inverses, keys, slot):
    """Half of the channels, divided by the sums of weights, to the last tile's memory."""
    values, accumulated, factors, side, in_tensor_memory = sums
    T.copy(inverses, factors)
    for h in (0, 1):
        if in_tensor_memory:
            T.copy(accumulated[h], values[h])
        for i, j in T.Parallel(HEADS, QUARTER):
            values[h][i, j] = values[h][i, j] * factors[i]
        T.copy(values[h], _channels(keys, slot, 0, KEYS, side, h))
    T.fence_proxy_async()
