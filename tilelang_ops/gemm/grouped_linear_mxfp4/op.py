"""Products of rows sorted by expert with the experts' MXFP4 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def grouped_linear_mxfp4(x: Tensor, weights: Tensor, offsets: Tensor, columns: int) -> Tensor:
    """`out[r] = weights[expert of r] @ x[r]`: float32 sums of exact products, rounded once.

    Args:
        x: [m, width] bfloat16, width a multiple of 32; rows offsets[e] .. offsets[e + 1] - 1 are expert e's.
        weights: [experts, ..] int32 of `packing.pack_mxfp4`.
        offsets: [experts + 1] int32, ascending from 0 to m at most; the output of rows behind is undefined.
        columns: weight rows of an expert before padding.

    Returns:
        [m, columns] bfloat16. A row's bits do not depend on the other rows.
    """
    assert x.dtype == torch.bfloat16 and x.shape[1] % 32 == 0, f"{x.dtype} {x.shape=}"
    shape = (offsets.shape[0] - 1, -(-columns // 64), -(-x.shape[1] // 64), 17, 32)
    assert weights.shape == shape and offsets.dtype == torch.int32, f"{weights.shape=}, not {shape}"
    if x.shape[0] == 0:
        return x.new_empty(0, columns)
    return backend(__package__, x.device).run(x, weights, offsets, columns)
