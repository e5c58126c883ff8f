"""round_rows on CUDA: every thread holds 8 channels of several vectors; four neighbours share a scale."""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import (
    amax_bits,
    e2m1_code,
    e2m1_value,
    e8m0_inverse,
    e8m0_value,
    fp8_scale_byte,
    mxfp4_scale_byte,
)
from tilelang_ops.common.cuda_rotation import rotate_pairs
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.sizes import ModelSizes
from tilelang_ops.projection.encode_rows.op import Rotation

THREADS = 128
GROUP = 32
PLAIN_WIDTHS = (512, 128, 64, 32)  # channels of a vector where nothing but groups matters


def _builds(model: ModelSizes) -> list[dict[str, Any]]:
    pairs = model.qk_rope_head_dim // 2
    plain = {_plain_width(width) for width in (model.hidden_size, model.o_groups * model.o_lora_rank)}
    sizes = [
        *({"width": width, "format": "fp8", "pairs": 0, "heads": 1} for width in sorted(plain)),
        {"width": model.head_dim, "format": "fp8", "pairs": pairs, "heads": model.num_attention_heads},
        {"width": model.index_head_dim, "format": "mxfp4", "pairs": pairs, "heads": model.index_n_heads},
    ]
    return [{"source": "bfloat16", **size} for size in sizes]


def _plain_width(width: int) -> int:
    return next(w for w in PLAIN_WIDTHS if width % w == 0)


@cuda_kernel(builds=_builds)
def kernel(source: str, width: int, format: str, pairs: int, heads: int):
    n = T.dynamic("n")
    positions = T.dynamic("positions") if pairs > 0 else n
    groups = width // GROUP
    rows = max(1, THREADS * 16 // width)
    first_pair = width // 2 - pairs

    @T.prim_func
    def round_rows(
        x: T.Tensor((n, width), source),
        cos: T.Tensor((positions, max(1, pairs)), "float32"),
        sin: T.Tensor((positions, max(1, pairs)), "float32"),
        out: T.Tensor((n, width), source),
        direction: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            vectors = T.alloc_fragment((rows, groups, 4, 8), "float32")
            largest = T.alloc_fragment((rows, groups, 4), "int32")
            amax = T.alloc_fragment((rows, groups), "int32")
            factor = T.alloc_fragment((rows, groups), "float32")
            scale = T.alloc_fragment((rows, groups), "float32")
            for r, g, p in T.Parallel(rows, groups, 4):
                row = block * rows + r
                v = T.alloc_local((8,), "float32")
                for k in T.vectorized(8):
                    v[k] = T.cast(x[row, g * GROUP + p * 8 + k], "float32")
                if pairs > 0:
                    pair = g * (GROUP // 2) + p * 4 - first_pair
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
            T.reduce_max(largest, amax, dim=2)
            for r, g in T.Parallel(rows, groups):
                byte = fp8_scale_byte(amax[r, g]) if format == "fp8" else mxfp4_scale_byte(amax[r, g])
                factor[r, g] = e8m0_inverse(byte)
                scale[r, g] = e8m0_value(byte)
            for r, g, p in T.Parallel(rows, groups, 4):
                v = T.alloc_local((8,), "float32")
                for k in T.vectorized(8):
                    v[k] = vectors[r, g, p, k] * factor[r, g]
                if format == "fp8":
                    codes = T.alloc_local((8,), "float8_e4m3fn")
                    for k in T.vectorized(8):
                        codes[k] = T.cast(v[k], "float8_e4m3fn")
                    for k in T.vectorized(8):
                        v[k] = T.cast(codes[k], "float32")
                else:
                    for k in T.unroll(8):
                        v[k] = e2m1_value(e2m1_code(v[k]))
                for k in T.vectorized(8):
                    out[block * rows + r, g * GROUP + p * 8 + k] = T.cast(v[k] * scale[r, g], source)

    return round_rows


def run(x: Tensor, format: str, rotation: Rotation | None) -> Tensor:
    width = x.shape[-1]
    out = torch.empty_like(x)
    heads = x.numel() // (width * x.shape[0])
    if rotation is None:
        width = _plain_width(width)
        heads = 1
    program = kernel(
        source=str(x.dtype).removeprefix("torch."),
        width=width,
        format=format,
        pairs=0 if rotation is None else rotation.cos.shape[1],
        heads=heads,
    )
    program(
        x.view(-1, width),
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        out.view(-1, width),
        -1.0 if rotation is not None and rotation.inverse else 1.0,
    )
    return out
