import torch
from torch import Tensor

from tilelang_ops.common.numerics import encode_fp4
from tilelang_ops.common.records import flat_rows, row_numbers


def run(values: Tensor, pool: Tensor, index: Tensor) -> None:
    rows = (index >= 0).nonzero().squeeze(1)
    values = values.index_select(0, rows)
    records = torch.cat(encode_fp4(values), dim=1) if pool.dtype == torch.uint8 else values.float()
    flat_rows(pool).index_copy_(0, row_numbers(pool, index.index_select(0, rows)), records)
