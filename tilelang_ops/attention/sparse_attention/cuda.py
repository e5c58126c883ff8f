"""sparse_attention on CUDA: one block of threads for a row and 64 of its heads."""

import torch
from tilelang.cuda import language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.records import flat_rows, rows_per_part

WIDTH = 512
WINDOW_BYTES, MAIN_BYTES = 528, 288
HEADS = 64  # of a block of threads
KEYS = 64  # unpacked together
LANES, WARPS = 32, 8
THREADS = WARPS * LANES
PER_WARP = KEYS // WARPS  # keys that a warp unpacks, in two halves
HALF = PER_WARP // 2
MAX_KEYS = 1024  # of a row in one pool
FLOAT_WARPS, PER_LANE = 4, WIDTH // LANES  # of the kernel in float32
LOG2_E = 1.4426950408889634
UNIT = 128.0  # unpacked keys are the true ones divided by this
NAN_PAIR = 0x7FC07FC0
ASYNC = {"wg_wait": -1}  # the product runs on until T.wait_wgmma


@T.macro
def _list_records(index, row, width, records, stride, listed, first, totals, found, tx):
    """Writes the rows of a pool that index[row] names, in order, to listed[first], listed[first + 1], ...

    Copies of the last one fill the block.
    """
    per_thread = T.ceildiv(width, THREADS)
    count = T.alloc_local((1,), "int32")
    scan = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    count[0] = 0
    for j in T.serial(per_thread):
        if tx * per_thread + j < width:
            if index[row, tx * per_thread + j] >= 0:
                count[0] += 1
    scan[0] = count[0]
    for step in T.unroll(5):
        below = T.shfl_up(scan[0], 1 << step)
        if tx % LANES >= (1 << step):
            scan[0] += below
    if tx % LANES == LANES - 1:
        totals[tx // LANES] = scan[0]
    T.sync_threads()
    place[0] = first + scan[0] - count[0]
    found[0] = 0
    for w in T.unroll(WARPS):
        if w < tx // LANES:
            place[0] += totals[w]
        found[0] += totals[w]
    for j in T.serial(per_thread):
        if tx * per_thread + j < width:
            number = index[row, tx * per_thread + j]
            if number >= 0:
                listed[place[0]] = number // records * stride + number % records
                place[0] += 1
    T.sync_threads()
    if found[0] > 0:
        if found[0] + tx < T.ceildiv(found[0], KEYS) * KEYS:
            listed[first + found[0] + tx] = listed[first + found[0] - 1]
    T.sync_threads()


@T.macro
def _fetch(raw, pools, listed, window_blocks, has_main, block, half, warp, lane):
    """Loads this lane's 16 codes and their scale of HALF keys."""
    words, scales = raw
    window_words, window_bytes, main_words, main_bytes = pools
    if block < window_blocks:
        for k in T.unroll(HALF):
            record = listed[block * KEYS + warp * PER_WARP + half * HALF + k]
            for v in T.vectorized(4):
                words[k, v] = window_words[record, lane * 4 + v]
            scales[k] = T.cast(window_bytes[record, WIDTH + lane // 2], "uint32")
    elif has_main:
        for k in T.unroll(HALF):
            record = listed[MAX_KEYS + (block - window_blocks) * KEYS + warp * PER_WARP + half * HALF + k]
            for v in T.vectorized(2):
                words[k, v] = main_words[record, lane * 2 + v]
            scales[k] = T.cast(main_bytes[record, WIDTH // 2 + lane], "uint32")


@T.macro
def _unpack(raw, scratch, keys, window_blocks, has_main, block, half, warp, lane):
    """Writes what `_fetch` loaded to the tile of the block, as bfloat16."""
    words, scales = raw
    pairs, factor_bits = scratch
    pair_values = T.view(pairs, (8,), "bfloat16")
    factors = T.view(factor_bits, (4,), "bfloat16")
    key = warp * PER_WARP + half * HALF
    sign = T.uint32(0x80008000)
    if block < window_blocks:
        mask = T.uint32(0x07F007F0)
        for k in T.unroll(HALF):
            factor_bits[0] = (T.min(scales[k], T.uint32(141)) + T.uint32(113)) * T.uint32(0x00800080)
            factor_bits[1] = T.if_then_else(
                scales[k] == T.uint32(255),
                T.uint32(NAN_PAIR),
                (T.max(scales[k], T.uint32(141)) - T.uint32(14)) * T.uint32(0x00800080),
            )
            for part in T.unroll(2):
                for p in T.unroll(2):
                    low, high = words[k, 2 * part], words[k, 2 * part + 1]
                    both = T.if_then_else(
                        p == 0,
                        (low & T.uint32(0xFFFF)) | (high << T.uint32(16)),
                        (low >> T.uint32(16)) | (high & T.uint32(0xFFFF0000)),
                    )
                    pairs[2 * p] = ((both << T.uint32(4)) & mask) | ((both << T.uint32(8)) & sign)
                    pairs[2 * p + 1] = ((both >> T.uint32(4)) & mask) | (both & sign)
                for v in T.vectorized(8):
                    pair_values[v] = pair_values[v] * factors[0]
                for v in T.vectorized(8):
                    keys[block % 2, key + k, _chunk(lane * 2 + part) * 8 + v] = pair_values[v] * factors[2]
    elif has_main:
        mask = T.uint32(0x01C001C0)
        for k in T.unroll(HALF):
            factor_bits[0] = T.if_then_else(
                scales[k] == T.uint32(127), T.uint32(NAN_PAIR), scales[k] * T.uint32(0x00100010)
            )
            for v in T.vectorized(2):
                factors[v] = factors[v] * T.cast(2.0**120, "bfloat16")
            for v in T.vectorized(2):
                factors[v] = factors[v] * T.cast(2.0**119, "bfloat16")
            for part in T.unroll(2):
                word = words[k, part]
                pairs[0] = ((word << T.uint32(6)) & mask) | ((word << T.uint32(12)) & sign)
                pairs[1] = ((word << T.uint32(2)) & mask) | ((word << T.uint32(8)) & sign)
                pairs[2] = ((word >> T.uint32(2)) & mask) | ((word << T.uint32(4)) & sign)
                pairs[3] = ((word >> T.uint32(6)) & mask) | (word & sign)
                for v in T.vectorized(8):
                    keys[block % 2, key + k, _chunk(lane * 2 + part) * 8 + v] = pair_values[v] * factors[0]


def _chunk(number):
    """Where a chunk of 8 channels lies in a tile's row: so that a warp's stores meet no bank twice."""
    return number ^ (number // 8 % 2)


@cuda_kernel(
    builds=lambda model: [{"heads": model.num_attention_heads, "has_main": m} for m in (False, True)],
    pass_configs={"tl.disable_thread_storage_sync": True},
    uses_tensor_cores=True,
)
def kernel(heads: int, has_main: bool, arch: str):
    n, window_width, main_width = T.dynamic("n"), T.dynamic("window_width"), T.dynamic("main_width")
    window_rows, main_rows = T.dynamic("window_rows"), T.dynamic("main_rows")
    in_tensor_memory = arch == "sm_100a"

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((n, heads, WIDTH), "bfloat16"),
        window_words: T.Tensor((window_rows, WINDOW_BYTES // 4), "uint32"),
        window_bytes: T.Tensor((window_rows, WINDOW_BYTES), "uint8"),
        window_index: T.Tensor((n, window_width), "int32"),
        main_words: T.Tensor((main_rows, MAIN_BYTES // 4), "uint32"),
        main_bytes: T.Tensor((main_rows, MAIN_BYTES), "uint8"),
        main_index: T.Tensor((n, main_width), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((n, heads, WIDTH), "bfloat16"),
        scale: T.float32,
        window_records: T.int32,
        window_stride: T.int32,
        main_records: T.int32,
        main_stride: T.int32,
    ):
        with T.Kernel(n, T.ceildiv(heads, HEADS), threads=THREADS) as (row, group):
            tx = T.get_thread_binding()
            warp, lane = tx // LANES, tx % LANES
            queries = T.alloc_shared((HEADS, WIDTH), "bfloat16")
            keys = T.alloc_shared((2, KEYS, WIDTH), "bfloat16")
            weights = T.alloc_shared((HEADS, KEYS), "bfloat16")
            listed = T.alloc_shared((2 * MAX_KEYS,), "int32")
            totals = T.alloc_shared((WARPS,), "int32")
            num_window = T.alloc_local((1,), "int32")
            num_main = T.alloc_local((1,), "int32")
            logits = T.alloc_fragment((HEADS, KEYS), "float32")
            sums = T.alloc_fragment((HEADS, KEYS), "float32")
            values = T.alloc_fragment((HEADS, WIDTH), "float32")
            peak = T.alloc_fragment((HEADS,), "float32")
            last_peak = T.alloc_fragment((HEADS,), "float32")
            shrink = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_fragment((HEADS,), "float32")
            line = T.alloc_local((8,), "bfloat16")
            swapped = T.alloc_local((8,), "bfloat16")
            raw = T.alloc_local((HALF, 4), "uint32"), T.alloc_local((HALF,), "uint32")
            scratch = T.alloc_local((4,), "uint32"), T.alloc_local((2,), "uint32")
            pools = window_words, window_bytes, main_words, main_bytes
            if in_tensor_memory:
                products = T.alloc_tmem((HEADS, KEYS), "float32")
                accumulated = T.alloc_tmem((HEADS, WIDTH), "float32")
                multiplied = T.alloc_barrier(1)
                added = T.alloc_barrier(1)

            for j in T.serial(HEADS * WIDTH // 8 // THREADS):
                head, chunk = (j * THREADS + tx) // (WIDTH // 8), (j * THREADS + tx) % (WIDTH // 8)
                for v in T.vectorized(8):
                    line[v] = T.if_then_else(
                        group * HEADS + head < heads,
                        q[row, group * HEADS + head, chunk * 8 + v],
                        T.cast(0.0, "bfloat16"),
                    )
                for v in T.unroll(8):
                    swapped[v] = line[v // 2 + v % 2 * 4]
                for v in T.vectorized(8):
                    queries[head, _chunk(chunk) * 8 + v] = swapped[v]
            _list_records(
                window_index,
                row,
                window_width,
                window_records,
                window_stride,
                listed,
                0,
                totals,
                num_window,
                tx,
            )
            num_main[0] = 0
            if has_main:
                _list_records(
                    main_index,
                    row,
                    main_width,
                    main_records,
                    main_stride,
                    listed,
                    MAX_KEYS,
                    totals,
                    num_main,
                    tx,
                )
            T.fill(values, 0.0)
            T.fill(sums, 0.0)
            T.fill(peak, -1e30)
            window_blocks = T.ceildiv(num_window[0], KEYS)
            num_blocks = window_blocks + T.ceildiv(num_main[0], KEYS)
            if num_blocks > 0:
                for half in T.unroll(2):
                    _fetch(raw, pools, listed, window_blocks, has_main, 0, half, warp, lane)
                    _unpack(raw, scratch, keys, window_blocks, has_main, 0, half, warp, lane)
                if num_blocks > 1:
                    _fetch(raw, pools, listed, window_blocks, has_main, 1, 0, warp, lane)
            for block in T.serial(num_blocks):
                T.fence_proxy_async()
                T.sync_threads()
                if in_tensor_memory:
                    T.gemm(
                        queries,
                        keys[block % 2, :, :],
                        products,
                        transpose_B=True,
                        clear_accum=True,
                        mbar=multiplied,
                    )
                else:
                    T.gemm(
                        queries,
                        keys[block % 2, :, :],
                        logits,
                        transpose_B=True,
                        clear_accum=True,
                        annotations=ASYNC,
                    )
                if block + 1 < num_blocks:
                    _unpack(raw, scratch, keys, window_blocks, has_main, block + 1, 0, warp, lane)
                    _fetch(raw, pools, listed, window_blocks, has_main, block + 1, 1, warp, lane)
                if in_tensor_memory:
                    T.copy(products, logits)
                else:
                    T.wait_wgmma(0)
                T.copy(peak, last_peak)
                for i, j in T.Parallel(HEADS, KEYS):
                    place = block * KEYS + j
                    is_key = T.if_then_else(
                        block < window_blocks,
                        place < num_window[0],
                        place - window_blocks * KEYS < num_main[0],
                    )
                    logits[i, j] = T.if_then_else(
                        is_key, logits[i, j] * (scale * (UNIT * LOG2_E)), -T.infinity("float32")
                    )
                T.reduce_max(logits, peak, dim=1, clear=False)
                for i in T.Parallel(HEADS):
                    shrink[i] = T.exp2(last_peak[i] - peak[i])
                for i, j in T.Parallel(HEADS, KEYS):
                    logits[i, j] = T.exp2(logits[i, j] - peak[i])
                    sums[i, j] = sums[i, j] * shrink[i] + logits[i, j]
                T.copy(logits, weights)
                if in_tensor_memory:
                    if block > 0:
                        T.copy(accumulated, values)
                for i, j in T.Parallel(HEADS, WIDTH):
                    values[i, j] = values[i, j] * shrink[i]
                if in_tensor_memory:
                    T.copy(values, accumulated)
                T.fence_proxy_async()
                T.sync_threads()
                if in_tensor_memory:
                    T.gemm(weights, keys[block % 2, :, :], accumulated, mbar=added)
                else:
                    T.gemm(weights, keys[block % 2, :, :], values, annotations=ASYNC)
                if block + 1 < num_blocks:
                    _unpack(raw, scratch, keys, window_blocks, has_main, block + 1, 1, warp, lane)
                if block + 2 < num_blocks:
                    _fetch(raw, pools, listed, window_blocks, has_main, block + 2, 0, warp, lane)
                if not in_tensor_memory:
                    T.wait_wgmma(0)
            if in_tensor_memory:
                if num_blocks > 0:
                    T.copy(accumulated, values)
            T.reduce_sum(sums, total, dim=1)
            for i in T.Parallel(HEADS):
                if group * HEADS + i < heads:
                    total[i] += T.exp2(sink[group * HEADS + i] * LOG2_E - peak[i])
                total[i] = T.if_then_else(total[i] > 0, UNIT / total[i], 0.0)
            for i, j in T.Parallel(HEADS, WIDTH):
                values[i, j] = values[i, j] * total[i]
            T.copy(values, queries)
            T.sync_threads()
            for j in T.serial(HEADS * WIDTH // 8 // THREADS):
                head, chunk = (j * THREADS + tx) // (WIDTH // 8), (j * THREADS + tx) % (WIDTH // 8)
                for v in T.vectorized(8):
                    swapped[v] = queries[head, _chunk(chunk) * 8 + v]
                for v in T.unroll(8):
                    line[v // 2 + v % 2 * 4] = swapped[v]
                if group * HEADS + head < heads:
                    for v in T.vectorized(8):
                        out[row, group * HEADS + head, chunk * 8 + v] = line[v]

    return sparse_attention


def _float(bits):
    return T.reinterpret(bits, "float32")


def _window_value(pool, record, channel):
    """Float32 of one channel of an FP8 record."""
    code = T.cast(pool[record, channel], "uint32")
    scale = T.cast(pool[record, WIDTH + channel // 32], "uint32")
    bits = (code & T.uint32(0x7F)) << T.uint32(20) | (code & T.uint32(0x80)) << T.uint32(24)
    value = T.if_then_else((code & T.uint32(0x7F)) == T.uint32(0x7F), T.uint32(0x7FC00000), bits)
    power = T.if_then_else(scale == T.uint32(0), T.uint32(0x00400000), scale << T.uint32(23))
    return (
        _float(value) * 2.0**120 * _float(T.if_then_else(scale == T.uint32(255), T.uint32(0x7FC00000), power))
    )


def _main_value(pool, record, channel):
    """Float32 of one channel of an FP4 record."""
    code = T.cast(pool[record, channel // 2], "uint32") >> T.cast(channel % 2 * 4, "uint32")
    scale = T.cast(pool[record, WIDTH // 2 + channel // 16], "uint32")
    bits = (code & T.uint32(7)) << T.uint32(22) | (code & T.uint32(8)) << T.uint32(28)
    factor = (scale & T.uint32(0x7F)) << T.uint32(20) | (scale & T.uint32(0x80)) << T.uint32(24)
    factor = T.if_then_else((scale & T.uint32(0x7F)) == T.uint32(0x7F), T.uint32(0x7FC00000), factor)
    return _float(bits) * 2.0**126 * (_float(factor) * 2.0**120)


@T.macro
def _add_keys(
    value_of, pool, index, row, width, records, stride, queries, key, values, state, seen, warp, lane, scale
):
    """Adds the keys of one list whose turn it is for this warp."""
    for column in T.serial(width):
        if index[row, column] >= 0:
            if seen[0] % FLOAT_WARPS == warp:
                record = index[row, column] // records * stride + index[row, column] % records
                state[2] = 0.0
                for c in T.unroll(PER_LANE):
                    key[c] = value_of(pool, record, c * LANES + lane)
                    state[2] += queries[c] * key[c]
                for step in T.unroll(5):
                    state[2] += T.shfl_xor(state[2], 1 << step)
                state[2] *= scale * LOG2_E
                state[3] = T.max(state[0], state[2])
                state[0] = T.exp2(state[0] - state[3])
                state[2] = T.exp2(state[2] - state[3])
                state[1] = state[1] * state[0] + state[2]
                for c in T.unroll(PER_LANE):
                    values[c] = values[c] * state[0] + state[2] * key[c]
                state[0] = state[3]
            seen[0] += 1


@cuda_kernel(builds=lambda model: [])
def in_float32(query: str, window: str, main: str):
    """Any mixture of formats, in float32 without matrix instructions: FLOAT_WARPS warps for a row and a head.

    Warp w takes keys w, w + FLOAT_WARPS, ... of the row's list; their sums are merged in order.
    """
    n, heads, window_width, main_width = (T.dynamic(x) for x in ("n", "heads", "window_width", "main_width"))
    window_rows, main_rows = T.dynamic("window_rows"), T.dynamic("main_rows")
    window_fields = WIDTH if window == "float32" else WINDOW_BYTES
    main_fields = WIDTH if main == "float32" else MAIN_BYTES

    def plain(pool, record, channel):
        return pool[record, channel]

    window_value = plain if window == "float32" else _window_value
    main_value = plain if main == "float32" else _main_value

    @T.prim_func
    def in_float32(
        q: T.Tensor((n, heads, WIDTH), query),
        window_pool: T.Tensor((window_rows, window_fields), window),
        window_index: T.Tensor((n, window_width), "int32"),
        main_pool: T.Tensor((main_rows, main_fields), main),
        main_index: T.Tensor((n, main_width), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((n, heads, WIDTH), query),
        scale: T.float32,
        window_records: T.int32,
        window_stride: T.int32,
        main_records: T.int32,
        main_stride: T.int32,
    ):
        with T.Kernel(n, heads, threads=FLOAT_WARPS * LANES) as (row, head):
            tx = T.get_thread_binding()
            warp, lane = tx // LANES, tx % LANES
            sums = T.alloc_shared((FLOAT_WARPS, WIDTH), "float32")
            states = T.alloc_shared((FLOAT_WARPS, 2), "float32")
            queries = T.alloc_local((PER_LANE,), "float32")
            key = T.alloc_local((PER_LANE,), "float32")
            values = T.alloc_local((PER_LANE,), "float32")
            state = T.alloc_local((4,), "float32")  # the largest logit, the sum of weights, two of the moment
            seen = T.alloc_local((1,), "int32")
            for c in T.unroll(PER_LANE):
                queries[c] = T.cast(q[row, head, c * LANES + lane], "float32")
                values[c] = 0.0
            state[0] = -1e30
            state[1] = 0.0
            seen[0] = 0
            _add_keys(
                window_value,
                window_pool,
                window_index,
                row,
                window_width,
                window_records,
                window_stride,
                queries,
                key,
                values,
                state,
                seen,
                warp,
                lane,
                scale,
            )
            _add_keys(
                main_value,
                main_pool,
                main_index,
                row,
                main_width,
                main_records,
                main_stride,
                queries,
                key,
                values,
                state,
                seen,
                warp,
                lane,
                scale,
            )
            for c in T.unroll(PER_LANE):
                sums[warp, c * LANES + lane] = values[c]
            if lane == 0:
                states[warp, 0] = state[0]
                states[warp, 1] = state[1]
            T.sync_threads()
            state[0] = sink[head] * LOG2_E
            for w in T.unroll(FLOAT_WARPS):
                state[0] = T.max(state[0], states[w, 0])
            state[1] = T.exp2(sink[head] * LOG2_E - state[0])
            for w in T.unroll(FLOAT_WARPS):
                state[1] += states[w, 1] * T.exp2(states[w, 0] - state[0])
            for c in T.unroll(PER_LANE // FLOAT_WARPS):
                channel = (c * FLOAT_WARPS + warp) * LANES + lane
                state[2] = 0.0
                for w in T.unroll(FLOAT_WARPS):
                    state[2] += sums[w, channel] * T.exp2(states[w, 0] - state[0])
                state[2] = T.if_then_else(seen[0] > 0, state[2] / state[1], 0.0)
                out[row, head, channel] = T.cast(state[2], query)

    return in_float32


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
        pools = window.view(torch.uint32), window, window_index, main.view(torch.uint32), main, main_index
        program = kernel(heads=q.shape[1], has_main=main_index.shape[1] > 0)
        program(q, *pools, sink, out, scale, *places)
    else:
        formats = [str(x.dtype).removeprefix("torch.") for x in (q, window, main)]
        program = in_float32(query=formats[0], window=formats[1], main=formats[2])
        program(q, window, window_index, main, main_index, sink, out, scale, *places)
    return out
