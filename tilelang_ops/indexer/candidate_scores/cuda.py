"""candidate_scores on CUDA: the kernel of `index_scores` with one row and its list for a block of threads."""

from torch import Tensor

from tilelang_ops.indexer.index_scores.cuda import run as index_scores


def run(
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    block_tables: Tensor,
    row_seq: Tensor,
    num_visible: Tensor,
    blocks: Tensor,
    block_size: int,
    in_fp8: bool = False,
) -> Tensor:
    width = blocks.shape[1] * block_size
    return index_scores(
        q,
        weights,
        code_pool,
        scale_pool,
        block_tables,
        row_seq,
        num_visible,
        width,
        candidates=blocks,
        block_size=block_size,
        in_fp8=in_fp8,
    )
