"""Sparse attention over any mixture of formats, in float32 and without matrix instructions."""

from tilelang.cuda import language as T

from tilelang_ops.common.kernels import cuda_kernel

WIDTH, LANES = 512, 32
WINDOW_BYTES, MAIN_BYTES = 528, 288  # of a record in FP8, in FP4
FLOAT_WARPS, PER_LANE = 4, WIDTH // LANES
LOG2_E = 1.4426950408889634


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
        _float(value)
        * 2.0**120
        * _float(T.if_then_else(T.cast(scale, "int32") == 255, T.uint32(0x7FC00000), power))
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
