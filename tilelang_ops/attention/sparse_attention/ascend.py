"""sparse_attention on Ascend 950: vector cores unpack keys and weigh logits, cube cores multiply.

A cube core and its two vector cores take rows of 64 heads in turns. Blocks of 128 keys are unpacked to
bfloat16 by both vector cores, 64 keys each, into L1, where they serve both products; each vector core holds
the logits, sums and results of 32 heads:

    records -> unpack -> keys, L1 -+- Q K^T -> logits -> softmax -> weights, L1 -+- P V -> results += ..
                                   +---------------------------------------------+

A row's list of keys is first made dense, so the bits are a function of the query and its keys. How many there
are is known to the vector cores alone: the blocks that the index has room for are all gone through, and one
without keys adds zeros.

It is lowered to AscendC source in the tests and emulated, and has not run on a device.
"""

import tilelang.ascend.language as T
import torch
from torch import Tensor

from tilelang_ops.attention.sparse_attention.in_float32 import in_float32
from tilelang_ops.common.cube import CUBE_CORES, THREADS, e2m1_in_e4m3, quotient, remainder
from tilelang_ops.common.cuda_numerics import e4m3_value, e8m0_value
from tilelang_ops.common.kernels import ascend_kernel
from tilelang_ops.common.records import flat_rows, rows_per_part

WIDTH = 512
WINDOW_BYTES, MAIN_BYTES = 528, 288
HEADS = 64  # of a cube core
HALF = HEADS // 2  # of a vector core
KEYS = 128  # of a block
CHUNK = 16  # keys that a vector core unpacks at once
PART = 128  # channels of a product
MAX_KEYS = 1024  # of a row in one pool
RUN = 8  # numbers that a thread lists
LOG2_E = 1.4426950408889634


