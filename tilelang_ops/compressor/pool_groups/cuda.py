"""pool_groups on CUDA: a block per group, and further blocks that store open tokens in the ring.

A ring place that a group reads may be written by a later token of the same step. The group's own block then
writes it, behind its read; the storing blocks know such tokens and leave them alone.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
STORE_ROWS = 8  # rows of a storing block


# Rows and units are within their tensors. A check before each load would let the next one wait for it.
@cuda_kernel(
    builds=lambda model: [
        {"width": model.head_dim, "ratio": ratio, "result": "bfloat16"} for ratio in model.ratios if ratio > 1
    ],
    pass_configs={"tl.disable_safe_memory_legalize": True},
)
def kernel(width: int, ratio: int, result: str):
    n, g, units = T.dynamic("n"), T.dynamic("g"), T.dynamic("units")
    quads = width // 4
    lanes = THREADS // STORE_ROWS

    @T.prim_func
    def pool_groups(
        states: T.Tensor((n, 2 * width), "float32"),
        pool: T.Tensor((units, 4), "float32"),
        ends: T.Tensor((g,), "int64"),
        positions: T.Tensor((n,), "int32"),
        slots: T.Tensor((n,), "int64"),
        preceding: T.Tensor((n,), "int64"),
        following: T.Tensor((n,), "int64"),
        out: T.Tensor((g, width), result),
        ring: T.int32,
        slot_units: T.int32,
    ):
        with T.Kernel(g + T.ceildiv(n, STORE_ROWS), threads=THREADS) as block:
            if block < g:
                for q in T.Parallel(quads):
                    # Conditions on a register lower several times faster than on an expression of threads.
                    end = T.alloc_var("int32", init=T.cast(ends[block], "int32"))
                    position = T.alloc_var("int32")
                    before = T.alloc_var("int32")
                    last = T.alloc_var("int32")
                    base = T.alloc_var("int64")
                    scores = T.alloc_local((ratio, 4), "float32")
                    latents = T.alloc_local((ratio, 4), "float32")
                    pooled = T.alloc_local((4,), "float32")
                    for k in T.unroll(4):
                        pooled[k] = 0.0
                    if end >= 0:
                        position = T.cast(positions[end], "int32")
                        before = T.cast(preceding[end], "int32")
                        last = position + T.cast(following[end], "int32")
                        base = slots[end] * slot_units
                        for member in T.unroll(ratio):
                            back = ratio - 1 - member
                            if back <= before:
                                for k in T.vectorized(4):
                                    scores[member, k] = states[end - back, q * 4 + k]
                                for k in T.vectorized(4):
                                    latents[member, k] = states[end - back, width + q * 4 + k]
                            else:
                                unit = base + T.truncmod(position - back, ring) * (2 * quads) + q
                                for k in T.vectorized(4):
                                    scores[member, k] = pool[unit, k]
                                for k in T.vectorized(4):
                                    latents[member, k] = pool[unit + quads, k]
                        for member in T.unroll(ratio):  # loads of all members are under way
                            back = ratio - 1 - member
                            if back > before:
                                unit = base + T.truncmod(position - back, ring) * (2 * quads) + q
                                # The last token of this sequence that stands at the same place of the ring.
                                newer = last - T.truncmod(last - (position - back), ring)
                                if newer >= position - before:
                                    row = end + newer - position
                                    for k in T.vectorized(4):
                                        pool[unit, k] = states[row, q * 4 + k]
                                    for k in T.vectorized(4):
                                        pool[unit + quads, k] = states[row, width + q * 4 + k]
                        for k in T.unroll(4):
                            largest = T.alloc_var("float32")
                            total = T.alloc_var("float32")
                            largest = scores[0, k]
                            for member in T.unroll(ratio - 1):
                                largest = T.max(largest, scores[member + 1, k])
                            total = 0.0
                            for member in T.unroll(ratio):
                                scores[member, k] = T.exp(scores[member, k] - largest)
                                total = total + scores[member, k]
                            for member in T.unroll(ratio):
                                pooled[k] = pooled[k] + scores[member, k] / total * latents[member, k]
                    for k in T.vectorized(4):
                        out[block, q * 4 + k] = T.cast(pooled[k], result)
            else:
                for r, lane in T.Parallel(STORE_ROWS, lanes):
                    row = T.alloc_var("int32", init=(block - g) * STORE_ROWS + r)
                    if row < n and following[row] < ring:
                        place = T.alloc_var("int32")
                        first = T.alloc_var("int32")
                        is_read = T.alloc_var("int32")
                        place = T.cast(positions[row], "int32")
                        first = place - T.cast(preceding[row], "int32")
                        # Tokens of the first group that are not among the rows are read from the ring.
                        is_read = 0
                        if T.truncmod(first, ratio) > 0:
                            group_end = first - T.truncmod(first, ratio) + ratio - 1
                            distance = T.truncmod(place - first + 1, ring)
                            if group_end <= place + T.cast(following[row], "int32"):
                                behind = T.if_then_else(distance == 0, 0, ring - distance)
                                if behind < T.truncmod(first, ratio):
                                    is_read = 1
                        if is_read == 0:
                            unit = slots[row] * slot_units + T.truncmod(place, ring) * (2 * quads)
                            for i in T.unroll(T.ceildiv(2 * quads, lanes)):
                                if i * lanes + lane < 2 * quads:
                                    for k in T.vectorized(4):
                                        pool[unit + i * lanes + lane, k] = states[
                                            row, (i * lanes + lane) * 4 + k
                                        ]

    return pool_groups


def run(
    states: Tensor,
    pool: Tensor,
    ends: Tensor,
    positions: Tensor,
    slots: Tensor,
    preceding: Tensor,
    following: Tensor,
    ratio: int,
    dtype: torch.dtype,
) -> Tensor:
    num_slots, ring, _, width = pool.shape
    slot_size = pool.stride(0) if num_slots > 1 else pool[0].numel()
    assert pool[0].is_contiguous() and slot_size % 4 == 0 and width % 4 == 0, (
        f"{pool.shape=} {pool.stride()=}"
    )
    total = (num_slots - 1) * slot_size + pool[0].numel()
    units = pool.as_strided((total // 4, 4), (4, 1))
    out = torch.empty(ends.shape[0], width, dtype=dtype, device=states.device)
    program = kernel(width=width, ratio=ratio, result=str(dtype).removeprefix("torch."))
    program(
        states.contiguous().flatten(1),
        units,
        ends,
        positions,
        slots,
        preceding,
        following,
        out,
        ring,
        slot_size // 4,
    )
    return out
