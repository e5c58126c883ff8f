"""The program of index_scores in FP8, for SM90: E2M1 codes times powers of two are E5M2 values.

A key's four scales are folded into its codes relative to the largest of the four, those of a query's head
likewise, so that 128 channels are four instructions in place. The largest scale of a key multiplies its
scores; those of the heads are part of the heads' weights. Exact are groups of a key down to 2^-14 of its
largest scale, and values of a head down to 2^-17 of its largest; a smaller group counts as 2^-14 of it.

Packed keys go from memory straight to the registers of the instruction, a warp group for a block: thread t of
four holds scale group t of a key, and each instruction takes eight of its channels:

    channel 32 t + 8 u + 2 m + e   is factor   32 u + 16 e + 4 t + m      e = 0, 1;  m, t, u = 0..3

Products are summed in float16: units are such that no sum leaves it, and tensor cores that read and write
half as many bytes of sums leave more room for what else there is to do. A second product sums the heads: relu
of the first one times [rows, columns] weights that are 0 where a column is no head of the row.
"""

import tilelang.language as T
from tilelang.cuda import language as TC
from tilelang.layout import Fragment

from tilelang_ops.common.cuda_numerics import e8m0_value
from tilelang_ops.indexer.index_scores.key_codes import lane_of

WIDTH = 128
WORDS = WIDTH // 8
TILE = 64  # keys
THREADS = 128
FORMAT = "float8_e5m2"
# Exponents of the 1 of a key's largest group, and of a head's largest value: sums stay below 2^15.4.
KEY_ONE, QUERY_TOP = 3, 2
LEAST_FIELD = 2  # of a group's 1: its half is normal
WEIGHT_TOP = 14  # exponent of a row's largest weight
LEAST_TOP = 32  # exponent field that smaller rows and heads count as
NAN = 0x7FC00000
NOWHERE = 1 << 30
MOST_ROWS = 8  # of a thread block: columns of the second product

# relu of two in float16; the codes of magnitudes in a word; bytes that digits choose, whose upper half and
# signs need not be masked away, as `__byte_perm` does.
PRELUDE = """
__device__ __forceinline__ unsigned __relu_pair(unsigned pair) {
    unsigned result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
    return result;
}
__device__ __forceinline__ unsigned __magnitude_digits(unsigned word) {
    unsigned digits;
    asm("and.b32 %0, %1, 0x77777777;" : "=r"(digits) : "r"(word));
    return digits;
}
__device__ __forceinline__ unsigned __bytes_of(unsigned low, unsigned high, unsigned digits) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(digits));
    return bytes;
}
"""


def power_of_two(field):
    """Float32 of an exponent field."""
    return T.reinterpret(T.cast(field, "int32") << 23, "float32")


