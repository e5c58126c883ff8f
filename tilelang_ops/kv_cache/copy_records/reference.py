from torch import Tensor

from tilelang_ops.common.records import flat_rows, row_numbers


def run(src: Tensor, src_index: Tensor, dst: Tensor, dst_index: Tensor) -> None:
    pairs = ((src_index >= 0) & (dst_index >= 0)).nonzero().squeeze(1)
    src_rows = row_numbers(src, src_index.index_select(0, pairs))
    dst_rows = row_numbers(dst, dst_index.index_select(0, pairs))
    flat_rows(dst).index_copy_(0, dst_rows, flat_rows(src).index_select(0, src_rows))
