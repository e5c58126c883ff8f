"""encode_rows on CUDA: every thread holds 8 or 16 channels of a vector; a block takes several vectors."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import (
    amax_bits,
    e2m1_word,
    e8m0_inverse,
    fp4_quotient,
    fp4_scale,
    fp8_scale_byte,
    mxfp4_scale_byte,
)
from tilelang_ops.common.cuda_rotation import rotate_pairs
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.records import flat_rows, rows_per_part, whole_rows
from tilelang_ops.common.sizes import ModelSizes
from tilelang_ops.projection.encode_rows.op import FORMATS, EncodedRows, Norm, Records, Rotation

THREADS = 128
PLAIN_WIDTH = 512  # channels of a vector where nothing but groups matters
# Eight E2M1 codes are a word.
CODE_TYPE = {"fp8": "float8_e4m3fn", "mxfp4": "int32", "fp4": "int32", "float32": "float32"}


def _builds(model: ModelSizes) -> list[dict[str, Any]]:
    def sizes(width: int, format: str, **other: Any) -> dict[str, Any]:
        pairs = model.qk_rope_head_dim // 2
        plain = {
            "has_norm": False,
            "keeps_normed": False,
            "pairs": pairs,
            "heads": 1,
            "record": 0,
            "scale_record": 0,
            "row_width": width,
            "offset": 0,
        }
        return {"width": width, "source": "bfloat16", "format": format, **plain, **other}

    width, key = model.head_dim, model.index_head_dim
    main = width // 2 + width // 16
    return [
        sizes(width, "fp8", has_norm=True, record=width + width // 32),
        sizes(
            width,
            "fp8",
            has_norm=True,
            record=width + width // 32,
            row_width=model.q_lora_rank + width,
            offset=model.q_lora_rank,
        ),
        sizes(width, "fp4", has_norm=True, keeps_normed=True, record=main),
        sizes(width, "fp4", record=main),
        sizes(key, "mxfp4", has_norm=True, record=key // 2, scale_record=key // 32),
        sizes(key, "mxfp4", heads=model.index_n_heads),
        sizes(width, "fp8", heads=model.num_attention_heads),
        sizes(PLAIN_WIDTH, "fp8", pairs=0),
    ]


@cuda_kernel(builds=_builds)
def kernel(
    width: int,
    source: str,
    format: str,
    has_norm: bool,
    keeps_normed: bool,
    pairs: int,
    heads: int,
    record: int,
    scale_record: int,
    row_width: int,
    offset: int,
):
    """`record` bytes of a record, 0 for contiguous results; `scale_record` when scales stand on their own;
    x stands at `offset` of rows of `row_width`."""
    # A size must stand in a tensor that is given.
    # A pool of many blocks has more rows of four scale bytes than 31 bits count.
    n, num_codes = T.dynamic("n"), T.dynamic("num_codes", "int64")
    positions = T.dynamic("positions") if pairs > 0 else n
    num_scales = T.dynamic("num_scales", "int64") if format != "float32" else n
    group, code_bytes, _ = FORMATS.get(format, (32, 32, 0))
    groups, parts = width // group, group // 8
    rows = max(1, THREADS * (8 if has_norm else 16) // width)
    first_pair = width // 2 - pairs
    code_stride = (record or groups * code_bytes) // (4 if CODE_TYPE[format] == "int32" else 1)
    scale_start = groups * code_bytes if record and not scale_record else 0
    scale_stride = (scale_record or record) or groups
    in_records = record > 0
    code_type = CODE_TYPE[format]

    @T.prim_func
    def encode_rows(
        x: T.Tensor((n, row_width), source),
        weight: T.Tensor((width,), "float32"),
        cos: T.Tensor((positions, max(1, pairs)), "float32"),
        sin: T.Tensor((positions, max(1, pairs)), "float32"),
        index: T.Tensor((n,), "int64"),
        normed: T.Tensor((n, width), source),
        codes: T.Tensor((num_codes, code_stride), code_type),
        scales: T.Tensor((num_scales, scale_stride), "uint8"),
        eps: T.float32,
        direction: T.float32,
        records: T.int32,
        code_rows_per_part: T.int32,
        scale_rows_per_part: T.int32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            loaded = T.alloc_fragment((rows, groups, parts, 8), "float32")
            vectors = T.alloc_fragment((rows, groups, parts, 8), "float32")
            sums = T.alloc_fragment((rows, groups, parts), "float32")
            group_sums = T.alloc_fragment((rows, groups), "float32")
            inverse = T.alloc_fragment((rows,), "float32")
            largest = T.alloc_fragment((rows, groups, parts), "int32")
            amax = T.alloc_fragment((rows, groups), "int32")
            factor = T.alloc_fragment((rows, groups), "float32")
            reciprocal = T.alloc_fragment((rows, groups), "float32")
            if has_norm:
                for r, g, p in T.Parallel(rows, groups, parts):
                    v = T.alloc_local((8,), "float32")
                    for k in T.vectorized(8):
                        v[k] = T.cast(x[block * rows + r, offset + g * group + p * 8 + k], "float32")
                    squares = T.alloc_var("float32")
                    squares = 0.0
                    for k in T.unroll(8):
                        squares = squares + v[k] * v[k]
                    sums[r, g, p] = squares
                    for k in T.vectorized(8):
                        loaded[r, g, p, k] = v[k]
                T.reduce_sum(sums, group_sums, dim=2)
                T.reduce_sum(group_sums, inverse, dim=1)
                for r in T.Parallel(rows):
                    inverse[r] = 1.0 / T.sqrt(inverse[r] / width + eps)
            for r, g, p in T.Parallel(rows, groups, parts):
                row = block * rows + r
                v = T.alloc_local((8,), "float32")
                if has_norm:
                    gain = T.alloc_local((8,), "float32")
                    for k in T.vectorized(8):
                        gain[k] = weight[g * group + p * 8 + k]
                    for k in T.vectorized(8):
                        v[k] = loaded[r, g, p, k]
                    for k in T.unroll(8):
                        v[k] = T.cast(T.cast(v[k] * inverse[r] * gain[k], source), "float32")
                    if keeps_normed:
                        for k in T.vectorized(8):
                            normed[row, g * group + p * 8 + k] = T.cast(v[k], source)
                else:
                    for k in T.vectorized(8):
                        v[k] = T.cast(x[row, offset + g * group + p * 8 + k], "float32")
                if pairs > 0:
                    pair = g * (group // 2) + p * 4 - first_pair
                    if pair >= 0 and row < n:
                        rotate_pairs(v, cos, sin, row // heads, pair, direction, source)
                top = T.alloc_var("float32")
                total = T.alloc_var("float32")
                top = 0.0
                total = 0.0
                for k in T.unroll(8):
                    top = T.max(top, T.abs(v[k]))
                    total = total + T.abs(v[k])
                largest[r, g, p] = amax_bits(top, total)
                for k in T.vectorized(8):
                    vectors[r, g, p, k] = v[k]
            if format != "float32":
                T.reduce_max(largest, amax, dim=2)
                for r, g in T.Parallel(rows, groups):
                    row = block * rows + r
                    byte = T.alloc_var("int32")
                    if format == "fp4":
                        scale = fp4_scale(amax[r, g])
                        factor[r, g] = T.cast(scale, "float32")
                        reciprocal[r, g] = T.ieee_frcp(factor[r, g])
                        byte = T.cast(T.reinterpret(scale, "uint8"), "int32")
                    else:
                        byte = fp8_scale_byte(amax[r, g]) if format == "fp8" else mxfp4_scale_byte(amax[r, g])
                        factor[r, g] = e8m0_inverse(byte)
                    if row < n:
                        if in_records:
                            if index[row] >= 0:
                                scale_place = pool_row(index[row], records, scale_rows_per_part)
                                scales[scale_place, scale_start + g] = T.cast(byte, "uint8")
                        else:
                            scales[row, g] = T.cast(byte, "uint8")
            for r, g, p in T.Parallel(rows, groups, parts):
                row = block * rows + r
                v = T.alloc_local((8,), "float32")
                for k in T.vectorized(8):
                    v[k] = vectors[r, g, p, k]
                if format == "fp4":
                    scaled = T.alloc_local((8,), "float32")
                    for k in T.unroll(8):
                        scaled[k] = fp4_quotient(v[k], factor[r, g], reciprocal[r, g])
                    word = T.reinterpret(e2m1_word(scaled, v), "int32")
                elif format != "float32":
                    for k in T.vectorized(8):
                        v[k] = v[k] * factor[r, g]
                    if format == "mxfp4":
                        word = T.reinterpret(e2m1_word(v, v), "int32")
                place = T.alloc_var("int64")
                place = T.cast(row, "int64")
                if in_records:
                    place = -1
                    if row < n and index[row] >= 0:
                        place = pool_row(index[row], records, code_rows_per_part)
                if place >= 0 and place < num_codes:
                    if format == "fp4" or format == "mxfp4":
                        codes[place, g * parts + p] = word
                    else:
                        for k in T.vectorized(8):
                            codes[place, (g * parts + p) * 8 + k] = T.cast(v[k], code_type)

    return encode_rows


def pool_row(number, records, rows_per_part):
    """Row of a pool's flat view, of non-negative record `number`; int64."""
    number = T.cast(number, "int32")
    part = T.cast(T.truncdiv(number, records), "int64")
    return part * rows_per_part + T.cast(T.truncmod(number, records), "int64")