def index_scores_program(*, heads, rows, unit, block_size, weight_type, part_keys, run, blocks_per_sm):
    """Entries of a row: all, or those of its candidate blocks of `block_size` > 0 entries."""
    n, num_candidates = T.dynamic("n"), T.dynamic("num_candidates")
    sequences, max_blocks = T.dynamic("sequences"), T.dynamic("max_blocks")
    pool_rows, scale_rows = T.dynamic("pool_rows"), T.dynamic("scale_rows", "int64")  # words: many
    num_scores = T.dynamic("num_scores", "int64")  # n * width
    columns = -(-rows * heads // 16) * 16
    units = part_keys // unit
    tile_units = TILE // unit
    num_lines = columns * WORDS // THREADS
    assert heads % 8 == 0 and rows <= MOST_ROWS, f"{heads=} {rows=}"

    @T.macro
    def load_queries(lines, q, first, n, tx):
        """Runs of 8 channels, all at once; those of rows that do not exist come from others."""
        for j in T.unroll(num_lines):
            column = T.min((j * THREADS + tx) // WORDS, rows * heads - 1)
            row = T.min(first + column // heads, n - 1)
            for v in T.vectorized(4):
                lines[j, v] = q[row, column % heads * (WIDTH // 2) + tx % WORDS * 4 + v]

    @T.macro
    def place_queries(lines, query_words, query_scales, tx):
        """Runs of 8 channels in FP8, their head's largest magnitude between 2^QUERY_TOP and twice as much."""
        top = T.alloc_local((1,), "uint32")
        factor = T.alloc_local((1,), "float32")
        even = T.alloc_local((4,), FORMAT)
        odd = T.alloc_local((4,), FORMAT)
        even_word = T.view(even, (1,), "uint32")
        odd_word = T.view(odd, (1,), "uint32")
        t, u = tx % WORDS // 4, tx % 4
        for j in T.unroll(num_lines):
            top[0] = T.uint32(0)
            for p in T.unroll(4):
                top[0] = T.max(top[0], lines[j, p] & T.uint32(0x7FFF))
                top[0] = T.max(top[0], (lines[j, p] >> T.uint32(16)) & T.uint32(0x7FFF))
            for s in T.unroll(4):
                top[0] = T.max(top[0], T.shfl_xor(top[0], 1 << s))
            top[0] = T.max(top[0] >> T.uint32(7), T.uint32(LEAST_TOP))
            factor[0] = power_of_two(T.uint32(254 + QUERY_TOP) - top[0])
            for m in T.unroll(4):
                even[m] = T.cast(T.reinterpret(lines[j, m] << T.uint32(16), "float32") * factor[0], FORMAT)
                odd[m] = T.cast(
                    T.reinterpret(lines[j, m] & T.uint32(0xFFFF0000), "float32") * factor[0], FORMAT
                )
            column = (j * THREADS + tx) // WORDS
            query_words[column, 8 * u + t] = even_word[0]
            query_words[column, 8 * u + 4 + t] = odd_word[0]
            if tx % WORDS == 0:
                query_scales[column] = power_of_two(
                    T.if_then_else(top[0] == T.uint32(255), top[0], top[0] - T.uint32(QUERY_TOP))
                )

    @T.macro
    def place_weights(weighing, row_scales, weights, query_scales, first, n):
        """Weights times scales of their heads in float16; what they are to be multiplied by, a row each."""
        values = T.alloc_fragment((rows, heads), "float32")
        bits = T.alloc_fragment((rows, heads), "int32")
        largest = T.alloc_fragment((rows,), "int32")
        for r, h in T.Parallel(rows, heads):
            weight = T.cast(weights[T.min(first + r, n - 1), h], "float32")
            values[r, h] = weight * query_scales[r * heads + h]
            bits[r, h] = T.reinterpret(values[r, h], "int32") & 0x7FFFFFFF
        T.reduce_max(bits, largest, dim=1)
        for c, i in T.Parallel(8, columns):
            weighing[c, i] = T.cast(0.0, "float16")
        T.sync_threads()
        for r in T.Parallel(rows):
            row_scales[r] = T.if_then_else(
                largest[r] >= 0x7F800000,
                T.reinterpret(T.int32(NAN), "float32"),
                power_of_two(T.max(largest[r] >> 23, LEAST_TOP) - (WEIGHT_TOP + KEY_ONE)),
            )
        for r, h in T.Parallel(rows, heads):
            factor = power_of_two(254 + WEIGHT_TOP - T.max(largest[r] >> 23, LEAST_TOP))
            weighing[r, r * heads + h] = T.cast(values[r, h] * factor, "float16")

    def number_of(candidates, row, column, width):
        """Entry number of a column; of one outside, NOWHERE."""
        if not block_size:
            return T.if_then_else(column < width, column, NOWHERE)
        block = T.if_then_else(column < width, candidates[row, T.min(column, width - 1) // block_size], -1)
        return T.if_then_else(block >= 0, block * block_size + column % block_size, NOWHERE)

    @T.macro
    def load(raw, codes, places, tile):
        for i, j in T.Parallel(TILE, WORDS):
            raw[i, j] = codes[places[tile * tile_units + i // unit] + i % unit, j]

    @T.macro
    def place_scales(fields, factors, word, key):
        """Of a key: exponent fields of its groups' 1, a byte each, and the largest scale."""
        top = T.alloc_var("int32")
        packed = T.alloc_var("uint32")
        top = T.max(T.max(word & 255, (word >> 8) & 255), T.max((word >> 16) & 255, (word >> 24) & 255))
        packed = T.uint32(0)
        for t in T.unroll(4):
            field = T.max(((word >> (8 * t)) & 255) - top + (15 + KEY_ONE), LEAST_FIELD)
            packed = packed | (T.cast(field, "uint32") << T.cast(8 * t, "uint32"))
        fields[key] = packed
        factors[key] = e8m0_value(top)

    @T.macro
    def decode(decoded_words, raw, fields, lows, highs, tile):
        """E5M2 of a tile's keys."""
        # What the eight magnitudes of E2M1 are: bytes of 0, 0.5, 1, 1.5, and of 2, 3, 4, 6.
        for i, t in T.Parallel(TILE, 4):
            field = (fields[tile * TILE + i] >> T.cast(8 * t, "uint32")) & T.uint32(255)
            lows[i, t] = field * T.uint32(0x04040400) + T.uint32(0x02000000 - 0x400)
            highs[i, t] = field * T.uint32(0x04040404) + T.uint32(0x0A080604)
        for i, j in T.Parallel(TILE, WIDTH // 4):
            word = T.cast(raw[i, j % 4 * 4 + j // 8], "uint32")
            digits = T.call_pure_extern("uint32", "__magnitude_digits", word)
            first = T.call_pure_extern("uint32", "__bytes_of", lows[i, j % 4], highs[i, j % 4], digits)
            second = T.call_pure_extern(
                "uint32", "__bytes_of", lows[i, j % 4], highs[i, j % 4], digits >> T.uint32(16)
            )
            order = T.if_then_else(j // 4 % 2 == 0, T.uint32(0x6420), T.uint32(0x7531))
            signs = T.if_then_else(j // 4 % 2 == 0, word << T.uint32(4), word) & T.uint32(0x80808080)
            decoded_words[i, j] = T.call_pure_extern("uint32", "__byte_perm", first, second, order) | signs

    def key_of(tx):
        """The first of two keys of a tile whose sums a thread holds; the other one is eight further."""
        return tx // 32 * 16 + tx % 32 // 4

    @T.prim_func
    def of_codes(
        q: T.Tensor((n, heads * WIDTH // 2), "uint32"),
        weights: T.Tensor((n, heads), weight_type),
        codes: T.Tensor((pool_rows, WORDS), "int32"),
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
        with T.Kernel(T.ceildiv(width, run * runs), T.ceildiv(n, rows), threads=THREADS, prelude=PRELUDE) as (
            part,
            group,
        ):
            TC.no_set_max_nreg()
            TC.annotate_min_blocks_per_sm(blocks_per_sm)
            tx = T.get_thread_binding()
            queries = T.alloc_shared((columns, WIDTH), FORMAT)
            query_words = T.view(queries, (columns, WIDTH // 4), "uint32")
            query_scales = T.alloc_shared((columns,), "float32")
            weighing = T.alloc_shared((8, columns), "float16")
            row_scales = T.alloc_shared((rows,), "float32")
            lines = T.alloc_local((num_lines, 4), "uint32")
            numbers = T.alloc_shared((units,), "int32")  # first entries of the units
            places = T.alloc_shared((units,), "int32")  # their rows of the pool
            fields = T.alloc_shared((part_keys,), "uint32")
            key_factors = T.alloc_shared((part_keys,), "float32")
            seqs = T.alloc_shared((rows,), "int32")  # of the rows, -1 behind the last one
            visible = T.alloc_shared((rows,), "int32")
            product_pairs = T.alloc_fragment((TILE, columns // 2), "uint32")
            products = T.view(product_pairs, (TILE, columns), "float16")
            half_pairs = T.alloc_fragment((TILE, columns // 2), "uint32")
            halves = T.view(half_pairs, (TILE, columns), "float16")
            sums = T.alloc_fragment((TILE, 8), "float32")
            decoded_words = T.alloc_fragment((TILE, WIDTH // 4), "uint32")
            decoded = T.view(decoded_words, (TILE, WIDTH), FORMAT)
            raw = T.alloc_fragment((TILE, WORDS), "int32")
            lows = T.alloc_fragment((TILE, 4), "uint32")
            highs = T.alloc_fragment((TILE, 4), "uint32")
            most = T.alloc_local((1,), "int32")
            count = T.alloc_local((1,), "int32")  # tiles with a visible entry
            # First numbers of units whose entries of this thread its rows do not see.
            limits = T.alloc_local((2,), "int32")
            factors = T.alloc_local((2,), "float32")
            room = T.alloc_local((1,), "int32")  # columns from this thread's first one on
            start = T.alloc_local((1,), "int64")  # place of its scores
            of_groups = Fragment(lows.shape, lambda i, t: (lane_of(i, t), i // 8 % 2))
            T.annotate_layout(
                {
                    raw: Fragment(raw.shape, lambda i, j: (lane_of(i, j // 4), i // 8 % 2 * 4 + j % 4)),
                    lows: of_groups,
                    highs: of_groups,
                    sums: Fragment(sums.shape, lambda i, j: (lane_of(i, j // 2), i // 8 % 2 * 2 + j % 2)),
                }
            )
            first = group * rows
            tiles = runs * (run // TILE)
            T.clear(decoded)
            T.clear(halves)
            T.clear(products)
            load_queries(lines, q, first, n, tx)
            for r in T.Parallel(rows):
                row = T.min(first + r, n - 1)
                seqs[r] = T.if_then_else(first + r < n, row_seq[row], -1)
                visible[r] = num_visible[row]
            place_queries(lines, query_words, query_scales, tx)
            T.sync_threads()
            place_weights(weighing, row_scales, weights, query_scales, first, n)
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
                    for r in T.unroll(2):
                        row = T.min(tx % 4 * 2 + r, rows - 1)
                        limits[r] = T.if_then_else(
                            tx % 4 * 2 + r < rows and seqs[row] == sequence,
                            visible[row] - key_of(tx) % unit,
                            -NOWHERE,
                        )
                        factors[r] = row_scales[row]
                    room[0] = width - part * tiles * TILE - key_of(tx)
                    start[0] = T.cast(first + tx % 4 * 2, "int64") * width + (width - room[0])
                    for u in T.Parallel(units):
                        number = number_of(candidates, first + leader, part * tiles * TILE + u * unit, width)
                        numbers[u] = number
                        pool_block = T.if_then_else(
                            number < most[0],
                            block_tables[sequence, T.if_then_else(number < most[0], number // entries, 0)],
                            0,
                        )
                        place = T.if_then_else(number < most[0], number % entries, 0)
                        places[u] = pool_block * stride + place
                        scale_place = T.cast(pool_block, "int64") * scale_stride + place
                        for i in T.unroll(unit):
                            place_scales(fields, key_factors, scales[scale_place + i], u * unit + i)
                    T.sync_threads()
                    count[0] = 0
                    for tile in T.serial(tiles):
                        if numbers[tile * tile_units] < most[0]:
                            count[0] = tile + 1
                    load(raw, codes, places, 0)
                    for tile in T.serial(count[0]):
                        decode(decoded_words, raw, fields, lows, highs, tile)
                        load(raw, codes, places, T.min(tile + 1, count[0] - 1))
                        T.gemm(
                            decoded,
                            queries,
                            products,
                            transpose_B=True,
                            clear_accum=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )
                        for i, j in T.Parallel(TILE, columns // 2):
                            half_pairs[i, j] = T.call_pure_extern(
                                "uint32", "__relu_pair", product_pairs[i, j]
                            )
                        T.gemm(
                            halves,
                            weighing,
                            sums,
                            transpose_B=True,
                            clear_accum=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )
                        for e in T.unroll(2):
                            key = key_of(tx) + e * 8
                            number = numbers[tile * tile_units + key // unit]
                            factor = key_factors[tile * TILE + key]
                            for r in T.unroll(2):
                                score = sums[key, tx % 4 * 2 + r] * factors[r] * factor
                                if limits[r] > -NOWHERE and tile * TILE + e * 8 < room[0]:
                                    out[start[0] + tile * TILE + e * 8 + r * T.cast(width, "int64")] = (
                                        T.if_then_else(number < limits[r], score, -T.infinity("float32"))
                                    )
                    for tile in T.serial(count[0], tiles):
                        for r, i in T.Parallel(rows, TILE):
                            column = (part * tiles + tile) * TILE + i
                            if seqs[r] == sequence and column < width:
                                out[T.cast(first + r, "int64") * width + column] = -T.infinity("float32")

    return of_codes
