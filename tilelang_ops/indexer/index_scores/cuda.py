"""index_scores and candidate_scores on CUDA: keys become bfloat16, which is exact, for the tensor cores.

A thread block takes some rows, about those of a sequence, and a run of keys, tile after tile: keys
[tile, 128] times queries [128, rows * heads]. Rows of several sequences are served one sequence after the
other. The sum over heads is taken in the accumulators, in one order.

On SM90 packed keys go from memory straight to the registers of the instruction, a warp group for a block:
thread t of four holds scale group t of a key, which is 16 bytes, and every instruction takes four of its
channels. The next tile is loaded while one is multiplied. What else a tile costs adds to its products, so
there is little of it: codes are decoded in four instructions a pair, and the four threads that have the
products of two keys share out the sums. On SM100 keys are decoded to shared memory and sums lie in tensor
memory.

`fp8_program.py` has the program that multiplies in FP8, on SM90.
"""

import math
from functools import cache

import tilelang.language as T
import torch
from tilelang.cuda import language as TC
from tilelang.layout import Fragment
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel, num_sms
from tilelang_ops.common.records import flat_rows, rows_per_part
from tilelang_ops.common.sizes import ModelSizes
from tilelang_ops.indexer.index_scores.fp8_program import MOST_ROWS, index_scores_program
from tilelang_ops.indexer.index_scores.key_codes import (
    SHRINK,
    channel,
    decode_pair,
    lane_of,
    power_pair,
    times,
)

WIDTH = 128
WORDS = WIDTH // 8
COLUMNS, MOST_COLUMNS = 128, 192  # rows times heads of a thread block
LEAST_COLUMNS = 16  # of an instruction on SM100
KEYS = {"sm_90a": 64, "sm_100a": 128}  # of a tile, and half as many threads
RUN = 128  # keys: tiles of any architecture
PART_KEYS = {1: 2048, COLUMNS: 4096}  # of a thread block at most, for so many columns or more
BLOCKS_PER_SM = {1: 4, COLUMNS: 4, MOST_COLUMNS: 3}  # likewise
START = 1  # runs that a block's start takes as long as, about
ALONE = 3  # times what a block takes beside others that it takes alone
UNIT = 8  # keys that lie together, if the pool's blocks are multiples
# Entry number of no entry. Sums with it stay below 2^31: the compiler moves them from one side of a
# comparison to the other.
NOWHERE = 1 << 30


PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True}


