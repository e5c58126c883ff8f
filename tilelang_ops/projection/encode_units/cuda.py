"""encode_units on CUDA: every thread holds 8 channels of several vectors; sixteen neighbours are a unit."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import amax_bits, e8m0_inverse, e8m0_value, fp8_scale_byte
from tilelang_ops.common.cuda_rotation import rotate_pairs
from tilelang_ops.common.cuda_row_codes import group_in_unit, unit_code
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.row_codes import UNIT, RowCodes
from tilelang_ops.common.sizes import ModelSizes
from tilelang_ops.projection.encode_rows.op import Rotation

THREADS = 128
PLAIN_WIDTHS = (512, 128)  # channels of a vector where nothing but units matters


def _builds(model: ModelSizes) -> list[dict[str, Any]]:
    hidden = model.hidden_size
    plain = {hidden, model.o_groups * model.o_lora_rank, model.dspark_num_targets * hidden}
    plain.add(model.engram_columns * model.engram_head_dim)
    sizes = [
        {"width": _plain_width(width), "pairs": 0, "heads": width // _plain_width(width)}
        for width in sorted(plain)
    ]
    pairs = model.qk_rope_head_dim // 2
    if model.head_dim % UNIT == 0:
        sizes.append({"width": model.head_dim, "pairs": pairs, "heads": model.num_attention_heads})
    return [{"source": "bfloat16", **size} for size in sizes]


def _plain_width(width: int) -> int:
    return next((w for w in PLAIN_WIDTHS if width % w == 0), width)


@cuda_kernel(builds=_builds)
def kernel(source: str, width: int, pairs: int, heads: int):
    n, padded = T.dynamic("n"), T.dynamic("padded")
    positions = T.dynamic("positions") if pairs > 0 else n
    units = -(-width // UNIT)
    assert units * UNIT == width or heads == 1, f"{width=}: no whole units"
    rows = max(1, THREADS * 16 // width)
    first_pair = width // 2 - pairs

    @T.prim_func
    def encode_units(
        x: T.Tensor((n, width), source),
        cos: T.Tensor((positions, max(1, pairs)), "float32"),
        sin: T.Tensor((positions, max(1, pairs)), "float32"),
        codes: T.Tensor((n, width), "float8_e4m3fn"),
        scales: T.Tensor((heads * units, padded), "float32"),
        direction: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            vectors = T.alloc_fragment((rows, units, 4, 4, 8), "float32")
            largest = T.alloc_fragment((rows, units, 4, 4), "int32")
            amax = T.alloc_fragment((rows, units, 4), "int32")
            top_of = T.alloc_fragment((rows, units), "int32")
            factor = T.alloc_fragment((rows, units, 4), "float32")
            share = T.alloc_fragment((rows, units, 4), "float32")
            for r, u, g, p in T.Parallel(rows, units, 4, 4):
                row = block * rows + r
                start = ((u * 4 + g) * 4 + p) * 8
                v = T.alloc_local((8,), "float32")
                for k in T.unroll(8):
                    v[k] = 0.0
                if start < width:
                    for k in T.vectorized(8):
                        v[k] = T.cast(x[row, start + k], "float32")
                if pairs > 0:
                    pair = start // 2 - first_pair
                    if pair >= 0 and row < n:
                        rotate_pairs(v, cos, sin, row // heads, pair, direction, source)
                top = T.alloc_var("float32")
                total = T.alloc_var("float32")
                top = 0.0
                total = 0.0
                for k in T.unroll(8):
                    top = T.max(top, T.abs(v[k]))
                    total = total + T.abs(v[k])
                largest[r, u, g, p] = amax_bits(top, total)
                for k in T.vectorized(8):
                    vectors[r, u, g, p, k] = v[k]
            T.reduce_max(largest, amax, dim=3)
            T.reduce_max(amax, top_of, dim=2)
            for r, u in T.Parallel(rows, units):
                row = block * rows + r
                top_of[r, u] = fp8_scale_byte(top_of[r, u])
                if row < n:
                    scales[row % heads * units + u, row // heads] = e8m0_value(top_of[r, u])
            for r, u, g in T.Parallel(rows, units, 4):
                byte = fp8_scale_byte(amax[r, u, g])
                factor[r, u, g] = e8m0_inverse(byte)
                share[r, u, g] = group_in_unit(byte, top_of[r, u])
            for r, u, g, p in T.Parallel(rows, units, 4, 4):
                start = ((u * 4 + g) * 4 + p) * 8
                if start < width:
                    for k in T.vectorized(8):
                        codes[block * rows + r, start + k] = unit_code(
                            vectors[r, u, g, p, k], factor[r, u, g], share[r, u, g]
                        )

    return encode_units


def run(x: Tensor, rotation: Rotation | None) -> RowCodes:
    num_rows, total = x.shape[0], x.numel() // x.shape[0]
    out = RowCodes.empty(num_rows, total, x.device)
    width = x.shape[-1] if rotation is not None else _plain_width(total)
    program = kernel(
        source=str(x.dtype).removeprefix("torch."),
        width=width,
        pairs=0 if rotation is None else rotation.cos.shape[1],
        heads=total // width,
    )
    program(
        x.view(-1, width),
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        out.codes.view(torch.float8_e4m3fn).view(-1, width),
        out.scales,
        -1.0 if rotation is not None and rotation.inverse else 1.0,
    )
    return out
