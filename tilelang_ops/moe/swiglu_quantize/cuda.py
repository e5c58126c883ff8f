"""swiglu and swiglu_quantize on CUDA: 8 channels a thread, 1,024 or fewer a block.

Exponential and reciprocal are the hardware's: before it rounds the activation is within 1e-5 of the exact.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import amax_bits, e8m0_inverse, e8m0_value, fp8_scale_byte
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.numerics import E4M3

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
        )
    ]
)
def kernel(width: int, source: str, result: str, is_weighted: bool, has_slots: bool):
    n, num_weights = T.dynamic("n"), T.dynamic("num_weights") if has_slots else None
    num_weights = n if num_weights is None else num_weights
    """`result` is a dtype, E4M3 with scales or another without, or "rounded": what E4M3 would mean."""
    rounds = result == "rounded"
    quantizes = rounds or result == "float8_e4m3fn"
    result = source if rounds else result
    step = 8 if width % 8 == 0 else 1
    parts = GROUP // step if quantizes else 1
    groups = width // (parts * step)
    # Groups of a block: an even share of a row's, in whole warps, where that can be.
    warp_groups = 32 // parts
    shares = [t for t in range(warp_groups, THREADS // parts + 1, warp_groups) if groups % t == 0]
    tile = max(shares, default=THREADS // parts)
    threads = tile * parts

    @T.prim_func
    def swiglu_quantize(
        gate_up: T.Tensor((n, 2 * width), source),
        weight: T.Tensor((num_weights,), "float32"),
        slots: T.Tensor((n,), "int32"),
        out: T.Tensor((n, width), result),
        scales: T.Tensor((n, width // GROUP), "uint8"),
        limit: T.float32,
    ):
        with T.Kernel(n, T.ceildiv(groups, tile), threads=threads) as (row, block):
            values = T.alloc_fragment((tile, parts, step), "float32")
            largest = T.alloc_fragment((tile, parts), "int32")
            amax = T.alloc_fragment((tile,), "int32")
            factor = T.alloc_fragment((tile,), "float32")
            scales_of = T.alloc_fragment((tile,), "float32")
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
                for g, p in T.Parallel(tile, parts):
                    start = ((block * tile + g) * parts + p) * step
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
                            values[g, p, k] = gate[k]
                        largest[g, p] = amax_bits(top, total)
                if quantizes:
                    T.reduce_max(largest, amax, dim=1)
                    for g in T.Parallel(tile):
                        byte = fp8_scale_byte(amax[g])
                        factor[g] = e8m0_inverse(byte)
                        if rounds:
                            scales_of[g] = e8m0_value(byte)
                        elif block * tile + g < groups:
                            scales[row, block * tile + g] = T.cast(byte, "uint8")
                    for g, p in T.Parallel(tile, parts):
                        start = ((block * tile + g) * parts + p) * step
                        if start < width:
                            v = T.alloc_local((step,), "float32")
                            for k in T.vectorized(step):
                                v[k] = values[g, p, k] * factor[g]
                            if rounds:
                                code = T.alloc_local((step,), "float8_e4m3fn")
                                for k in T.vectorized(step):
                                    code[k] = T.cast(v[k], "float8_e4m3fn")
                                for k in T.vectorized(step):
                                    v[k] = T.cast(code[k], "float32") * scales_of[g]
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
) -> tuple[Tensor, Tensor | None]:
    """Values of `dtype`; for E4M3 with their scales."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    scales = None
    if dtype == E4M3:
        scales = torch.empty(num_rows, width // GROUP, dtype=torch.uint8, device=gate_up.device)
    if num_rows > 0:
        source, result = (str(d).removeprefix("torch.") for d in (gate_up.dtype, dtype))
        program = kernel(
            width=width,
            source=source,
            result="rounded" if rounds else result,
            is_weighted=weight is not None,
            has_slots=slots is not None,
        )
        factors = None if weight is None else weight.reshape(-1)
        program(gate_up.contiguous(), factors, slots, out, scales, limit)
    return out, scales


def run(gate_up: Tensor, limit: float, weight: Tensor | None, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    codes, scales = launch(gate_up, limit, E4M3, weight, slots)
    return codes.view(torch.uint8), scales
