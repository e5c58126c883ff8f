"""Truncation and log-probabilities of whole rows: kernels against their references, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.sampling.score_rows import KINDS, ROWS, SIZES, VOCAB, options, scores_of
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common import noise
from tilelang_ops.sampling.gather_logprobs import cuda as logprobs_cuda
from tilelang_ops.sampling.gather_logprobs import reference as logprobs_reference
from tilelang_ops.sampling.sum_smaller_probs import cuda as sum_cuda
from tilelang_ops.sampling.sum_smaller_probs import reference as sum_reference
from tilelang_ops.sampling.truncate_scores import cuda as truncate_cuda
from tilelang_ops.sampling.truncate_scores import reference as truncate_reference


def test_truncate_scores(run_kernel: KernelRunner) -> None:
    for kind in KINDS:
        scores, cut = scores_of(kind), options()
        expected = truncate_reference.run(scores, *cut, torch.empty_like(scores))
        actual, _ = run_kernel(truncate_cuda, scores, *cut, torch.empty_like(scores), **SIZES)
        assert_same_bits(actual, expected, f"{kind} {cut}")


@pytest.mark.parametrize("num_top", [0, 1, 20, 256])
def test_gather_logprobs(run_kernel: KernelRunner, num_top: int) -> None:
    for kind in KINDS if num_top == 20 else KINDS[1::6]:
        scores, token_ids = scores_of(kind), torch.randint(0, VOCAB, (ROWS,))
        token_ids[0] = scores[0].argmax()
        arguments: tuple[Any, ...] = scores, token_ids, num_top, -9999.0
        expected = logprobs_reference.run(*arguments)
        actual, _ = run_kernel(logprobs_cuda, *arguments, **SIZES)
        assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2]), kind
        # Terms are rounded to float32, their sum is not; a result is rounded once more.
        for part in (0, 3):
            torch.testing.assert_close(actual[part], expected[part], rtol=3e-7, atol=3e-7)


def test_sum_smaller_probs(run_kernel: KernelRunner) -> None:
    for kind in ("flat", "ties", "masked"):
        logprobs = scores_of(kind).log_softmax(-1)
        token_ids = torch.randint(-1, VOCAB, (ROWS,), dtype=torch.int32)
        token_ids[:2] = torch.stack([torch.tensor(-1), logprobs[1].argmax()])
        actual, _ = run_kernel(sum_cuda, logprobs, token_ids, num_threads=64, unroll=1)
        torch.testing.assert_close(actual, sum_reference.run(logprobs, token_ids), rtol=1e-6, atol=0)
        assert actual[0] == 0 and abs(actual[1] - 1) < 1e-5


def test_noise_is_the_formula() -> None:
    """Against the formula in float64 as the C library computes it: equal but where rounding is a tie."""
    words = torch.cat(
        [torch.randint(0, 2**32, (100_000,)), torch.arange(1000), 2**32 - 1 - torch.arange(1000)]
    )
    u = noise.uniform(words)
    exact = -torch.log(-torch.where(u < 0.5, torch.log1p(-u), torch.log(1 - u)))
    assert (noise.gumbel(words) != exact.float()).sum() <= 1
    assert (noise.gumbel(words).double() - exact).abs().max() < 1e-6