def run(
    x: Tensor,
    format: str,
    norm: Norm | None,
    rotation: Rotation | None,
    records: Records | None,
    keeps_normed: bool,
) -> EncodedRows:
    width = x.shape[-1]
    group, code_bytes, _ = FORMATS[format]
    vectors, offset = whole_rows(x) if x.dim() == 2 else (x.view(-1, width), 0)
    heads = vectors.shape[0] // x.shape[0]
    codes = scales = index = None
    steps = {"num_records": 1, "code_part": 1, "scale_part": 1}
    record = scale_record = 0
    if records is None:
        codes = x.new_empty(*x.shape[:-1], width // group * code_bytes, dtype=torch.uint8)
        scales = x.new_empty(*x.shape[:-1], width // group, dtype=torch.uint8)
        if norm is None and rotation is None and x.is_contiguous() and width % PLAIN_WIDTH == 0:
            width = PLAIN_WIDTH
            vectors = x.view(-1, width)
        code_rows = codes.view(vectors.shape[0], -1)
        scale_rows = scales.view(vectors.shape[0], -1)
    else:
        index, record = records.index, records.codes.shape[2]
        code_rows = scale_rows = flat_rows(records.codes)
        code_part = scale_part = rows_per_part(records.codes)
        if records.scales is not None:
            scale_rows, scale_record = flat_rows(records.scales), records.scales.shape[2]
            scale_part = rows_per_part(records.scales)
        steps = {"num_records": records.codes.shape[1], "code_part": code_part, "scale_part": scale_part}
        if records.codes.dtype == torch.float32:
            format, scale_rows = "float32", None
    normed = x.new_empty(x.shape) if keeps_normed else None
    if format == "fp8":
        code_rows = code_rows.view(torch.float8_e4m3fn)
    elif format != "float32":
        assert code_rows.shape[1] % 4 == 0, f"{code_rows.shape=}: codes are written in words"
        code_rows = code_rows.view(torch.int32)
    program = kernel(
        width=width,
        source=str(x.dtype).removeprefix("torch."),
        format=format,
        has_norm=norm is not None,
        keeps_normed=keeps_normed,
        pairs=0 if rotation is None else rotation.cos.shape[1],
        heads=heads,
        record=record,
        scale_record=scale_record,
        row_width=vectors.shape[1],
        offset=offset,
    )
    program(
        vectors,
        None if norm is None else norm.weight,
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        index,
        None if normed is None else normed.view(-1, width),
        code_rows,
        scale_rows,
        0.0 if norm is None else norm.eps,
        -1.0 if rotation is not None and rotation.inverse else 1.0,
        *steps.values(),
    )
    return EncodedRows(codes, scales, normed)
