"""Number formats of the checkpoint's activations and of the caches: encode to bytes, decode, round in place.

    name     bytes per group                       used for
    fp8      32 x E4M3, one E8M0 scale            window KV, inputs of quantised matrices
    mxfp4    16 x two E2M1, one E8M0 scale         index keys and index queries
    fp4      8 x two E2M1, one E4M3 scale          compressed KV

`encode_*` returns (codes, scales), both uint8; `decode_*` returns float32; `round_*` is decode(encode(x)) in
the dtype of x, exact for bfloat16 as well. The bit rules stand in `tilelang_ops.common.numerics`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu
from tilelang_ops.common.numerics import (
    decode_fp4,
    decode_fp8,
    decode_mxfp4,
    encode_fp4,
    encode_fp8,
    encode_mxfp4,
)

__all__ = [
    "decode_fp4",
    "decode_fp8",
    "decode_mxfp4",
    "encode_fp4",
    "encode_fp8",
    "encode_mxfp4",
    "round_fp4",
    "round_fp8",
    "round_mxfp4",
]


def round_fp8(x: Tensor) -> Tensor:
    """Round [..., n] to E4M3 in groups of 32 with E8M0 scales; same shape and dtype."""
    return decode_fp8(*encode_fp8(x)).to(x.dtype)


def round_mxfp4(x: Tensor) -> Tensor:
    """Round [..., n] to E2M1 in groups of 32 with E8M0 scales; same shape and dtype."""
    require_cpu("round_mxfp4", x)
    assert x.shape[-1] % 32 == 0, f"{x.shape=} is not made of groups of 32"
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    num_rows = x.numel() // width if width else 0
    context().round_mxfp4(x.data_ptr(), is_bfloat16(x), out.data_ptr(), num_rows, width)
    return out


def round_fp4(x: Tensor) -> Tensor:
    """Round [..., n] to E2M1 in groups of 16 with E4M3 scales; same shape and dtype."""
    return decode_fp4(*encode_fp4(x)).to(x.dtype)