@T.macro
def _list_records(index, row, width, places, counts, listed, before, num_keys):
    """The rows of a pool that an index names, in order, from listed[before[0]] to listed[num_keys[0]]."""
    records, stride = places
    for c in T.Parallel(MAX_KEYS // RUN):
        count = T.alloc_var("int32", 0)
        for j in T.serial(RUN):
            if c * RUN + j < width:  # noqa: SIM102  guards the load
                if index[row, c * RUN + j] >= 0:
                    count = count + 1
        counts[c] = count
    for c in T.Parallel(MAX_KEYS // RUN):
        place = T.alloc_var("int32", before[0])
        for j in T.serial(c):
            place = place + counts[j]
        for j in T.serial(RUN):
            if c * RUN + j < width:
                number = index[row, c * RUN + j]
                if number >= 0:
                    listed[place] = quotient(number, records) * stride + remainder(number, records)
                    place = place + 1
        if c == MAX_KEYS // RUN - 1:
            num_keys[0] = place


@T.macro
def _unpack(pools, has_main, listed, num_window, num_keys, first, unpacked):
    """CHUNK records as bfloat16: those that are listed from `first` on, zeros from the list's end on."""
    window_words, window_bytes, main_words, main_bytes = pools
    for k, g in T.Parallel(CHUNK, WIDTH // 8):
        is_key = T.alloc_var("bool", first + k < num_keys[0])
        is_window = T.alloc_var("bool", first + k < num_window[0])
        record = T.alloc_var("int32", T.if_then_else(is_key, listed[first + k], 0))
        scale = T.alloc_var("float32", 0.0)
        if is_window or not has_main:
            scale = e8m0_value(T.cast(window_bytes[record, WIDTH + g // 4], "int32"))
        else:
            scale = e4m3_value(main_bytes[record, WIDTH // 2 + g // 2]) * T.float32(2.0**6)
        for c in (0, 1, 2, 3, 4, 5, 6, 7):
            code = T.alloc_var("uint8", T.uint8(0))
            if is_window or not has_main:
                word = window_words[record, g * 2 + c // 4]
                code = T.cast((word >> T.uint32(c % 4 * 8)) & T.uint32(255), "uint8")
            else:
                code = e2m1_in_e4m3(main_words[record, g] >> T.uint32(c * 4))
            value = T.if_then_else(is_key, e4m3_value(code) * scale, T.float32(0.0))
            unpacked[k, g * 8 + c] = T.cast(value, "bfloat16")


@T.macro
def _weigh(logits, weights, peaks, totals, shrinks, first, num_keys, factor):
    """Weights of a block's keys for 32 heads, their sums, and by how much the sums before shrink."""
    with T.SimtVF(threads=THREADS):
        values = T.alloc_fragment((HALF, KEYS), "float32")
        peak = T.alloc_fragment((HALF,), "float32")
        total = T.alloc_fragment((HALF,), "float32")
        for h, k in T.Parallel(HALF, KEYS):
            values[h, k] = T.if_then_else(
                first + k < num_keys[0], logits[h, k] * factor, -T.infinity("float32")
            )
        T.reduce_max(values, peak, dim=1)
        for h in T.Parallel(HALF):
            peak[h] = T.max(peak[h], peaks[h])
        for h, k in T.Parallel(HALF, KEYS):
            values[h, k] = T.exp2(values[h, k] - peak[h])
            weights[h, k] = T.cast(values[h, k], "bfloat16")
        T.reduce_sum(values, total, dim=1)
        for h in T.Parallel(HALF):
            shrinks[h] = T.exp2(peaks[h] - peak[h])
            totals[h] = totals[h] * shrinks[h] + total[h]
            peaks[h] = peak[h]


@ascend_kernel(
    builds=lambda model: [{"heads": model.num_attention_heads, "has_main": has} for has in (True, False)],
    uses_tensor_cores=True,
)
def kernel(heads: int, has_main: bool):
    n, lines = T.dynamic("n"), T.dynamic("lines")
    window_width, main_width = T.dynamic("window_width"), T.dynamic("main_width")
    window_rows, main_rows = T.dynamic("window_rows"), T.dynamic("main_rows")
    groups = -(-heads // HEADS)

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((lines, WIDTH), "bfloat16"),
        window_words: T.Tensor((window_rows, WINDOW_BYTES // 4), "uint32"),
        window_bytes: T.Tensor((window_rows, WINDOW_BYTES), "uint8"),
        window_index: T.Tensor((n, window_width), "int32"),
        main_words: T.Tensor((main_rows, MAIN_BYTES // 4), "uint32"),
        main_bytes: T.Tensor((main_rows, MAIN_BYTES), "uint8"),
        main_index: T.Tensor((n, main_width), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((lines, WIDTH), "bfloat16"),
        scale: T.float32,
        window_records: T.int32,
        window_stride: T.int32,
        main_records: T.int32,
        main_stride: T.int32,
    ):
        with T.MixedKernel(CUBE_CORES) as (core, sid):
            queries = T.alloc_l1((HEADS, WIDTH), "bfloat16")
            keys = T.alloc_l1((KEYS, WIDTH), "bfloat16")
            weights = T.alloc_l1((HEADS, KEYS), "bfloat16")
            query_part = T.alloc_l0a((HEADS, PART), "bfloat16")
            key_part = T.alloc_l0b((KEYS, PART), "bfloat16")
            left = T.alloc_l0a((HEADS, KEYS), "bfloat16")
            value_part = T.alloc_l0b((KEYS, PART), "bfloat16")
            products = T.alloc_l0c((HEADS, KEYS), "float32")
            part = T.alloc_l0c((HEADS, PART), "float32")
            counts = T.alloc_shared((MAX_KEYS // RUN,), "int32")
            listed = T.alloc_shared((2 * MAX_KEYS,), "int32")
            start = T.alloc_shared((8,), "int32")  # one number is used, here and below
            num_window = T.alloc_shared((8,), "int32")
            num_keys = T.alloc_shared((8,), "int32")
            unpacked = T.alloc_shared((CHUNK, WIDTH), "bfloat16")
            logits = T.alloc_shared((HALF, KEYS), "float32")
            weighed = T.alloc_shared((HALF, KEYS), "bfloat16")
            peaks = T.alloc_shared((HALF,), "float32")
            totals = T.alloc_shared((HALF,), "float32")
            shrinks = T.alloc_shared((HALF,), "float32")
            values = T.alloc_shared((HALF, WIDTH), "float32")
            added = T.alloc_shared((HALF, PART), "float32")
            pools = window_words, window_bytes, main_words, main_bytes
            window, main = (window_records, window_stride), (main_records, main_stride)
            factor = scale * LOG2_E
            for turn in T.serial(T.ceildiv(n * groups - core, CUBE_CORES)):
                row, group = (turn * CUBE_CORES + core) // groups, (turn * CUBE_CORES + core) % groups
                line = row * heads + group * HEADS
                T.copy(q[line : line + HEADS, :], queries)
                with T.SimtVF(threads=THREADS):
                    for h, c in T.Parallel(HALF, WIDTH):
                        values[h, c] = T.float32(0.0)
                    for h in T.Parallel(HALF):
                        peaks[h] = T.float32(-1e30)
                        totals[h] = T.float32(0.0)
                    for h in T.Parallel(8):
                        start[h] = 0
                    _list_records(window_index, row, window_width, window, counts, listed, start, num_window)
                    if has_main:
                        _list_records(main_index, row, main_width, main, counts, listed, num_window, num_keys)
                    else:
                        for h in T.Parallel(8):
                            num_keys[h] = num_window[0]
                for block in T.serial(T.ceildiv(window_width + (main_width if has_main else 0), KEYS)):
                    with T.Stage(0):  # tasks stay in this order: there is nothing to win, and much to search
                        for chunk in T.serial(KEYS // 2 // CHUNK):
                            place = sid * (KEYS // 2) + chunk * CHUNK
                            first = block * KEYS + place
                            with T.SimtVF(threads=THREADS):
                                _unpack(pools, has_main, listed, num_window, num_keys, first, unpacked)
                            T.copy(unpacked, keys[place : place + CHUNK, :])
                    for p in T.serial(WIDTH // PART):
                        T.copy(queries[:, p * PART : p * PART + PART], query_part)
                        T.copy(keys[:, p * PART : p * PART + PART], key_part)
                        T.gemm(query_part, key_part, products, transpose_B=True, clear_accum=p == 0)
                    T.dual_copy(products, logits)
                    _weigh(logits, weighed, peaks, totals, shrinks, block * KEYS, num_keys, factor)
                    T.copy(weighed, weights[sid * HALF : sid * HALF + HALF, :])
                    T.copy(weights, left)
                    for p in T.serial(WIDTH // PART):
                        T.copy(keys[:, p * PART : p * PART + PART], value_part)
                        T.gemm(left, value_part, part, clear_accum=True)
                        T.dual_copy(part, added)
                        with T.SimtVF(threads=THREADS):
                            for h, c in T.Parallel(HALF, PART):
                                values[h, p * PART + c] = values[h, p * PART + c] * shrinks[h] + added[h, c]
                with T.SimtVF(threads=THREADS):
                    for h, c in T.Parallel(HALF, WIDTH):
                        head = group * HEADS + sid * HALF + h
                        if head < heads:
                            total = totals[h] + T.exp2(sink[head] * LOG2_E - peaks[h])
                            share = T.if_then_else(num_keys[0] > 0, values[h, c] / total, T.float32(0.0))
                            out[line + sid * HALF + h, c] = T.cast(share, "bfloat16")

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
        pools = window.view(torch.uint32), window, window_index, main.view(torch.uint32), main, main_index
        program = kernel(heads=q.shape[1], has_main=main_index.shape[1] > 0)
        program(q.flatten(0, 1), *pools, sink, out.flatten(0, 1), scale, *places)
    else:
        formats = [str(x.dtype).removeprefix("torch.") for x in (q, window, main)]
        program = in_float32(query=formats[0], window=formats[1], main=formats[2])
        program(q, window, window_index, main, main_index, sink, out, scale, *places)
    return out
