"""group_rows on CUDA: a counting sort, stable because every warp has a stretch of the slots.

Every warp counts its stretch; prefix sums over blocks, warps and experts give each warp the first free place
of every expert; each warp then walks its stretch again, 32 slots at a time in order. Few slots are sorted by
one block. For many, a launch before that counts what each block will meet.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.sizes import ModelSizes
from tilelang_ops.moe.group_rows.op import GroupedRows, capacity

TILES = (1,)  # that the grouped products ask for
WARPS = 8
THREADS = WARPS * 32
ONE_BLOCK_ROUNDS, ROUNDS = 8, 4  # times 32 slots are the stretch of a warp


def _experts(model: ModelSizes) -> list[int]:
    return sorted({experts for experts, _ in model.expert_sorts})


@cuda_kernel(builds=lambda model: [{"num_experts": experts, "rounds": ROUNDS} for experts in _experts(model)])
def count_slots(num_experts: int, rounds: int):
    """Slots of each expert in each block's share; `slots` and `tile_experts` become -1."""
    n, num_blocks = T.dynamic("n"), T.dynamic("num_blocks")
    num_places, num_tiles = T.dynamic("num_places"), T.dynamic("num_tiles")

    @T.prim_func
    def count_slots(
        ids: T.Tensor((n,), "int32"),
        counts: T.Tensor((num_blocks, num_experts), "int32"),
        slots: T.Tensor((num_places,), "int32"),
        tile_experts: T.Tensor((num_tiles,), "int32"),
    ):
        with T.Kernel(num_blocks, threads=THREADS) as block:
            found = T.alloc_shared((num_experts,), "int32")
            thread = T.get_thread_binding()
            first = block * THREADS + thread
            for i in T.serial(T.ceildiv(num_places, num_blocks * THREADS)):
                if i * num_blocks * THREADS + first < num_places:
                    slots[i * num_blocks * THREADS + first] = -1
            for i in T.serial(T.ceildiv(num_tiles, num_blocks * THREADS)):
                if i * num_blocks * THREADS + first < num_tiles:
                    tile_experts[i * num_blocks * THREADS + first] = -1
            for i in T.serial(T.ceildiv(num_experts, THREADS)):
                if i * THREADS + thread < num_experts:
                    found[i * THREADS + thread] = 0
            T.sync_threads()
            for i in T.unroll(rounds):
                slot = (block * rounds + i) * THREADS + thread
                expert = T.alloc_var("int32")
                expert = -1
                if slot < n:
                    expert = ids[slot]
                if expert >= 0 and expert < num_experts:
                    T.atomic_add(found[expert], 1)
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_experts, THREADS)):
                if i * THREADS + thread < num_experts:
                    counts[block, i * THREADS + thread] = found[i * THREADS + thread]

    return count_slots


@T.macro
def count_all(ids, counts, free, ends, starts, experts, first_slot, block, sizes):
    """Load a thread's slots; find each expert's places, and where those of each warp begin.

    Args:
        ids, counts: as in `kernel`; no counts where one block has all slots.
        free: [WARPS, num_experts] shared, the first free place of a warp, counted from the expert's first.
        ends, starts: [num_experts] shared, of the experts' places.
        experts: [rounds], of the thread's slots; `num_experts` for those left out.
        first_slot: of the thread.
        block: its number.
        sizes: n, blocks, num_experts, tile, rounds.
    """
    n, num_blocks, num_experts, tile, rounds = sizes
    thread = T.get_thread_binding()
    warp = thread // 32
    lane = thread % 32
    for i in T.unroll(rounds):
        experts[i] = num_experts
        if first_slot + i * 32 < n:
            number = T.alloc_var("int32")
            number = ids[first_slot + i * 32]
            if number >= 0 and number < num_experts:
                experts[i] = number
    for i in T.serial(T.ceildiv(num_experts, 32)):
        if i * 32 + lane < num_experts:
            free[warp, i * 32 + lane] = 0
    T.sync_threads()
    for i in T.unroll(rounds):
        if experts[i] < num_experts:
            T.atomic_add(free[warp, experts[i]], 1)
    T.sync_threads()
    for i in T.serial(T.ceildiv(num_experts, THREADS)):
        expert = i * THREADS + thread
        if expert < num_experts:
            before = T.alloc_var("int32")
            total = T.alloc_var("int32")
            count = T.alloc_var("int32")
            before = 0
            total = 0
            if counts is not None:
                for b in T.serial(num_blocks):
                    count = counts[b, expert]
                    total = total + count
                    if b < block:
                        before = before + count
            for w in T.unroll(WARPS):
                count = free[w, expert]
                free[w, expert] = before
                before = before + count
            if counts is None:
                total = before
            starts[expert] = T.ceildiv(total, tile) * tile
    T.sync_threads()
    T.cumsum(starts, ends, dim=0)
    T.sync_threads()
    for i in T.serial(T.ceildiv(num_experts, THREADS)):
        expert = i * THREADS + thread
        if expert < num_experts:
            starts[expert] = ends[expert] - starts[expert]
    T.sync_threads()