def _builds(model: ModelSizes) -> list[dict[str, int | str]]:
    """Sizes of the programs for all entries, by rows of a thread block, and of that for candidate blocks."""
    block = model.candidate_block_size
    some, most = (columns // model.index_n_heads for columns in (COLUMNS, MOST_COLUMNS))
    kinds = [(1, UNIT, 0), (some, UNIT, 0), (most, UNIT, 0), (1, block, block)]
    return [
        {
            "heads": model.index_n_heads,
            "rows": rows,
            "unit": unit,
            "block_size": size,
            "weight_type": "bfloat16",
        }
        for rows, unit, size in kinds
    ]


def _builds_of_codes(model: ModelSizes) -> list[dict[str, int | str]]:
    """The same, of as many rows as `of_codes` takes."""
    kinds = {(sizes["block_size"], min(sizes["rows"], MOST_ROWS)): sizes for sizes in _builds(model)}
    return [{**sizes, "rows": rows} for (_, rows), sizes in kinds.items()]


@cuda_kernel(builds=_builds_of_codes, targets=("sm_90a",), pass_configs=PASS_CONFIGS, uses_tensor_cores=True)
def of_codes(heads: int, rows: int, unit: int, block_size: int, weight_type: str):
    """As `kernel`, with products of FP8 values."""
    columns = rows * heads
    return index_scores_program(
        heads=heads,
        rows=rows,
        unit=unit,
        block_size=block_size,
        weight_type=weight_type,
        part_keys=_for_columns(PART_KEYS, columns),
        run=RUN,
        blocks_per_sm=_for_columns(BLOCKS_PER_SM, columns),
    )


@cuda_kernel(
    builds=lambda model: [{**sizes, "is_float": False} for sizes in _builds(model)],
    pass_configs=PASS_CONFIGS,
    uses_tensor_cores=True,
)
def kernel(heads: int, rows: int, is_float: bool, unit: int, block_size: int, weight_type: str, arch: str):
    """Entries of a row: all, or those of its candidate blocks of `block_size` > 0 entries."""
    n, num_candidates = T.dynamic("n"), T.dynamic("num_candidates")
    sequences, max_blocks = T.dynamic("sequences"), T.dynamic("max_blocks")
    pool_rows, scale_rows = T.dynamic("pool_rows"), T.dynamic("scale_rows", "int64")  # words: many
    num_scores = T.dynamic("num_scores", "int64")  # n * width
    assert heads % 8 == 0, f"{heads=}: products come in eights of columns"
    columns = max(rows * heads, LEAST_COLUMNS)
    on_tmem = arch == "sm_100a"
    tile_keys = KEYS[arch]
    threads = 2 * tile_keys
    units = _for_columns(PART_KEYS, columns) // unit
    own_rows = rows // 2 if rows % 2 == 0 else rows  # of a thread that stores scores
    tile_units = tile_keys // unit
    # The scales of a block's keys in shared memory: worth their loads where one row's keys are decoded.
    holds_scales = block_size > 0 and not is_float and not on_tmem
    code_shape, code_dtype = ((WIDTH,), "float32") if is_float else ((WORDS,), "int32")
    num_lines = columns * WIDTH // 8 // threads
    undo = 0.5 if is_float else 0.5 * 2.0**SHRINK

    @T.macro
    def load_queries(lines, q, first, n, tx):
        """Runs of 8 channels, all at once; those of rows that do not exist come from others."""
        for j in T.unroll(num_lines):
            column = T.min((j * threads + tx) // (WIDTH // 8), rows * heads - 1)
            row = T.min(first + column // heads, n - 1)
            for v in T.vectorized(4):
                lines[j, v] = q[row, column % heads * (WIDTH // 2) + tx % (WIDTH // 8) * 4 + v]

    @T.macro
    def place_queries(lines, query_pairs, tx):
        for j in T.unroll(num_lines):
            t, u = tx % (WIDTH // 8) // 4, tx % 4
            for p in T.unroll(4):
                low, high = lines[j, p // 2], lines[j, 2 + p // 2]
                query_pairs[(j * threads + tx) // (WIDTH // 8), 16 * u + 4 * p + t] = T.if_then_else(
                    p % 2 == 0,
                    (low & T.uint32(0xFFFF)) | (high << T.uint32(16)),
                    (low >> T.uint32(16)) | (high & T.uint32(0xFFFF0000)),
                )

    @T.macro
    def load(raw, words, codes, scales, places, scale_places, tile):
        for i, j in T.Parallel(tile_keys, WORDS):
            raw[i, j] = codes[places[tile * tile_units + i // unit] + i % unit, j]
        if not holds_scales:
            for i, t in T.Parallel(tile_keys, 4):
                words[i, t] = scales[scale_places[tile * tile_units + i // unit] + i % unit]

    @T.macro
    def decode(pairs, powers, raw, words, tile):
        for i, t in T.Parallel(tile_keys, 4):
            if holds_scales:
                powers[i, t] = power_pair(words[tile * tile_keys + i, t], 0)
            else:
                powers[i, t] = power_pair(words[i, t], t)
        for i, j in T.Parallel(tile_keys, WIDTH // 2):
            word = T.cast(raw[i, j % 4 * 4 + j // 16], "uint32")
            pairs[i, j] = times(decode_pair(word, j // 4 % 4), powers[i, j % 4])

    @T.macro
    def decode_from_pool(pairs, codes, scales, places, scale_places, tile):
        for i, j in T.Parallel(tile_keys, WIDTH // 2):
            key = places[tile * tile_units + i // unit] + i % unit
            scale_key = scale_places[tile * tile_units + i // unit] + i % unit
            word = T.cast(codes[key, j % 4 * 4 + j // 16], "uint32")
            pairs[i, j] = times(decode_pair(word, j // 4 % 4), power_pair(scales[scale_key], j % 4))

    def weighed(products, factors, i, column):
        """Twice the product's value where positive, else 0, times its factor."""
        return (products[i, column] + T.abs(products[i, column])) * factors[column]

    @T.macro
    def sum_heads(scores, products, factors, tx):
        """Scores that this thread stores: of key `key_of(tx)` for rows `row_of(tx)` and on.

        Four threads have the products of keys i and i + 8, two columns of eight each. One half of what two of
        them have summed goes to the one, one half to the other.
        """
        parts = T.alloc_local((2 * rows,), "float32")
        for e in T.unroll(2):
            for r in T.unroll(rows):
                parts[e * rows + r] = 0.0
                for u in T.unroll(heads // 8):
                    for v in T.unroll(2):
                        key = tx // 32 * 16 + tx % 32 // 4 + e * 8
                        column = r * heads + u * 8 + tx % 4 * 2 + v
                        parts[e * rows + r] = parts[e * rows + r] + weighed(products, factors, key, column)
        is_odd, is_upper = tx % 2 == 1, tx % 4 >= 2
        for r in T.unroll(rows):
            low, high = parts[r], parts[rows + r]
            scores[r] = T.if_then_else(is_odd, high, low) + T.shfl_xor(T.if_then_else(is_odd, low, high), 1)
        for r in T.unroll(own_rows):
            if own_rows < rows:
                low, high = scores[r], scores[own_rows + r]
                parts[r] = T.if_then_else(is_upper, high, low) + T.shfl_xor(
                    T.if_then_else(is_upper, low, high), 2
                )
            else:
                parts[r] = scores[r] + T.shfl_xor(scores[r], 2)
            scores[r] = parts[r]

    def key_of(tx):
        """Key of a tile whose scores a thread stores."""
        return tx // 32 * 16 + tx % 32 // 4 + tx % 2 * 8

    def row_of(tx):
        """First of the rows whose scores a thread stores."""
        return tx % 4 // 2 * own_rows if own_rows < rows else 0

    @T.macro
    def decode_floats(decoded, codes, places, tile):
        for i, k in T.Parallel(tile_keys, WIDTH):
            key = places[tile * tile_units + i // unit] + i % unit
            decoded[i, k] = T.cast(codes[key, channel(k)], "bfloat16")

    def number_of(candidates, row, column, width):
        """Entry number of a column; of one outside, NOWHERE."""
        if not block_size:
            return T.if_then_else(column < width, column, NOWHERE)
        block = T.if_then_else(column < width, candidates[row, T.min(column, width - 1) // block_size], -1)
        return T.if_then_else(block >= 0, block * block_size + column % block_size, NOWHERE)

    @T.prim_func
    def index_scores(
        q: T.Tensor((n, heads * WIDTH // 2), "uint32"),
        weights: T.Tensor((n, heads), weight_type),
        codes: T.Tensor((pool_rows, *code_shape), code_dtype),
        scales: T.Tensor((scale_rows,), "int32"),
        block_tables: T.Tensor((sequences, max_blocks), "int32"),
        row_seq: T.Tensor((n,), "int32"),
        num_visible: T.Tensor((n,), "int32"),
        candidates: T.Tensor((n, num_candidates), "int32"),
        out: T.Tensor((num_scores,), "float32"),
        width: T.int32,
        entries: T.int32,
        stride: T.int32,
        scale_stride: T.int32,
        runs: T.int32,
    ):
        with T.Kernel(T.ceildiv(width, RUN * runs), T.ceildiv(n, rows), threads=threads) as (
            part,
            group,
        ):
            if not on_tmem:
                TC.no_set_max_nreg()
                TC.annotate_min_blocks_per_sm(_for_columns(BLOCKS_PER_SM, columns))
            tx = T.get_thread_binding()
            queries = T.alloc_shared((columns, WIDTH), "bfloat16")
            query_pairs = T.view(queries, (columns, WIDTH // 2), "uint32")
            lines = T.alloc_local((num_lines, 4), "uint32")
            factors = T.alloc_shared((columns,), "float32")
            numbers = T.alloc_shared((units,), "int32")  # first entries of the units
            places = T.alloc_shared((units,), "int32")  # their rows of the pool
            scale_places = T.alloc_shared((units,), "int64")
            seqs = T.alloc_shared((rows,), "int32")  # of the rows, -1 behind the last one
            visible = T.alloc_shared((rows,), "int32")
            products = T.alloc_fragment((tile_keys, columns), "float32")
            most = T.alloc_local((1,), "int32")
            count = T.alloc_local((1,), "int32")  # tiles with a visible entry
            first = group * rows
            tiles = runs * (RUN // tile_keys)
            if on_tmem:
                decoded = T.alloc_shared((tile_keys, WIDTH), "bfloat16")
                pairs = T.view(decoded, (tile_keys, WIDTH // 2), "uint32")
                total = TC.alloc_tmem((tile_keys, columns), "float32")
                arrived = TC.alloc_barrier(1)
                by_row = T.alloc_fragment((tile_keys, rows, heads), "float32")
                sums = T.alloc_fragment((tile_keys, rows), "float32")
            else:
                own = T.alloc_local((rows,), "float32")
                # First numbers of units whose entry of this thread its rows do not see.
                limits = T.alloc_local((own_rows,), "int32")
                room = T.alloc_local((1,), "int32")  # columns from this thread's first one on
                start = T.alloc_local((1,), "int64")  # place of its scores
                pairs = T.alloc_fragment((tile_keys, WIDTH // 2), "uint32")
                decoded = T.view(pairs, (tile_keys, WIDTH), "bfloat16")
                T.clear(decoded)
                if not is_float:
                    raw = T.alloc_fragment((tile_keys, WORDS), "int32")
                    powers = T.alloc_fragment((tile_keys, 4), "uint32")
                    layouts = {
                        raw: Fragment(raw.shape, lambda i, j: (lane_of(i, j // 4), i // 8 % 2 * 4 + j % 4)),
                        powers: Fragment(powers.shape, lambda i, t: (lane_of(i, t), i // 8 % 2)),
                    }
                    if holds_scales:
                        key_scales = T.alloc_shared((units * unit,), "int32")
                        words = T.view(key_scales, (units * unit, 4), "uint8")
                    else:
                        words = T.alloc_fragment((tile_keys, 4), "int32")
                        layouts[words] = Fragment(words.shape, lambda i, t: (lane_of(i, t), i // 8 % 2))
                    T.annotate_layout(layouts)
            load_queries(lines, q, first, n, tx)
            for i in T.Parallel(columns):
                row = first + i // heads
                factors[i] = T.if_then_else(
                    row < n and i < rows * heads,
                    T.cast(weights[T.min(row, n - 1), i % heads], "float32") * undo,
                    0.0,
                )
            for r in T.Parallel(rows):
                row = T.min(first + r, n - 1)
                seqs[r] = T.if_then_else(first + r < n, row_seq[row], -1)
                visible[r] = num_visible[row]
            place_queries(lines, query_pairs, tx)
            TC.fence_proxy_async()
            T.sync_threads()
            for leader in T.serial(rows):
                sequence = seqs[leader]
                if sequence >= 0 and (leader == 0 or sequence != seqs[T.max(leader - 1, 0)]):
                    most[0] = 0
                    for r in T.unroll(rows):
                        if seqs[r] == sequence:
                            most[0] = T.max(most[0], visible[r])
                    T.sync_threads()  # the sequence before has been served
                    if not on_tmem:
                        for r in T.unroll(own_rows):
                            row = row_of(tx) + r
                            limits[r] = T.if_then_else(
                                seqs[row] == sequence and (own_rows < rows or tx % 4 < 2),
                                visible[row] - key_of(tx) % unit,
                                -NOWHERE,
                            )
                        room[0] = width - part * tiles * tile_keys - key_of(tx)
                        start[0] = T.cast(first + row_of(tx), "int64") * width + (width - room[0])
                    for u in T.Parallel(units):
                        number = number_of(
                            candidates, first + leader, part * tiles * tile_keys + u * unit, width
                        )
                        numbers[u] = number
                        pool_block = T.if_then_else(
                            number < most[0],
                            block_tables[sequence, T.if_then_else(number < most[0], number // entries, 0)],
                            0,
                        )
                        place = T.if_then_else(number < most[0], number % entries, 0)
                        places[u] = pool_block * stride + place
                        scale_places[u] = T.cast(pool_block, "int64") * scale_stride + place
                        if holds_scales:
                            for i in T.unroll(unit):
                                key_scales[u * unit + i] = scales[scale_places[u] + i]
                    T.sync_threads()
                    count[0] = 0
                    for tile in T.serial(tiles):
                        if numbers[tile * tile_units] < most[0]:
                            count[0] = tile + 1
                    if not on_tmem and not is_float:
                        load(raw, words, codes, scales, places, scale_places, 0)
                    for tile in T.serial(count[0]):
                        if is_float:
                            decode_floats(decoded, codes, places, tile)
                        elif on_tmem:
                            decode_from_pool(pairs, codes, scales, places, scale_places, tile)
                        else:
                            decode(pairs, powers, raw, words, tile)
                            load(
                                raw, words, codes, scales, places, scale_places, T.min(tile + 1, count[0] - 1)
                            )
                        column = (part * tiles + tile) * tile_keys
                        if on_tmem:
                            TC.fence_proxy_async()
                            T.sync_threads()
                            TC.gemm(decoded, queries, total, transpose_B=True, mbar=arrived, clear_accum=True)
                            T.copy(total, products)
                            for i, r, h in T.Parallel(tile_keys, rows, heads):
                                by_row[i, r, h] = weighed(products, factors, i, r * heads + h)
                            T.reduce_sum(by_row, sums, dim=2)
                            for i, r in T.Parallel(tile_keys, rows):
                                entry = numbers[tile * tile_units + i // unit] + i % unit
                                if seqs[r] == sequence and column + i < width:
                                    out[T.cast(first + r, "int64") * width + column + i] = T.if_then_else(
                                        entry < visible[r], sums[i, r], -T.infinity("float32")
                                    )
                        else:
                            T.gemm(
                                decoded,
                                queries,
                                products,
                                transpose_B=True,
                                clear_accum=True,
                                policy=T.GemmWarpPolicy.FullRow,
                            )
                            sum_heads(own, products, factors, tx)
                            number = numbers[tile * tile_units + key_of(tx) // unit]
                            for r in T.unroll(own_rows):
                                if limits[r] > -NOWHERE and tile * tile_keys < room[0]:
                                    out[start[0] + tile * tile_keys + r * T.cast(width, "int64")] = (
                                        T.if_then_else(number < limits[r], own[r], -T.infinity("float32"))
                                    )
                    for tile in T.serial(count[0], tiles):
                        for r, i in T.Parallel(rows, tile_keys):
                            column = (part * tiles + tile) * tile_keys + i
                            if seqs[r] == sequence and column < width:
                                out[T.cast(first + r, "int64") * width + column] = -T.infinity("float32")

    return index_scores


def run(
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    block_tables: Tensor,
    row_seq: Tensor,
    num_visible: Tensor,
    max_visible: int,
    candidates: Tensor | None = None,
    block_size: int = 0,
    in_fp8: bool = False,
) -> Tensor:
    num_rows, heads = q.shape[:2]
    entries = code_pool.shape[1]
    rows = 1 if candidates is not None else _rows_at_once(heads, num_rows, block_tables.shape[0])
    if in_fp8:
        rows = min(rows, MOST_ROWS)
    width = max_visible if candidates is None else candidates.shape[1] * block_size
    unit = math.gcd(UNIT if candidates is None else block_size, entries, UNIT)
    out = torch.empty(num_rows, width, dtype=torch.float32, device=q.device)
    is_float = scale_pool is None
    assert not (in_fp8 and is_float), "keys in float32 are not multiplied in FP8"
    codes = flat_rows(code_pool) if is_float else flat_rows(code_pool).view(torch.int32)
    scales = block_tables.new_zeros(1) if is_float else flat_rows(scale_pool).view(torch.int32).flatten()
    weight_type = str(weights.dtype).removeprefix("torch.")
    sizes = {"heads": heads, "rows": rows, "unit": unit, "block_size": block_size, "weight_type": weight_type}
    program = of_codes(**sizes) if in_fp8 else kernel(**sizes, is_float=is_float)
    program(
        q.to(torch.bfloat16).flatten(1).contiguous().view(torch.uint32),
        weights.contiguous(),
        codes,
        scales,
        block_tables.contiguous(),
        row_seq.contiguous(),
        num_visible.contiguous(),
        row_seq.view(-1, 1) if candidates is None else candidates.contiguous(),
        out.view(-1),
        width,
        entries,
        rows_per_part(code_pool),
        1 if is_float else rows_per_part(scale_pool),
        _runs(-(-num_rows // rows), -(-width // RUN), rows * heads, num_sms(q.device)),
    )
    return out


def _rows_at_once(heads: int, num_rows: int, sequences: int) -> int:
    """Rows of a thread block: about those of a sequence, for another one in it is served after the first.

    Every number gives the same bits.
    """
    of_sequence = -(-num_rows // sequences)
    some, most = max(1, COLUMNS // heads), max(1, MOST_COLUMNS // heads)
    return 1 if of_sequence == 1 else most if some < of_sequence <= most else some


def _for_columns(sizes: dict[int, int], columns: int) -> int:
    return next(size for least, size in reversed(sizes.items()) if columns >= least)


@cache
def _runs(groups: int, all_runs: int, columns: int, sms: int) -> int:
    """Runs of keys of a thread block, so that all multiprocessors end at about the same time.

    They change no bits.
    """
    slots = sms * _for_columns(BLOCKS_PER_SM, columns)
    most = min(all_runs, _for_columns(PART_KEYS, columns) // RUN)

    def time(runs: int) -> int:
        blocks = -(-all_runs // runs) * groups
        return max(-(-blocks // sms), -(-blocks // slots) * ALONE) * (runs + START)

    return min(range(1, most + 1), key=time)
