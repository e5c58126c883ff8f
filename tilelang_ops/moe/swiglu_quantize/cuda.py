"""swiglu and swiglu_quantize on CUDA: 8 channels a thread, 1,024 or fewer a block.

Exponential and reciprocal are the hardware's: before it rounds the activation is within 1e-5 of the exact.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import amax_bits, e8m0_inverse, e8m0_value, fp8_scale_byte
from tilelang_ops.common.cuda_row_codes import group_in_unit, unit_code
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import E4M3
from tilelang_ops.common.row_codes import UNIT, scale_shape

THREADS = 128
GROUP = 32


@cuda_kernel(
    builds=lambda model: [
        {
            "width": model.moe_intermediate_size,
            "source": "bfloat16",
            "result": result,
            "is_weighted": weighted,
            "has_slots": slots,
        }
        for result, weighted, slots in (
            ("bfloat16", False, False),
            ("rounded", False, False),
            ("units", False, False),
        )
        if result != "units" or model.moe_intermediate_size % UNIT == 0
    ]
)
def kernel(width: int, source: str, result: str, is_weighted: bool, has_slots: bool):
    n, num_weights = T.dynamic("n"), T.dynamic("num_weights") if has_slots else None
    num_weights = n if num_weights is None else num_weights
    """`result` is a dtype, E4M3 with scales or another without, "rounded": what E4M3 would mean, or
    "units"."""
    rounds, in_units = result == "rounded", result == "units"
    quantizes = rounds or in_units or result == "float8_e4m3fn"
    result = source if rounds else "float8_e4m3fn" if in_units else result
    near = 4 if in_units else 1  # groups of a unit
    assert not in_units or width % UNIT == 0, f"{width=}: no whole units"
    scales_shape = (width // UNIT, T.dynamic("padded")) if in_units else (n, width // GROUP)
    scale_type = "float32" if in_units else "uint8"
    step = 8 if width % 8 == 0 else 1
    parts = GROUP // step if quantizes else 1
    groups = width // (parts * step)
    # Groups of a block: an even share of a row's, in whole warps, where that can be.
    warp_groups = 32 // parts
    shares = [t for t in range(warp_groups, THREADS // parts + 1, warp_groups) if groups % t == 0]
    tile = max(shares, default=THREADS // parts)
    threads = tile * parts
    far = tile // near

    @T.prim_func
    def swiglu_quantize(
        gate_up: T.Tensor((n, 2 * width), source),
        weight: T.Tensor((num_weights,), "float32"),
        slots: T.Tensor((n,), "int32"),
        out: T.Tensor((n, width), result),
        scales: T.Tensor(scales_shape, scale_type),
        limit: T.float32,
    ):
        with T.Kernel(n, T.ceildiv(groups, tile), threads=threads) as (row, block):
            values = T.alloc_fragment((far, near, parts, step), "float32")
            largest = T.alloc_fragment((far, near, parts), "int32")
            amax = T.alloc_fragment((far, near), "int32")
            top_of = T.alloc_fragment((far,), "int32")
            factor = T.alloc_fragment((far, near), "float32")
            scales_of = T.alloc_fragment((far, near), "float32")
            scale = T.alloc_var("float32")
            is_empty = T.alloc_var("int32")
            scale = 1.0
            is_empty = 0
            if has_slots:
                slot = slots[row]
                if slot < 0:
                    is_empty = 1
                else:
                    scale = weight[slot]
            elif is_weighted:
                scale = weight[row]
            if is_empty == 0:
                for f, e, p in T.Parallel(far, near, parts):
                    start = ((block * tile + f * near + e) * parts + p) * step
                    gate = T.alloc_local((step,), "float32")
                    up = T.alloc_local((step,), "float32")
                    top = T.alloc_var("float32")
                    total = T.alloc_var("float32")
                    top = 0.0
                    total = 0.0
                    for k in T.unroll(step):
                        gate[k] = 0.0
                    if start < width:
                        for k in T.vectorized(step):
                            gate[k] = T.cast(gate_up[row, start + k], "float32")
                        for k in T.vectorized(step):
                            up[k] = T.cast(gate_up[row, width + start + k], "float32")
                        for k in T.unroll(step):
                            gate[k] = T.min(gate[k], limit)
                            up[k] = T.max(T.min(up[k], limit), -limit)
                            gate[k] = gate[k] * T.fast_rcp(1.0 + T.__exp(-gate[k])) * up[k] * scale
                            if quantizes:
                                gate[k] = T.cast(T.cast(gate[k], source), "float32")
                                top = T.max(top, T.abs(gate[k]))
                                total = total + T.abs(gate[k])
                        if not quantizes:
                            for k in T.vectorized(step):
                                out[row, start + k] = T.cast(gate[k], result)
                    if quantizes:
                        for k in T.vectorized(step):
                            values[f, e, p, k] = gate[k]
                        largest[f, e, p] = amax_bits(top, total)
                if quantizes:
                    T.reduce_max(largest, amax, dim=2)
                    if in_units:
                        T.reduce_max(amax, top_of, dim=1)
                        for f in T.Parallel(far):
                            top_of[f] = fp8_scale_byte(top_of[f])
                            if block * tile + f * near < groups:
                                scales[block * far + f, row] = e8m0_value(top_of[f])
                    for f, e in T.Parallel(far, near):
                        byte = fp8_scale_byte(amax[f, e])
                        factor[f, e] = e8m0_inverse(byte)
                        if in_units:
                            scales_of[f, e] = group_in_unit(byte, top_of[f])
                        elif rounds:
                            scales_of[f, e] = e8m0_value(byte)
                        elif block * tile + f < groups:
                            scales[row, block * tile + f] = T.cast(byte, "uint8")
                    for f, e, p in T.Parallel(far, near, parts):
                        start = ((block * tile + f * near + e) * parts + p) * step
                        if start < width:
                            if in_units:
                                for k in T.vectorized(step):
                                    out[row, start + k] = unit_code(
                                        values[f, e, p, k], factor[f, e], scales_of[f, e]
                                    )
                            else:
                                v = T.alloc_local((step,), "float32")
                                for k in T.vectorized(step):
                                    v[k] = values[f, e, p, k] * factor[f, e]
                                if rounds:
                                    code = T.alloc_local((step,), "float8_e4m3fn")
                                    for k in T.vectorized(step):
                                        code[k] = T.cast(v[k], "float8_e4m3fn")
                                    for k in T.vectorized(step):
                                        v[k] = T.cast(code[k], "float32") * scales_of[f, e]
                                for k in T.vectorized(step):
                                    out[row, start + k] = T.cast(v[k], result)

    return swiglu_quantize


def launch(
    gate_up: Tensor,
    limit: float,
    dtype: torch.dtype,
    weight: Tensor | None,
    slots: Tensor | None,
    *,
    rounds: bool = False,
    in_units: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Values of `dtype`; for E4M3 with their scales."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    scales = None
    if in_units:
        scales = torch.empty(scale_shape(num_rows, width), device=gate_up.device)
    elif dtype == E4M3:
        scales = torch.empty(num_rows, width // GROUP, dtype=torch.uint8, device=gate_up.device)
    if num_rows > 0:
        source, result = (str(d).removeprefix("torch.") for d in (gate_up.dtype, dtype))
        program = kernel(
            width=width,
            source=source,
            result="rounded" if rounds else "units" if in_units else result,
            is_weighted=weight is not None,
            has_slots=slots is not None,
        )
        factors = None if weight is None else weight.reshape(-1)
        program(gate_up.contiguous(), factors, slots, out, scales, limit)
    return out, scales


def run(
    gate_up: Tensor, limit: float, weight: Tensor | None, slots: Tensor | None, in_units: bool = False
) -> tuple[Tensor, Tensor]:
    codes, scales = launch(gate_up, limit, E4M3, weight, slots, in_units=in_units)
    return codes.view(torch.uint8), scales
