"""sparse_attention on CUDA: persistent blocks of four warp groups that go through rows of 64 heads each.

Tiles of 64 keys are unpacked to bfloat16 in shared memory, where they serve both products. Two groups
multiply tile s while the others, which have records in registers one tile ahead, unpack tile s + 1:

    first group     Q K^T, peaks and weights of half of the keys          | weights of the other half
                    values of the other half of tile s - 1                | values of the first half
    second group    values of the other half of tile s - 1, lists keys    | values of the first half
    the others      fetch tile s + 2, unpack the first half of tile s + 1 | the other half

(The groups that multiply have 256 channels of the values each.)
So tensor cores are at work while weights are made, except for a row's last tile, whose values are all added
in its own step; the second half of a tile's memory is free again when the next step's first values are.

Tiles of a row and of the next follow each other without a gap: step by step the second group lists the next
row's records, and in a row's last step the first one loads the next queries once it has used its own. A
row's result goes through the last tile's memory and leaves while the next row's first tile is multiplied.

Sums of a row follow the order of its list of keys whatever else runs.
"""

import torch
from tilelang.cuda import language as T
from torch import Tensor

from tilelang_ops.attention.sparse_attention.in_float32 import (
    LANES,
    LOG2_E,
    MAIN_BYTES,
    WIDTH,
    WINDOW_BYTES,
    in_float32,
)
from tilelang_ops.attention.sparse_attention.key_tiles import (
    FREED,
    KEYS,
    LISTERS,
    MAX_KEYS,
    THREADS,
    UNIT,
    UNITS,
    UNPACKERS,
    advance,
    fetch,
    list_chunks,
    load_number,
    wait_for_half,
)
from tilelang_ops.attention.sparse_attention.row_sums import (
    ASYNC,
    GROUP,
    HEADS,
    PHASE,
    QUARTER,
    SHRUNK,
    add,
    find_peaks,
    finish,
    rescale,
    two_of,
    wait_for_products,
    weigh,
)
from tilelang_ops.common.kernels import cuda_kernel, num_sms
from tilelang_ops.common.records import flat_rows, rows_per_part

PANEL = 64  # channels that lie side by side in shared memory
PANELS = WIDTH // PANEL
MULTIPLIERS = THREADS - UNPACKERS  # those of the first two groups
REGISTERS = {  # of a thread of the first group, of the second, of one that unpacks
    "sm_90a": (200, 176, 64),
    "sm_100a": (184, 184, 72),
}
# Named barriers beside those of key_tiles and row_sums: half of the weights are there, all are; half of a
# result has left; queries have been read; a step is over; the next row is listed.
HALF_WEIGHED, WEIGHED, LEFT, READ, STEP, LISTED = 1, 2, 3, 4, 5, 9


