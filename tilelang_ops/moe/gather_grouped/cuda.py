"""gather_grouped on CUDA: up to 2,048 slots every block sorts all, and gathers the rows of a few places.

The sort takes a block a few microseconds, and blocks do it at the same time; handing it on would take another
launch. For more slots there are the launches of `group_rows`, and one of `gather_slots`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.row_codes import UNIT, RowCodes
from tilelang_ops.moe.gather_grouped.op import GroupedInputs
from tilelang_ops.moe.gather_slots import cuda as gather_slots
from tilelang_ops.moe.gather_slots.cuda import move, operands, row_forms, tensor_shapes
from tilelang_ops.moe.group_rows import cuda as group_rows
from tilelang_ops.moe.group_rows.cuda import THREADS, WARPS, count_all, place_all, store_offsets

FEW_ROUNDS, ROUNDS = 2, 8  # times 32 slots are the stretch of a warp
PLACES = 4  # of a block


@cuda_kernel(
    builds=lambda model: [
        {**form, "num_slots": slots, "num_experts": experts, "rounds": rounds}
        for form in row_forms(model)
        for experts, slots in model.expert_sorts
        for rounds in (FEW_ROUNDS, ROUNDS)
    ]
)
def kernel(width: int, is_coded: bool, num_slots: int, num_experts: int, rounds: int):
    n, num_places, padded = (T.dynamic(name) for name in ("n", "num_places", "padded"))
    row_width, row_type, out_width, out_type, parts = tensor_shapes(width, is_coded)
    padded = padded if is_coded else n
    sizes = (num_places, 1, num_experts, 1, rounds)

    @T.macro
    def keep(outputs, i, slot, place):
        places, chosen, block = outputs
        if slot < num_places and block == 0:
            places[slot] = place
        if place >= block * PLACES and place < block * PLACES + PLACES:
            chosen[place - block * PLACES] = slot

    @T.prim_func
    def gather_grouped(
        rows: T.Tensor((n, row_width), row_type),
        scales: T.Tensor((T.ceildiv(width, UNIT), padded), "float32"),
        weights: T.Tensor((num_places,), "float32"),
        ids: T.Tensor((num_places,), "int32"),
        out: T.Tensor((num_places, out_width), out_type),
        factors: T.Tensor((num_places,), "float32"),
        places: T.Tensor((num_places,), "int32"),
        offsets: T.Tensor((num_experts + 1,), "int32"),
    ):
        with T.Kernel(T.ceildiv(num_places, PLACES), threads=THREADS) as block:
            free = T.alloc_shared((WARPS, num_experts), "int32")
            ends = T.alloc_shared((num_experts,), "int32")
            starts = T.alloc_shared((num_experts,), "int32")
            chosen = T.alloc_shared((PLACES,), "int32")
            experts = T.alloc_local((rounds,), "int32")
            thread = T.get_thread_binding()
            first_slot = thread // 32 * (rounds * 32) + thread % 32
            if thread < PLACES:
                chosen[thread] = -1
            count_all(ids, None, free, ends, starts, experts, first_slot, 0, sizes)
            if block == 0:
                store_offsets(offsets, ends, starts, num_experts)
            outputs = (places, chosen, block)
            place_all(free, starts, experts, first_slot, num_experts, rounds, keep, outputs)
            T.sync_threads()
            for p in T.unroll(PLACES):
                slot = chosen[p]
                if slot >= 0:
                    row = T.truncdiv(slot, num_slots)
                    for i in T.unroll(T.ceildiv(parts, THREADS)):
                        part = i * THREADS + thread
                        if part < parts:
                            move(rows, scales, out, row, block * PLACES + p, part, is_coded)
                    if thread == 0:
                        factors[block * PLACES + p] = weights[slot]

    return gather_grouped


def run(rows: Tensor | RowCodes, weights: Tensor, ids: Tensor, num_experts: int) -> GroupedInputs:
    num_places = ids.numel()
    if num_places > ROUNDS * THREADS or num_places == 0:
        grouped = group_rows.run(ids, num_experts, 1)
        out, factors = operands(rows, 0)[1], weights.new_empty(0)
        if num_places > 0:
            out, factors = gather_slots.run(rows, weights, grouped.slots)
        return GroupedInputs(out, factors, grouped.places, grouped.offsets)
    sizes, out, inputs, out_wide = operands(rows, num_places)
    factors, places = weights.new_empty(num_places), torch.empty_like(ids)
    offsets = ids.new_empty(num_experts + 1)
    program = kernel(
        **sizes,
        num_slots=ids.shape[1],
        num_experts=num_experts,
        rounds=FEW_ROUNDS if num_places <= FEW_ROUNDS * THREADS else ROUNDS,
    )
    program(*inputs, weights.view(-1), ids.view(-1), out_wide, factors, places.view(-1), offsets)
    return GroupedInputs(out, factors, places, offsets)
