"""Torch meaning of `grouped_swiglu_mxfp4`."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.numerics import decode_fp8, encode_fp8, silu
from tilelang_ops.common.packing import unpack_mxfp4


def run(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    factors: Tensor,
    limit: float,
    inner: int,
    round_output: bool,
) -> Tensor:
    unpacked = unpack_mxfp4(weights, gated=True)[..., : x.shape[1]].float()
    bounds = offsets.tolist()
    product = x.new_zeros(x.shape[0], 2 * inner)
    for weight, first, end in zip(unpacked, bounds, bounds[1:], strict=False):
        product[first:end] = (x[first:end].float() @ weight.T).to(x.dtype)
    gate, up = product.float().chunk(2, dim=1)
    out = silu(gate.clamp(max=limit).contiguous()) * up.clamp(-limit, limit) * factors.view(-1, 1)
    out = out.to(x.dtype)
    return decode_fp8(*encode_fp8(out)).to(x.dtype) if round_output else out
