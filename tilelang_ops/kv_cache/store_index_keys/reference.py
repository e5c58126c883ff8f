from torch import Tensor

from tilelang_ops.common.numerics import encode_mxfp4
from tilelang_ops.common.records import flat_rows, row_numbers


def run(keys: Tensor, codes: Tensor, scales: Tensor | None, index: Tensor) -> None:
    rows = (index >= 0).nonzero().squeeze(1)
    keys, index = keys.index_select(0, rows), index.index_select(0, rows)
    if scales is None:
        flat_rows(codes).index_copy_(0, row_numbers(codes, index), keys.float())
        return
    code_fields, scale_fields = encode_mxfp4(keys)
    flat_rows(codes).index_copy_(0, row_numbers(codes, index), code_fields)
    flat_rows(scales).index_copy_(0, row_numbers(scales, index), scale_fields)
