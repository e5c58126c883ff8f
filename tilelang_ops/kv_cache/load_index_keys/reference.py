import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_mxfp4
from tilelang_ops.common.records import flat_rows, row_numbers


def run(codes: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    num_keys = index.shape[0]
    rows = (index >= 0).nonzero().squeeze(1)
    index = index.index_select(0, rows)
    values = flat_rows(codes).index_select(0, row_numbers(codes, index))
    if scales is not None:
        values = decode_mxfp4(values, flat_rows(scales).index_select(0, row_numbers(scales, index)))
    out = torch.zeros(num_keys, values.shape[1], dtype=dtype, device=codes.device)
    return out.index_copy_(0, rows, values.to(dtype))