def _place(item, groups):
    """Row and first head of what a block takes at once."""
    of_row, item = T.cast(groups, "uint32"), T.cast(item, "uint32")
    return T.cast(item // of_row, "int32"), T.cast(item % of_row, "int32") * HEADS


@T.macro
def _send(keys, out, slot, row, head):
    """Starts to send a result from a tile's memory, the heads of its upper half first."""
    for half in (0, 1):
        for panel in range(PANELS):
            T.tma_copy(
                keys[
                    slot,
                    half * (HEADS // 2) : (half + 1) * (HEADS // 2),
                    panel * PANEL : (panel + 1) * PANEL,
                ],
                out[
                    row,
                    head + half * (HEADS // 2) : head + (half + 1) * (HEADS // 2),
                    panel * PANEL : (panel + 1) * PANEL,
                ],
            )


@cuda_kernel(
    builds=lambda model: [{}],
    pass_configs={
        "tl.disable_thread_storage_sync": True,
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_warp_specialized": True,
        "tl.enable_fast_math": True,
    },
    uses_tensor_cores=True,
)
def kernel(arch: str):
    n, heads, window_width, main_width = (T.dynamic(x) for x in ("n", "heads", "window_width", "main_width"))
    window_rows, main_rows = T.dynamic("window_rows"), T.dynamic("main_rows")
    in_tensor_memory = arch == "sm_100a"
    registers = REGISTERS[arch]

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((n, heads, WIDTH), "bfloat16"),
        window_words: T.Tensor((window_rows, WINDOW_BYTES // 4), "uint32"),
        window_index: T.Tensor((n, window_width), "int32"),
        main_words: T.Tensor((main_rows, MAIN_BYTES // 4), "uint32"),
        main_index: T.Tensor((n, main_width), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((n, heads, WIDTH), "bfloat16"),
        scale: T.float32,
        window_records: T.int32,
        window_stride: T.int32,
        main_records: T.int32,
        main_stride: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            tx = T.get_thread_binding()
            queries = T.alloc_shared((HEADS, WIDTH), "bfloat16")
            keys = T.alloc_shared((2, KEYS, WIDTH), "bfloat16")
            weights = T.alloc_shared((2, HEADS, KEYS // 2), "bfloat16")
            shrinks = T.alloc_shared((HEADS,), "float32")
            inverses = T.alloc_shared((HEADS,), "float32")
            changed = T.alloc_shared((2,), "int32")  # whether a peak has moved; of tiles in turn
            listed = T.alloc_shared((2, 2, MAX_KEYS), "int32")  # of rows in turn: the window, the others
            counts = T.alloc_shared((2, 2), "int32")  # of what is listed
            totals = T.alloc_shared((2, LISTERS // LANES), "int32")
            loaded = T.alloc_barrier(1)  # queries
            step = T.alloc_local((1,), "int32")  # tiles so far
            logits = T.alloc_fragment((HEADS, KEYS), "float32")
            left, right = [two_of(T.alloc_fragment, (HEADS, QUARTER), "float32") for _ in range(2)]
            left_factors = T.alloc_fragment((HEADS,), "float32")
            right_factors = T.alloc_fragment((HEADS,), "float32")
            peak = T.alloc_fragment((HEADS,), "float32")
            last_peak = T.alloc_fragment((HEADS,), "float32")
            shrink = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_fragment((HEADS,), "float32")
            tile_total = T.alloc_fragment((HEADS,), "float32")
            sinks = T.alloc_fragment((HEADS,), "float32")
            rows = peak, last_peak, shrink
            left_sums, right_sums = (None, None), (None, None)
            left_added, right_added = (None, None, None), (None, None, None)
            if in_tensor_memory:
                products = T.alloc_tmem((HEADS, KEYS), "float32")
                left_sums, right_sums = [two_of(T.alloc_tmem, (HEADS, QUARTER), "float32") for _ in range(2)]
                multiplied = T.alloc_barrier(1)
                left_added, right_added = [[two_of(T.alloc_barrier, 1) for _ in range(3)] for _ in range(2)]
            operands = weights, keys
            left_side = left, left_sums, left_factors, 0, in_tensor_memory
            right_side = right, right_sums, right_factors, 1, in_tensor_memory
            groups = T.ceildiv(heads, HEADS)
            turns = T.cast(
                T.cast(n * groups - block + blocks - 1, "uint32") // T.cast(blocks, "uint32"), "int32"
            )
            factor = scale * LOG2_E
            step[0] = 0

            if tx < GROUP:
                T.inc_max_nreg(registers[0])
                first_row, first_head = _place(block, groups)
                T.tma_copy(
                    q[first_row, first_head : first_head + HEADS, :],
                    queries,
                    barrier=loaded,
                    annotations={"emit_arrive": 1},
                )
                T.sync_threads(STEP, THREADS)
                for turn in T.serial(turns):
                    head = _place(block + turn * blocks, groups)[1]
                    num_window, num_main = counts[turn % 2, 0], counts[turn % 2, 1]
                    window_tiles = T.ceildiv(num_window, KEYS)
                    num_tiles = T.max(window_tiles + T.ceildiv(num_main, KEYS), 1)
                    for h in (0, 1):
                        T.fill(left[h], 0.0)
                    T.fill(total, 0.0)
                    T.fill(peak, -1e30)
                    for i in T.Parallel(HEADS):
                        sinks[i] = -T.infinity("float32")
                        if head + i < heads:
                            sinks[i] = sink[head + i]
                    T.mbarrier_wait_parity(loaded, turn % 2)
                    for tile in T.serial(num_tiles):
                        parity = step[0] % 2
                        if in_tensor_memory:
                            T.gemm(
                                queries,
                                keys[parity, :, :],
                                products,
                                transpose_B=True,
                                clear_accum=True,
                                mbar=multiplied,
                                annotations={PHASE: parity},
                            )
                            T.copy(products, logits)
                        else:
                            T.gemm(
                                queries,
                                keys[parity, :, :],
                                logits,
                                transpose_B=True,
                                clear_accum=True,
                                annotations=ASYNC,
                            )
                        if tile > 0:
                            add(
                                left_side,
                                left_added[2],
                                operands,
                                1 - parity,
                                1,
                                False,
                                (step[0] + turn + 1) % 2,
                            )
                            wait_for_products(2, in_tensor_memory)
                        else:
                            wait_for_products(0, in_tensor_memory)
                        if tile + 1 == num_tiles and turn + 1 < turns:
                            next_row, next_head = _place(block + (turn + 1) * blocks, groups)
                            T.sync_threads(READ, GROUP)
                            T.tma_copy(
                                q[next_row, next_head : next_head + HEADS, :],
                                queries,
                                barrier=loaded,
                                annotations={"emit_arrive": 1},
                            )
                        is_window = tile < window_tiles
                        first = T.if_then_else(is_window, tile, tile - window_tiles) * KEYS
                        count = T.if_then_else(is_window, num_window, num_main)
                        shrunk = T.if_then_else(is_window, 1.0, SHRUNK)
                        find_peaks(logits, rows, shrinks, changed, parity, first, count, factor, shrunk)
                        wait_for_products(0, in_tensor_memory)
                        T.named_barrier_arrive(FREED, THREADS)
                        weigh(logits, peak, weights, 0, factor, is_window)
                        T.sync_threads(HALF_WEIGHED, MULTIPLIERS)
                        if tile > 0 and changed[parity] != 0:
                            rescale(left_side, shrinks)
                        add(left_side, left_added[0], operands, parity, 0, tile == 0, parity)
                        weigh(logits, peak, weights, 1, factor, is_window)
                        T.reduce_sum(logits, tile_total, dim=1)
                        for i in T.Parallel(HEADS):
                            total[i] = total[i] * shrink[i] + tile_total[i] / shrunk
                        if tile + 1 == num_tiles:
                            for i in T.Parallel(HEADS):
                                total[i] += T.exp2(sinks[i] * LOG2_E - peak[i] * factor)
                                total[i] = T.if_then_else(total[i] > 0, 1.0 / total[i], 0.0)
                            T.copy(total, inverses)
                            T.sync_threads(WEIGHED, MULTIPLIERS)
                            add(left_side, left_added[1], operands, parity, 1, False, turn % 2)
                            wait_for_products(0, in_tensor_memory)
                            finish(left_side, inverses, keys, parity)
                        else:
                            wait_for_products(0, in_tensor_memory)
                        T.sync_threads(STEP, THREADS)
                        step[0] += 1
            elif tx < MULTIPLIERS:
                T.inc_max_nreg(registers[1])
                lister = tx - GROUP
                ahead = T.alloc_local((1,), "int32")
                number = T.alloc_local((1,), "int32")
                found = T.alloc_local((1,), "int32")
                place = T.alloc_local((1,), "int32")
                state = ahead, number, found, place
                lists = listed, totals, counts
                indices = (
                    window_index,
                    (window_width, window_records, window_stride),
                    main_index,
                    (main_width, main_records, main_stride),
                )
                chunks = T.ceildiv(window_width, LISTERS) + T.ceildiv(main_width, LISTERS)
                listed_row = T.alloc_local((1,), "int32")
                last_listing = T.alloc_local((1,), "int32")  # tile of a row by which the next one is listed
                of_tile = T.alloc_local((1,), "int32")  # chunks that are listed in each until then
                if lister == 0:
                    changed[0] = 0
                if lister < 4:
                    counts[lister // 2, lister % 2] = 0
                found[0] = 0
                listed_row[0] = _place(block, groups)[0]
                load_number(ahead, indices, listed_row[0], 0, lister)
                list_chunks(state, indices, lists, listed_row[0], 0, 0, chunks, lister)
                T.named_barrier_arrive(LISTED, LISTERS + UNPACKERS)
                if turns > 1:
                    listed_row[0] = _place(block + blocks, groups)[0]
                    load_number(ahead, indices, listed_row[0], 0, lister)
                T.sync_threads(STEP, THREADS)
                for turn in T.serial(turns):
                    num_tiles = T.max(
                        T.ceildiv(counts[turn % 2, 0], KEYS) + T.ceildiv(counts[turn % 2, 1], KEYS), 1
                    )
                    last_listing[0] = T.max(num_tiles - 2, 0)
                    of_tile[0] = T.cast(
                        T.cast(chunks + last_listing[0], "uint32") // T.cast(last_listing[0] + 1, "uint32"),
                        "int32",
                    )
                    for h in (0, 1):
                        T.fill(right[h], 0.0)
                    for tile in T.serial(num_tiles):
                        parity = step[0] % 2
                        if lister == 0:
                            changed[1 - parity] = 0
                        if turn > 0 and tile == 0:
                            row, head = _place(block + (turn - 1) * blocks, groups)
                            _send(keys, out, 1 - parity, row, head)
                            T.tma_store_wait(PANELS)
                            T.named_barrier_arrive(LEFT, GROUP + UNPACKERS)
                            T.tma_store_wait(0)
                        if turn + 1 < turns and tile <= last_listing[0]:
                            list_chunks(
                                state,
                                indices,
                                lists,
                                listed_row[0],
                                (turn + 1) % 2,
                                tile * of_tile[0],
                                of_tile[0],
                                lister,
                            )
                            if tile == last_listing[0]:
                                T.named_barrier_arrive(LISTED, LISTERS + UNPACKERS)
                                if turn + 2 < turns:
                                    listed_row[0] = _place(block + (turn + 2) * blocks, groups)[0]
                                    load_number(ahead, indices, listed_row[0], 0, lister)
                        if tile > 0:
                            add(
                                right_side,
                                right_added[2],
                                operands,
                                1 - parity,
                                1,
                                False,
                                (step[0] + turn + 1) % 2,
                            )
                            wait_for_products(0, in_tensor_memory)
                        T.named_barrier_arrive(FREED, THREADS)
                        T.sync_threads(HALF_WEIGHED, MULTIPLIERS)
                        if tile > 0 and changed[parity] != 0:
                            rescale(right_side, shrinks)
                        add(right_side, right_added[0], operands, parity, 0, tile == 0, parity)
                        wait_for_products(0, in_tensor_memory)
                        if tile + 1 == num_tiles:
                            T.sync_threads(WEIGHED, MULTIPLIERS)
                            add(right_side, right_added[1], operands, parity, 1, False, turn % 2)
                            wait_for_products(0, in_tensor_memory)
                            finish(right_side, inverses, keys, parity)
                        T.sync_threads(STEP, THREADS)
                        step[0] += 1
                row, head = _place(block + (turns - 1) * blocks, groups)
                _send(keys, out, (step[0] + 1) % 2, row, head)
                T.tma_store_wait(0)
            else:
                T.dec_max_nreg(registers[2])
                thread = tx - MULTIPLIERS
                raws = (
                    (T.alloc_local((UNIT * 4,), "uint32"), T.alloc_local((UNITS,), "uint32")),
                    (T.alloc_local((UNIT * 4,), "uint32"), T.alloc_local((UNITS,), "uint32")),
                )
                here = T.alloc_local((2,), "int32")  # tiles of the row's window, and of its other keys
                there = T.alloc_local((2,), "int32")  # of the next row
                scratch = T.alloc_local((4,), "uint32"), T.alloc_local((2,), "uint32")
                plan = T.alloc_local((4,), "int32")  # list and tile to unpack, list and tile to fetch
                tiles = T.alloc_local((4,), "int32")  # of both pools: of the list to unpack, of that to fetch
                lead = T.alloc_local(
                    (1,), "int32"
                )  # the first row's tile 0 is unpacked before its first step
                mine = T.alloc_local((1,), "int32")
                source = window_words, main_words, listed

                T.sync_threads(LISTED, LISTERS + UNPACKERS)
                step[0] = 1
                lead[0] = 1
                for pool in (0, 1):
                    here[pool] = T.ceildiv(counts[0, pool], KEYS)
                    there[pool] = 0
                for w in T.unroll(UNIT * 4):
                    raws[1][0][w] = T.uint32(0)
                for w in T.unroll(UNITS):
                    raws[0][1][w] = T.uint32(0)
                    raws[1][1][w] = T.uint32(0)
                for turn in T.serial(turns):
                    slot = turn % 2
                    has_next = turn + 1 < turns
                    num_tiles = T.max(here[0] + here[1], 1)
                    for number in T.serial(num_tiles + lead[0]):
                        tile = number - lead[0]
                        other = (step[0] + 1) % 2
                        if turn > 0 and tile == 0:
                            T.sync_threads(LEFT, GROUP + UNPACKERS)
                        if has_next and tile == T.max(num_tiles - 2, 0):
                            T.sync_threads(LISTED, LISTERS + UNPACKERS)
                            for pool in (0, 1):
                                there[pool] = T.ceildiv(counts[1 - slot, pool], KEYS)
                        is_last = tile + 1 == num_tiles
                        is_beyond = tile + 2 >= num_tiles
                        plan[0] = T.if_then_else(is_last, 1 - slot, slot)
                        plan[1] = T.if_then_else(is_last, 0, tile + 1)
                        plan[2] = T.if_then_else(is_beyond, 1 - slot, slot)
                        plan[3] = T.if_then_else(is_beyond, tile + 2 - num_tiles, tile + 2)
                        for pool in (0, 1):
                            tiles[pool] = T.if_then_else(is_last, there[pool], here[pool])
                            tiles[2 + pool] = T.if_then_else(is_beyond, there[pool], here[pool])
                        if has_next or not is_last:
                            if tile < 0 or num_tiles == 1:
                                fetch(
                                    raws[0],
                                    source,
                                    plan[0],
                                    (tiles[0], tiles[1]),
                                    plan[1],
                                    0,
                                    thread // LANES,
                                    thread % LANES,
                                )
                            is_there = not is_beyond or (has_next and plan[3] < there[0] + there[1])
                            advance(
                                raws,
                                scratch,
                                source,
                                keys,
                                plan,
                                tiles,
                                other,
                                tile >= 0,
                                is_there,
                                thread,
                                mine,
                            )
                        else:
                            wait_for_half()
                        T.fence_proxy_async()
                        T.sync_threads(STEP, THREADS)
                        step[0] += 1
                    lead[0] = 0
                    for pool in (0, 1):
                        here[pool] = there[pool]

    return sparse_attention


def run(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    q, window_index, sink = q.contiguous(), window_index.contiguous(), sink.contiguous()
    out = torch.empty_like(q)
    if main_pool is None or main_index is None:  # any memory: nothing is read
        fields = MAIN_BYTES if window_pool.dtype == torch.uint8 else WIDTH
        main_pool, main_index = window_pool[:1, :1, :fields], window_index[:, :0]
    main_index = main_index.contiguous()
    window, main = flat_rows(window_pool), flat_rows(main_pool)
    places = window_pool.shape[1], rows_per_part(window_pool), main_pool.shape[1], rows_per_part(main_pool)
    if q.dtype == torch.bfloat16 and window.dtype == torch.uint8 and main.dtype == torch.uint8:
        assert max(window_index.shape[1], main_index.shape[1]) <= MAX_KEYS, f"{main_index.shape=}"
        assert window.data_ptr() % 16 == 0 and main.data_ptr() % 16 == 0, (
            "records lie at multiples of 16 bytes"
        )
        pools = window.view(torch.uint32), window_index, main.view(torch.uint32), main_index
        items = q.shape[0] * -(-q.shape[1] // HEADS)
        kernel()(q, *pools, sink, out, scale, *places, min(items, num_sms(q.device)))
    else:
        formats = [str(x.dtype).removeprefix("torch.") for x in (q, window, main)]
        program = in_float32(query=formats[0], window=formats[1], main=formats[2])
        program(q, window, window_index, main, main_index, sink, out, scale, *places)
    return out
