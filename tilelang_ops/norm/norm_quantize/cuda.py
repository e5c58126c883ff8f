"""norm_quantize on CUDA: a power of two of threads holds a row in registers, 8 channels at a time."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import amax_bits, e8m0_inverse, e8m0_value, fp8_scale_byte
from tilelang_ops.common.cuda_row_codes import group_in_unit, unit_code
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.records import whole_rows
from tilelang_ops.common.row_codes import UNIT, RowCodes
from tilelang_ops.norm.norm_quantize.op import Normed

THREADS = 128
GROUP = 32


def row_shape(width: int, threads: int = THREADS) -> tuple[int, int, int]:
    """How a row is laid out: lanes, steps of a lane, channels of a step; their product is the width."""
    vector = next(v for v in (8, 4, 2, 1) if width % v == 0)
    units = width // vector
    lanes = min(threads, units & -units)
    return lanes, units // lanes, vector


@cuda_kernel(
    builds=lambda model: [
        {
            "width": width,
            "source": "bfloat16",
            "keeps_values": keeps,
            "encoding": encoding,
            "adds_residual": False,
            "row_width": row_width,
            "offset": 0,
        }
        for width, row_width, keeps, encoding in (
            (model.hidden_size, model.hidden_size, True, ""),
            *(
                (width, row_width, False, encoding)
                for encoding in ("rounded", "units")
                for width, row_width in (
                    (model.hidden_size, model.hidden_size),
                    (model.q_lora_rank, model.q_lora_rank),
                    (model.q_lora_rank, model.q_lora_rank + model.head_dim),
                )
                if encoding == "rounded" or width % UNIT == 0
            ),
        )
    ]
)
def kernel(
    width: int,
    source: str,
    keeps_values: bool,
    encoding: str,
    adds_residual: bool,
    row_width: int,
    offset: int,
):
    """`encoding` of the result is "codes", "units", "rounded" or "" for none; x stands at `offset` of longer
    rows."""
    quantizes = encoding != ""
    code_type = source if encoding == "rounded" else "float8_e4m3fn"
    n = T.dynamic("n")
    lanes, steps, vector = row_shape(width)
    quarter = min(4, lanes)  # lanes that share a scale
    quads = lanes // quarter
    rows = THREADS // lanes
    groups = max(1, width // GROUP)
    in_units = encoding == "units"
    near = 4 if in_units else 1  # groups of a unit
    far = quads // near
    assert not in_units or (width % UNIT == 0 and quads % near == 0), f"{width=}: no whole units"
    scale_shape = (width // UNIT, T.dynamic("padded")) if in_units else (n, groups)
    scale_type = "float32" if in_units else "uint8"

    @T.prim_func
    def norm_quantize(
        x: T.Tensor((n, row_width), source),
        residual: T.Tensor((n, width), source),
        weight: T.Tensor((width,), "float32"),
        values: T.Tensor((n, width), source),
        codes: T.Tensor((n, width), code_type),
        scales: T.Tensor(scale_shape, scale_type),
        total: T.Tensor((n, width), source),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            held = T.alloc_fragment((rows, far, near, quarter, steps, vector), source)
            sums = T.alloc_fragment((rows, far, near, quarter), "float32")
            quad_sums = T.alloc_fragment((rows, far, near), "float32")
            unit_sums = T.alloc_fragment((rows, far), "float32")
            inverse = T.alloc_fragment((rows,), "float32")
            for r, f, e, p in T.Parallel(rows, far, near, quarter):
                v = T.alloc_local((vector,), "float32")
                row = block * rows + r
                squares = T.alloc_var("float32")
                squares = 0.0
                for s in T.unroll(steps):
                    start = (((s * far + f) * near + e) * quarter + p) * vector
                    for k in T.vectorized(vector):
                        v[k] = T.cast(x[row, offset + start + k], "float32")
                    if adds_residual:
                        other = T.alloc_local((vector,), "float32")
                        for k in T.vectorized(vector):
                            other[k] = T.cast(residual[row, start + k], "float32")
                        for k in T.unroll(vector):
                            v[k] = T.cast(T.cast(v[k] + other[k], source), "float32")
                        for k in T.vectorized(vector):
                            total[row, start + k] = T.cast(v[k], source)
                    for k in T.unroll(vector):
                        squares = squares + v[k] * v[k]
                    for k in T.vectorized(vector):
                        held[r, f, e, p, s, k] = T.cast(v[k], source)
                sums[r, f, e, p] = squares
            T.reduce_sum(sums, quad_sums, dim=3)
            T.reduce_sum(quad_sums, unit_sums, dim=2)
            T.reduce_sum(unit_sums, inverse, dim=1)
            for r in T.Parallel(rows):
                inverse[r] = 1.0 / T.sqrt(inverse[r] / width + eps)
            normed = T.alloc_fragment((rows, far, near, quarter, steps, vector), source)
            largest = T.alloc_fragment((rows, far, near, quarter, steps), "int32")
            for r, f, e, p in T.Parallel(rows, far, near, quarter):
                v = T.alloc_local((vector,), "float32")
                gain = T.alloc_local((vector,), "float32")
                top = T.alloc_var("float32")
                magnitudes = T.alloc_var("float32")
                for s in T.unroll(steps):
                    start = (((s * far + f) * near + e) * quarter + p) * vector
                    for k in T.vectorized(vector):
                        gain[k] = weight[start + k]
                    for k in T.vectorized(vector):
                        v[k] = T.cast(held[r, f, e, p, s, k], "float32")
                    for k in T.unroll(vector):
                        v[k] = T.cast(T.cast(v[k] * inverse[r] * gain[k], source), "float32")
                    if keeps_values:
                        for k in T.vectorized(vector):
                            values[block * rows + r, start + k] = T.cast(v[k], source)
                    if quantizes:
                        top = 0.0
                        magnitudes = 0.0
                        for k in T.unroll(vector):
                            top = T.max(top, T.abs(v[k]))
                            magnitudes = magnitudes + T.abs(v[k])
                        largest[r, f, e, p, s] = amax_bits(top, magnitudes)
                        for k in T.vectorized(vector):
                            normed[r, f, e, p, s, k] = T.cast(v[k], source)
            if quantizes:
                amax = T.alloc_fragment((rows, far, near, steps), "int32")
                factor = T.alloc_fragment((rows, far, near, steps), "float32")
                scale = T.alloc_fragment((rows, far, near, steps), "float32")
                T.reduce_max(largest, amax, dim=3)
                if in_units:
                    top_of = T.alloc_fragment((rows, far, steps), "int32")
                    T.reduce_max(amax, top_of, dim=2)
                    for r, f, s in T.Parallel(rows, far, steps):
                        row = block * rows + r
                        top_of[r, f, s] = fp8_scale_byte(top_of[r, f, s])
                        if row < n:
                            scales[s * far + f, row] = e8m0_value(top_of[r, f, s])
                for r, f, e, s in T.Parallel(rows, far, near, steps):
                    row = block * rows + r
                    byte = fp8_scale_byte(amax[r, f, e, s])
                    factor[r, f, e, s] = e8m0_inverse(byte)
                    if in_units:
                        scale[r, f, e, s] = group_in_unit(byte, top_of[r, f, s])
                    elif encoding == "rounded":
                        scale[r, f, e, s] = e8m0_value(byte)
                    elif row < n:
                        scales[row, s * quads + f] = T.cast(byte, "uint8")
                for r, f, e, p in T.Parallel(rows, far, near, quarter):
                    for s in T.unroll(steps):
                        start = (((s * far + f) * near + e) * quarter + p) * vector
                        if in_units:
                            for k in T.vectorized(vector):
                                codes[block * rows + r, start + k] = unit_code(
                                    T.cast(normed[r, f, e, p, s, k], "float32"),
                                    factor[r, f, e, s],
                                    scale[r, f, e, s],
                                )
                        elif encoding == "codes":
                            for k in T.vectorized(vector):
                                codes[block * rows + r, start + k] = T.cast(
                                    T.cast(normed[r, f, e, p, s, k], "float32") * factor[r, f, e, s],
                                    "float8_e4m3fn",
                                )
                        else:
                            code = T.alloc_local((vector,), "float8_e4m3fn")
                            for k in T.vectorized(vector):
                                code[k] = T.cast(
                                    T.cast(normed[r, f, e, p, s, k], "float32") * factor[r, f, e, s],
                                    "float8_e4m3fn",
                                )
                            for k in T.vectorized(vector):
                                codes[block * rows + r, start + k] = T.cast(
                                    T.cast(code[k], "float32") * scale[r, f, e, s], source
                                )

    return norm_quantize


def launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    *,
    keeps_values: bool,
    encoding: str,
) -> Normed:
    num_rows, width = x.shape
    values = x.new_empty(num_rows, width) if keeps_values else None
    total = x.new_empty(num_rows, width) if residual is not None else None
    codes = scales = rounded = units = None
    if encoding == "rounded":
        rounded = x.new_empty(num_rows, width)
    elif encoding == "units":
        units = RowCodes.empty(num_rows, width, x.device)
    elif encoding:
        codes = x.new_empty(num_rows, width, dtype=torch.uint8)
        scales = x.new_empty(num_rows, width // GROUP, dtype=torch.uint8)
    if num_rows > 0:
        rows, offset = whole_rows(x)
        program = kernel(
            width=width,
            source=str(x.dtype).removeprefix("torch."),
            keeps_values=keeps_values,
            encoding=encoding,
            adds_residual=residual is not None,
            row_width=rows.shape[1],
            offset=offset,
        )
        if units is not None:
            encoded = units.codes.view(torch.float8_e4m3fn), units.scales
        else:
            encoded = rounded if codes is None else codes.view(torch.float8_e4m3fn), scales
        program(rows, residual, weight, values, *encoded, total, eps)
    return Normed(values, codes, scales, total, rounded, units)


def run(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    keeps_values: bool,
    encoding: str = "codes",
) -> Normed:
    return launch(x, weight, eps, residual, keeps_values=keeps_values, encoding=encoding)
