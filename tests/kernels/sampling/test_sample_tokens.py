"""sample_tokens against its reference, token for token."""

from __future__ import annotations

import torch

from tests.kernels.sampling.score_rows import (
    INV_TEMPERATURE,
    KINDS,
    ROWS,
    SIZES,
    choose,
    normal,
    options,
    scores_of,
    streams,
)
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.sampling.sample_tokens import cuda as sample_cuda
from tilelang_ops.sampling.sample_tokens import reference as sample_reference

TWO_AHEAD = {**SIZES, "unroll": 2}  # as on an H200


def test_sample_tokens(run_kernel: KernelRunner) -> None:
    for kind in KINDS:
        for plain in (False, True):
            cut = options()
            if plain:
                cut = (torch.full_like(cut[0], -1), torch.ones(ROWS), torch.zeros(ROWS))
            arguments = (scores_of(kind), choose(INV_TEMPERATURE), *cut, *streams(), 2)
            expected = sample_reference.run(*arguments)
            (token_ids, best), _ = run_kernel(sample_cuda, *arguments, **TWO_AHEAD)
            assert torch.equal(token_ids, expected[0]), f"{kind} {arguments[1:]}"
            assert torch.equal(best, expected[1]), kind
    # A row alone is the row in the batch.
    alone, _ = run_kernel(sample_cuda, *(a[3:4] if torch.is_tensor(a) else a for a in arguments), **TWO_AHEAD)
    assert alone[0] == token_ids[3]


def test_top_p_alone(run_kernel: KernelRunner) -> None:
    """Winners on the list of the largest scores, below it, beside equal scores, and rows where none stays."""
    top_k, min_p = torch.full((ROWS,), -1, dtype=torch.int32), torch.zeros(ROWS)
    top_p = torch.tensor([0.5, 0.5, 0.6, 0.9, 0.95, 0.99, 0.9999999, 0.49])
    for kind in ("flat", "usual", "equal", "ties", "one", "masked", "zeros of both signs"):
        arguments = scores_of(kind), choose((1.0, 0.5, 2.0)), top_k, top_p, min_p, *streams(), 2
        (token_ids, _), _ = run_kernel(sample_cuda, *arguments, **TWO_AHEAD)
        assert torch.equal(token_ids, sample_reference.run(*arguments)[0]), f"{kind} {arguments[1:]}"


def test_broken_rows(run_kernel: KernelRunner) -> None:
    logits = normal(3.0)
    logits[:4, 700] = torch.nan
    logits[4:6, 3] = torch.inf
    inverse = torch.tensor([1.0, 0.0] * 4)
    for top_k in (-1, 5):
        cut = torch.full((ROWS,), top_k, dtype=torch.int32), torch.ones(ROWS), torch.zeros(ROWS)
        arguments = logits, inverse, *cut, *streams(), 0
        (token_ids, best), _ = run_kernel(sample_cuda, *arguments, **TWO_AHEAD)
        assert not token_ids[:6].any()
        assert torch.equal(token_ids, sample_reference.run(*arguments)[0])
        assert best[:4].isnan().all() and best[4:6].isinf().all() and best[6:].isfinite().all()