@T.macro
def place_all(free, starts, experts, first_slot, num_experts, rounds, keep, outputs):
    """Give every slot of the thread its place: `keep(outputs, i, slot, place)`, place -1 for none."""
    thread = T.get_thread_binding()
    warp = thread // 32
    lane = thread % 32
    for i in T.unroll(rounds):
        same = T.alloc_var("uint32")
        same = T.uint32(0xFFFFFFFF)
        for b in T.unroll(num_experts.bit_length()):  # left-out slots count as expert `num_experts`
            votes = T.cast(T.ballot_sync((experts[i] >> b) & 1), "uint32")
            same = same & T.if_then_else((experts[i] >> b) & 1 == 1, votes, ~votes)
        lower = same & ((T.uint32(1) << T.cast(lane, "uint32")) - 1)
        rank = T.cast(T.popcount(lower), "int32")
        place = T.alloc_var("int32")
        place = -1
        if experts[i] < num_experts:
            place = starts[experts[i]] + free[warp, experts[i]] + rank
        keep(outputs, i, first_slot + i * 32, place)
        T.sync_warp()
        if experts[i] < num_experts and rank == 0:
            taken = T.cast(T.popcount(same), "int32")
            free[warp, experts[i]] = free[warp, experts[i]] + taken
        T.sync_warp()


@T.macro
def store_offsets(offsets, ends, starts, num_experts):
    """By one block."""
    thread = T.get_thread_binding()
    for i in T.serial(T.ceildiv(num_experts, THREADS)):
        expert = i * THREADS + thread
        if expert < num_experts:
            offsets[expert] = starts[expert]
            if expert == num_experts - 1:
                offsets[num_experts] = ends[expert]


@cuda_kernel(
    builds=lambda model: [
        {"num_experts": experts, "tile": tile, "rounds": rounds, "is_split": rounds == ROUNDS}
        for experts in _experts(model)
        for tile in TILES
        for rounds in (ONE_BLOCK_ROUNDS, ROUNDS)
    ]
)
def kernel(num_experts: int, tile: int, rounds: int, is_split: bool):
    """`is_split`: there are several blocks, and `count_slots` went before."""
    n, num_places, num_tiles = T.dynamic("n"), T.dynamic("num_places"), T.dynamic("num_tiles")
    num_blocks = T.dynamic("num_blocks") if is_split else 1
    sizes = (n, num_blocks, num_experts, tile, rounds)

    @T.macro
    def keep(outputs, i, slot, place):
        slots, places, tile_experts, experts = outputs
        if place >= 0:
            slots[place] = slot
            if place % tile == 0:
                tile_experts[place // tile] = experts[i]
        if slot < n:
            places[slot] = place

    @T.prim_func
    def group_rows(
        ids: T.Tensor((n,), "int32"),
        counts: T.Tensor((num_blocks, num_experts), "int32"),
        slots: T.Tensor((num_places,), "int32"),
        places: T.Tensor((n,), "int32"),
        offsets: T.Tensor((num_experts + 1,), "int32"),
        tile_experts: T.Tensor((num_tiles,), "int32"),
    ):
        with T.Kernel(num_blocks, threads=THREADS) as block:
            free = T.alloc_shared((WARPS, num_experts), "int32")
            ends = T.alloc_shared((num_experts,), "int32")
            starts = T.alloc_shared((num_experts,), "int32")
            experts = T.alloc_local((rounds,), "int32")
            thread = T.get_thread_binding()
            first_slot = (block * WARPS + thread // 32) * (rounds * 32) + thread % 32
            if not is_split:
                for i in T.serial(T.ceildiv(num_places, THREADS)):
                    if i * THREADS + thread < num_places:
                        slots[i * THREADS + thread] = -1
                for i in T.serial(T.ceildiv(num_tiles, THREADS)):
                    if i * THREADS + thread < num_tiles:
                        tile_experts[i * THREADS + thread] = -1
            known = counts if is_split else None
            count_all(ids, known, free, ends, starts, experts, first_slot, block, sizes)
            if block == 0:
                store_offsets(offsets, ends, starts, num_experts)
            outputs = (slots, places, tile_experts, experts)
            place_all(free, starts, experts, first_slot, num_experts, rounds, keep, outputs)

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
    flat, counts = ids.view(-1), None
    is_split = num_slots > ONE_BLOCK_ROUNDS * THREADS
    if is_split:
        counts = ids.new_empty(-(-num_slots // (ROUNDS * THREADS)), num_experts)
        count_slots(num_experts=num_experts, rounds=ROUNDS)(flat, counts, slots, tile_experts)
    rounds = ROUNDS if is_split else ONE_BLOCK_ROUNDS
    program = kernel(num_experts=num_experts, tile=tile, rounds=rounds, is_split=is_split)
    program(flat, counts, slots, places.view(-1), offsets, tile_experts)
    return GroupedRows(slots, places, offsets, tile_experts)
