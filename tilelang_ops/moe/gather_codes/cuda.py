"""gather_codes on CUDA: a block reads a row once, and writes it to the places of its slots.

Up to 2,048 slots every block sorts all of them, which takes a few microseconds, at the same time as the
others; handing the order on would take another launch. For more slots there are the launches of `group_rows`
before.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import CUDA_TARGETS, cuda_kernel
from tilelang_ops.common.numerics import E4M3
from tilelang_ops.common.row_codes import SCALE_ROWS, UNIT, RowCodes
from tilelang_ops.moe.gather_codes.op import GroupedCodes
from tilelang_ops.moe.group_rows import cuda as group_rows
from tilelang_ops.moe.group_rows.cuda import THREADS, WARPS, count_all, place_all, store_offsets
from tilelang_ops.moe.group_rows.op import capacity

FEW_ROUNDS, ROUNDS = 2, 8  # times 32 slots are the stretch of a warp
STEP = 8  # channels of a thread
PARTS = UNIT // STEP


@T.macro
def write_row(inputs, row, places, outputs, width, num_slots):
    """Write a row to `places` [num_slots], -1 for none."""
    rows, row_scales, weights = inputs
    out, scales, factors = outputs
    for u, p in T.Parallel(T.ceildiv(width, STEP * THREADS) * (THREADS // PARTS), PARTS):
        start = u * UNIT + p * STEP
        if start < width:
            code = T.alloc_local((STEP,), "float8_e4m3fn")
            scale = T.alloc_var("float32")
            for k in T.vectorized(STEP):
                code[k] = rows[row, start + k]
            scale = row_scales[u, row]
            for s in T.unroll(num_slots):
                place = T.alloc_var("int32")
                place = places[s]
                if place >= 0:
                    for k in T.vectorized(STEP):
                        out[place, start + k] = code[k]
                    if p == 0:
                        scales[u, place] = scale
                        if u == 0:
                            factors[place] = weights[row * num_slots + s]


@cuda_kernel(
    builds=lambda model: [
        {"width": model.hidden_size, "num_slots": slots}
        for slots in sorted({slots for _, slots in model.expert_sorts})
    ],
    targets=CUDA_TARGETS,
)
def of_places(width: int, num_slots: int):
    """The places are known."""
    n, num_places, padded = T.dynamic("n"), T.dynamic("num_places"), T.dynamic("padded")

    @T.prim_func
    def of_places(
        rows: T.Tensor((n, width), "float8_e4m3fn"),
        row_scales: T.Tensor((T.ceildiv(width, UNIT), padded), "float32"),
        weights: T.Tensor((n * num_slots,), "float32"),
        places: T.Tensor((n * num_slots,), "int32"),
        out: T.Tensor((num_places, width), "float8_e4m3fn"),
        scales: T.Tensor((T.ceildiv(width, UNIT), num_places), "float32"),
        factors: T.Tensor((num_places,), "float32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            inputs = rows, row_scales, weights
            chosen = T.alloc_local((num_slots,), "int32")
            for s in T.unroll(num_slots):
                chosen[s] = places[row * num_slots + s]
            write_row(inputs, row, chosen, (out, scales, factors), width, num_slots)

    return of_places


@cuda_kernel(
    builds=lambda model: [
        {"width": model.hidden_size, "num_slots": slots, "num_experts": experts, "rounds": rounds}
        for experts, slots in model.expert_sorts
        for rounds in (FEW_ROUNDS, ROUNDS)
    ],
    targets=CUDA_TARGETS,
)
def kernel(width: int, num_slots: int, num_experts: int, rounds: int):
    n, padded = T.dynamic("n"), T.dynamic("padded")
    num_all, num_places = T.dynamic("num_all"), T.dynamic("num_places")
    sizes = (num_all, 1, num_experts, SCALE_ROWS, rounds)

    @T.macro
    def keep(outputs, i, slot, place):
        places, chosen, row = outputs
        if slot < num_all and T.truncdiv(slot, num_slots) == row:
            places[slot] = place
            chosen[slot - row * num_slots] = place

    @T.prim_func
    def gather_codes(
        rows: T.Tensor((n, width), "float8_e4m3fn"),
        row_scales: T.Tensor((T.ceildiv(width, UNIT), padded), "float32"),
        weights: T.Tensor((num_all,), "float32"),
        ids: T.Tensor((num_all,), "int32"),
        out: T.Tensor((num_places, width), "float8_e4m3fn"),
        scales: T.Tensor((T.ceildiv(width, UNIT), num_places), "float32"),
        factors: T.Tensor((num_places,), "float32"),
        places: T.Tensor((num_all,), "int32"),
        offsets: T.Tensor((num_experts + 1,), "int32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            inputs = rows, row_scales, weights
            free = T.alloc_shared((WARPS, num_experts), "int32")
            ends = T.alloc_shared((num_experts,), "int32")
            starts = T.alloc_shared((num_experts,), "int32")
            chosen = T.alloc_shared((num_slots,), "int32")
            experts = T.alloc_local((rounds,), "int32")
            thread = T.get_thread_binding()
            first_slot = thread // 32 * (rounds * 32) + thread % 32
            count_all(ids, None, free, ends, starts, experts, first_slot, 0, sizes)
            if row == 0:
                store_offsets(offsets, ends, starts, num_experts)
            outputs = (places, chosen, row)
            place_all(free, starts, experts, first_slot, num_experts, rounds, keep, outputs)
            T.sync_threads()
            write_row(inputs, row, chosen, (out, scales, factors), width, num_slots)

    return gather_codes


def run(rows: RowCodes, weights: Tensor, ids: Tensor, num_experts: int) -> GroupedCodes:
    num_slots, width = ids.numel(), rows.codes.shape[1]
    out = RowCodes.empty(capacity(num_slots, num_experts, SCALE_ROWS), width, ids.device)
    factors = weights.new_empty(out.codes.shape[0])
    inputs = rows.codes.view(E4M3), rows.scales, weights.view(-1)
    outputs = out.codes.view(E4M3), out.scales, factors
    sizes = {"width": width, "num_slots": ids.shape[1]}
    if num_slots > ROUNDS * THREADS or num_slots == 0:
        grouped = group_rows.run(ids, num_experts, SCALE_ROWS)
        if num_slots > 0:
            of_places(**sizes)(*inputs, grouped.places.view(-1), *outputs)
        return GroupedCodes(out, factors, grouped.places, grouped.offsets)
    places, offsets = torch.empty_like(ids), ids.new_empty(num_experts + 1)
    rounds = FEW_ROUNDS if num_slots <= FEW_ROUNDS * THREADS else ROUNDS
    program = kernel(**sizes, num_experts=num_experts, rounds=rounds)
    program(*inputs, ids.view(-1), *outputs, places.view(-1), offsets)
    return GroupedCodes(out, factors, places, offsets)
