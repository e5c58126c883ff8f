"""group_rows on CUDA: a counting sort in one block, stable because every warp has a stretch of the slots.

Every warp counts its stretch, prefix sums over warps and experts give each warp the first free place of every
expert, and each warp then walks its stretch again, 32 slots at a time in order.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.moe.group_rows.op import GroupedRows, capacity

TILE_ROWS = (1,)  # tiles that the grouped products ask for
FEW_SLOTS = 4096
FEW_WARPS, MANY_WARPS = 8, 32


@cuda_kernel(
    builds=lambda model: [
        {"num_experts": experts, "tile": tile, "num_warps": warps}
        for experts in (model.n_routed_experts, model.dspark_n_routed_experts)
        for tile in TILE_ROWS
        for warps in (FEW_WARPS, MANY_WARPS)
    ]
)
def kernel(num_experts: int, tile: int, num_warps: int):
    n, num_places, num_tiles = T.dynamic("n"), T.dynamic("num_places"), T.dynamic("num_tiles")
    threads = num_warps * 32
    id_bits = num_experts.bit_length()  # left-out slots count as expert `num_experts`
    counters = num_experts + 1

    @T.prim_func
    def group_rows(
        ids: T.Tensor((n,), "int32"),
        slots: T.Tensor((num_places,), "int32"),
        places: T.Tensor((n,), "int32"),
        offsets: T.Tensor((num_experts + 1,), "int32"),
        tile_experts: T.Tensor((num_tiles,), "int32"),
    ):
        with T.Kernel(1, threads=threads) as _:
            free = T.alloc_shared((num_warps, counters), "int32")
            ends = T.alloc_shared((num_experts,), "int32")
            starts = T.alloc_shared((num_experts,), "int32")
            thread = T.get_thread_binding()
            warp = thread // 32
            lane = thread % 32
            stretch = T.ceildiv(T.ceildiv(n, 32), num_warps)  # of a warp, in units of 32 slots
            for i in T.serial(T.ceildiv(num_places, threads)):
                if i * threads + thread < num_places:
                    slots[i * threads + thread] = -1
            for i in T.serial(T.ceildiv(num_tiles, threads)):
                if i * threads + thread < num_tiles:
                    tile_experts[i * threads + thread] = -1
            for i in T.serial(T.ceildiv(counters, 32)):
                if i * 32 + lane < counters:
                    free[warp, i * 32 + lane] = 0
            T.sync_warp()
            for i in T.serial(stretch):
                slot = (warp * stretch + i) * 32 + lane
                if slot < n and ids[slot] >= 0 and ids[slot] < num_experts:
                    T.atomic_add(free[warp, ids[slot]], 1)
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_experts, threads)):
                expert = i * threads + thread
                if expert < num_experts:
                    total = T.alloc_var("int32")
                    total = 0
                    for w in T.serial(num_warps):
                        count = T.alloc_var("int32")
                        count = free[w, expert]
                        free[w, expert] = total
                        total = total + count
                    starts[expert] = T.ceildiv(total, tile) * tile
            T.sync_threads()
            T.cumsum(starts, ends, dim=0)
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_experts, threads)):
                expert = i * threads + thread
                if expert < num_experts:
                    first = T.alloc_var("int32")
                    end = T.alloc_var("int32")
                    end = ends[expert]
                    first = end - starts[expert]
                    starts[expert] = first
                    offsets[expert] = first
                    if expert == num_experts - 1:
                        offsets[num_experts] = end
                    for t in T.serial((end - first) // tile):
                        tile_experts[first // tile + t] = expert
            T.sync_threads()
            for i in T.serial(stretch):
                slot = (warp * stretch + i) * 32 + lane
                expert = T.alloc_var("int32")
                same = T.alloc_var("uint32")
                expert = num_experts
                if slot < n and ids[slot] >= 0 and ids[slot] < num_experts:
                    expert = ids[slot]
                same = T.uint32(0xFFFFFFFF)
                for b in T.unroll(id_bits):
                    votes = T.cast(T.ballot_sync((expert >> b) & 1), "uint32")
                    same = same & T.if_then_else((expert >> b) & 1 == 1, votes, ~votes)
                before = T.cast(T.popcount(same & ((T.uint32(1) << T.cast(lane, "uint32")) - 1)), "int32")
                place = T.alloc_var("int32")
                place = -1
                if expert < num_experts:
                    place = starts[expert] + free[warp, expert] + before
                    slots[place] = slot
                if slot < n:
                    places[slot] = place
                T.sync_warp()
                if expert < num_experts and before == 0:
                    free[warp, expert] = free[warp, expert] + T.cast(T.popcount(same), "int32")
                T.sync_warp()

    return group_rows


def run(ids: Tensor, num_experts: int, tile: int) -> GroupedRows:
    num_slots = ids.numel()
    size = capacity(num_slots, num_experts, tile)
    slots = torch.empty(size, dtype=torch.int32, device=ids.device)
    places = torch.empty_like(ids)
    if num_slots == 0:
        return GroupedRows(slots, places, ids.new_zeros(num_experts + 1), slots.clone())
    offsets = ids.new_empty(num_experts + 1)
    tile_experts = ids.new_empty(size // tile)
    num_warps = FEW_WARPS if num_slots <= FEW_SLOTS else MANY_WARPS
    program = kernel(num_experts=num_experts, tile=tile, num_warps=num_warps)
    program(ids.view(-1), slots, places.view(-1), offsets, tile_experts)
    return GroupedRows(slots, places, offsets, tile_experts)
