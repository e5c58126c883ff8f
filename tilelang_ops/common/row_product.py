"""Products with few weight rows, as of the residual streams with a site's matrix: blocks share the channels.

Rows of activations are the first operand of the instruction, the weights' the second, so that few of these
cost little:

    C[64 or 128 activation rows, weight rows] += X[.., 64] x W[weight rows, 64]^T     for every 64 channels

A row's sum is that of the 16 channels of an instruction, instructions ascending, segments of a fixed length
ascending: the weight alone fixes it. A block loads all of a segment at once, for that is bound by latency.
"""

import tilelang.cuda.language as T

from tilelang_ops.common.packing import BLOCK

SEGMENT_STEPS = 10
TILE_ROWS = 64  # activation rows of a block on SM90; on SM100 the instruction wants 128
MAX_COLUMNS = 80  # with more of them the operands of a segment do not fit into shared memory


def segment_count(width: int) -> int:
    """Segments that channels are summed in."""
    return -(-width // (BLOCK * SEGMENT_STEPS))


def row_program(*, name: str, columns: int, width: int, in_turn: bool, arch: str):
    """out[segment, row, column]: sums of segments of the channels.

    Args:
        name: of the program.
        columns: weight rows, at most `MAX_COLUMNS`.
        width: channels.
        in_turn: a block sums all segments, in order, and `out` has one; else each has a block of its own.
        arch: the target.
    """
    assert columns <= MAX_COLUMNS, f"{columns=}"
    m = T.dynamic("m")
    on_tmem = arch == "sm_100a"
    rows = 128 if on_tmem else TILE_ROWS
    padded = -(-columns // 16) * 16
    num_segments = segment_count(width)
    num_blocks = 1 if in_turn else num_segments
    num_steps = SEGMENT_STEPS * (num_segments if in_turn else 1)  # beyond the last channel operands are zero
    stages = 6 if on_tmem else SEGMENT_STEPS

    @T.macro
    def add(total, part):
        for i, j in T.Parallel(rows, padded):
            total[i, j] = total[i, j] + part[i, j]

    @T.macro
    def sum_segments(x, weights, total, tile, segment):
        x_tile = T.alloc_shared((rows, BLOCK), "bfloat16")
        w_tile = T.alloc_shared((padded, BLOCK), "bfloat16")
        T.clear(total)
        sum_of = total
        if in_turn:
            sum_of = T.alloc_fragment((rows, padded), "float32")
            T.clear(sum_of)
        for step in T.Pipelined(num_steps, num_stages=stages):
            T.copy(x[tile * rows, (segment * SEGMENT_STEPS + step) * BLOCK], x_tile)
            T.copy(weights[0, (segment * SEGMENT_STEPS + step) * BLOCK], w_tile)
            T.gemm(x_tile, w_tile, sum_of, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            if in_turn:  # noqa: SIM102  known when traced
                if (step + 1) % SEGMENT_STEPS == 0:
                    add(total, sum_of)
                    T.clear(sum_of)

    @T.macro
    def sum_segments_on_tmem(x, weights, total, tile, segment):
        T.annotate_producer_reg_dealloc(40)
        T.annotate_consumer_reg_alloc(224)
        x_tile = T.alloc_shared((rows, BLOCK), "bfloat16")
        w_tile = T.alloc_shared((padded, BLOCK), "bfloat16")
        accumulator = T.alloc_tmem((rows, padded), "float32")
        done = T.alloc_barrier(1)
        if in_turn:
            part = T.alloc_fragment((rows, padded), "float32")
            T.clear(total)
        # The count is one that nvcc does not know: unrolled, the loop spills.
        for step in T.Pipelined(T.if_then_else(tile * rows < m, num_steps, 0), num_stages=stages):
            T.copy(x[tile * rows, (segment * SEGMENT_STEPS + step) * BLOCK], x_tile)
            T.copy(weights[0, (segment * SEGMENT_STEPS + step) * BLOCK], w_tile)
            is_first = step % SEGMENT_STEPS == 0
            T.gemm(x_tile, w_tile, accumulator, transpose_B=True, mbar=done, clear_accum=is_first)
            if in_turn:  # noqa: SIM102  known when traced
                if (step + 1) % SEGMENT_STEPS == 0:
                    T.copy(accumulator, part)
                    add(total, part)
        if not in_turn:
            T.copy(accumulator, total)

    sum_all = sum_segments_on_tmem if on_tmem else sum_segments

    @T.prim_func
    def program(
        x: T.Tensor((m, width), "bfloat16"),
        weights: T.Tensor((columns, width), "bfloat16"),
        out: T.Tensor((num_blocks, m, columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(m, rows), num_blocks, threads=256 if on_tmem else 128) as (tile, segment):
            total = T.alloc_fragment((rows, padded), "float32")
            sum_all(x, weights, total, tile, segment)
            for i, j in T.Parallel(rows, padded):
                if tile * rows + i < m and j < columns:
                    out[segment, tile * rows + i, j] = total[i, j]

    return program.with_attr("global_symbol", name)
