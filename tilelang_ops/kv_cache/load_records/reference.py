import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_fp4, decode_fp8
from tilelang_ops.common.records import flat_rows, row_numbers


def run(pool: Tensor, index: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(index.shape[0], width, dtype=dtype, device=pool.device)
    rows = (index >= 0).nonzero().squeeze(1)
    records = flat_rows(pool).index_select(0, row_numbers(pool, index.index_select(0, rows)))
    if pool.dtype != torch.uint8:
        values = records
    elif pool.shape[2] == width + width // 32:
        values = decode_fp8(records[:, :width], records[:, width:])
    else:
        values = decode_fp4(records[:, : width // 2], records[:, width // 2 :])
    return out.index_copy_(0, rows, values.to(dtype))
