"""candidate_scores on Ascend 950: all keys are scored, and the entries of the blocks are taken out.

The cube cores' program reads runs of keys. One that gathers keys by row, as on CUDA, is not written.
"""

import torch
from torch import Tensor

from tilelang_ops.indexer.index_scores.ascend import run as index_scores


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
) -> Tensor:
    width = block_tables.shape[1] * code_pool.shape[1]  # the host knows no smaller bound
    scores = index_scores(q, weights, code_pool, scale_pool, block_tables, row_seq, num_visible, width)
    within = torch.arange(block_size, device=blocks.device)
    entries = (blocks[:, :, None] * block_size + within).flatten(1)
    is_inside = (entries >= 0) & (entries < width)
    return torch.where(is_inside, scores.gather(1, entries.clamp(0, width - 1).long()), -torch.inf)
