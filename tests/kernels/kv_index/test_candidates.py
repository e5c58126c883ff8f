"""candidate_blocks' kernel against its reference."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_index.candidate_blocks import cuda, reference

BLOCK, NUM_BLOCKS = 8, 5


def test_candidates(run_kernel: KernelRunner) -> None:
    """Widths around a block, a tile of blocks and the number of blocks that are kept."""
    for width in (1, 9, 40, 41, BLOCK * 1024 + 3):
        visible = torch.tensor([0, 1, width, max(1, width - BLOCK)], dtype=torch.int32)
        scores = (4 * torch.randn(4, width)).round().relu()
        scores.masked_fill_(torch.arange(width) >= visible[:, None], -torch.inf)
        blocks, _ = run_kernel(cuda, scores, visible, BLOCK, NUM_BLOCKS)
        expected = reference.run(scores, visible, BLOCK, NUM_BLOCKS)
        assert_same_bits(blocks, expected, f"blocks of {width} entries")
