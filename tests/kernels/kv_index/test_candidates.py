"""candidate_blocks' and keep_candidates' kernels against their references."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_index.candidate_blocks import cuda as candidate_blocks
from tilelang_ops.kv_index.candidate_blocks import reference as candidate_blocks_reference
from tilelang_ops.kv_index.keep_candidates import cuda as keep_candidates
from tilelang_ops.kv_index.keep_candidates import reference as keep_candidates_reference

BLOCK, NUM_BLOCKS = 8, 5


def test_candidates(run_kernel: KernelRunner) -> None:
    """Widths around a block, a tile of blocks and the number of blocks that are kept."""
    for width in (1, 7, 8, 9, 40, 41, 1000, BLOCK * 1024 + 3):
        visible = torch.tensor([0, 1, width, max(1, width - BLOCK)], dtype=torch.int32)
        scores = (4 * torch.randn(4, width)).round().relu()
        scores.masked_fill_(torch.arange(width) >= visible[:, None], -torch.inf)
        blocks, _ = run_kernel(candidate_blocks, scores, visible, BLOCK, NUM_BLOCKS)
        expected = candidate_blocks_reference.run(scores, visible, BLOCK, NUM_BLOCKS)
        assert_same_bits(blocks, expected, f"blocks of {width} entries")
        _, arguments = run_kernel(keep_candidates, scores, expected, BLOCK)
        keep_candidates_reference.run(scores, expected, BLOCK)
        assert_same_bits(arguments[0], scores, f"scores of {width} entries")
