"""markov_step's kernel: its logits against float64, its tokens those of its own logits."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.sampling import markov_step, sample_tokens
from tilelang_ops.sampling.markov_step import cuda
from tilelang_ops.sampling.markov_step.op import Draw

VOCAB, RANK, ROWS = 516, 64, 67  # a part of a tile of tokens, and more rows than a tile has


def test_markov_step(run_kernel: KernelRunner) -> None:
    run_kernel = run_kernel.overhanging()
    embed, head = torch.randn(VOCAB, RANK).bfloat16(), torch.randn(VOCAB, RANK).bfloat16()
    base = torch.randn(ROWS, VOCAB) * 3
    base[1] = torch.where(torch.rand(VOCAB) < 0.9, -torch.inf, base[1])
    tokens = torch.randint(0, VOCAB, (ROWS,)).int()
    none, logits = run_kernel(cuda, base, tokens, embed, head, None, True)[0]
    assert none is None
    rows = embed[tokens.long()].double()
    exact = base.double() + rows @ head.double().T
    bound = 2.0**-20 * (base.abs().double() + rows.abs() @ head.abs().double().T)
    seen = exact.isfinite()
    assert torch.equal(logits.isfinite(), seen) and ((logits.double() - exact).abs() <= bound)[seen].all()
    for rows in (slice(0, 1), slice(60, 67)):
        part = run_kernel(cuda, base[rows], tokens[rows], embed, head, None, True)[0][1]
        assert_same_bits(part, logits[rows])


def test_draw_is_of_the_logits() -> None:
    """The reference; on a device the draw is `sample_tokens`."""
    embed, head = torch.randn(VOCAB, RANK).bfloat16(), torch.randn(VOCAB, RANK).bfloat16()
    inverse, streams = torch.rand(ROWS) + 0.5, (torch.arange(ROWS), torch.arange(ROWS) * 1000)
    inverse[6] = 0.0
    base, tokens = torch.randn(ROWS, VOCAB) * 3, torch.randint(0, VOCAB, (ROWS,)).int()
    base[2], base[3, 7], base[4, 1] = -torch.inf, torch.nan, torch.inf
    chosen, logits = markov_step(base, tokens, embed, head, Draw(inverse, *streams, 3), True)
    off = torch.zeros(ROWS).int(), torch.ones(ROWS), torch.zeros(ROWS)
    assert_same_bits(chosen, sample_tokens(logits, inverse, *off, *streams, 3)[0])
    assert chosen[2:5].tolist() == [0, 0, 0]
