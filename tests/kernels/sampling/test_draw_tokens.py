"""draw_tokens' kernel: every token of its reference, rows alone and in a batch."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.sampling.draw_tokens import cuda, reference

SIZES = {"num_threads": 64, "capacity": 256, "unroll": 1}
VOCAB = 1002


def test_draws(run_kernel: KernelRunner) -> None:
    scores = torch.randn(9, VOCAB) * 3
    scores[1] = 0.0
    scores[2] = torch.where(torch.rand(VOCAB) < 0.9, -torch.inf, scores[2])
    scores[3] = -torch.inf
    scores[4, 7] = torch.nan
    scores[5, VOCAB - 1] = torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,))
    index = torch.arange(9) * 1000
    tokens, _ = run_kernel(cuda, scores, seeds, index, 3, **SIZES)
    assert_same_bits(tokens, reference.run(scores, seeds, index, 3))
    assert tokens[3:6].tolist() == [0, 0, 0]
    for row in (0, 8):
        alone, _ = run_kernel(cuda, scores[[row]], seeds[[row]], index[[row]], 3, **SIZES)
        assert_same_bits(alone, tokens[[row]], f"row {row}")
