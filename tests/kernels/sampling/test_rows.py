"""Draws, truncation and log-probabilities of whole rows: kernels against their references, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common import noise
from tilelang_ops.sampling.gather_logprobs import cuda as logprobs_cuda
from tilelang_ops.sampling.gather_logprobs import reference as logprobs_reference
from tilelang_ops.sampling.sample_tokens import cuda as sample_cuda
from tilelang_ops.sampling.sample_tokens import reference as sample_reference
from tilelang_ops.sampling.sum_smaller_probs import cuda as sum_cuda
from tilelang_ops.sampling.sum_smaller_probs import reference as sum_reference
from tilelang_ops.sampling.truncate_scores import cuda as truncate_cuda
from tilelang_ops.sampling.truncate_scores import reference as truncate_reference

# A list that the odd distributions below overflow, and a vocabulary that leaves a part of a group.
SIZES = {"num_threads": 64, "capacity": 256, "unroll": 1}
VOCAB = 1002
ROWS = 8
TOP_K = (-1, 1, 2, 5, 20, 200, VOCAB - 1, VOCAB, VOCAB + 5, 0)
TOP_P = (1.0, 0.9, 0.95, 0.5, 0.1, 1e-6, 0.0, 0.9999999, 0.99)
MIN_P = (0.0, 0.0, 0.0, 1.0, 0.05, 0.3)
INV_TEMPERATURE = (1.0, 0.0, 0.5, 2.0, 10.0)


def normal(scale: float, shift: float = 0.0) -> Tensor:
    return torch.randn(ROWS, VOCAB) * scale + shift


def masked(share: float, value: float) -> Tensor:
    return torch.where(torch.rand(ROWS, VOCAB) < share, value, normal(3.0))


def scores_of(kind: str) -> Tensor:
    """Rows of one shape of distribution."""
    if kind == "one":
        return torch.cat([torch.full((ROWS, 1), 50.0), normal(1.0)[:, 1:]], 1).roll(517, 1)
    if kind == "zipf":
        return -1.1 * torch.log(torch.arange(1.0, VOCAB + 1))[torch.randperm(VOCAB)] + normal(0.3)
    makers = {
        "flat": lambda: normal(1.0),
        "usual": lambda: normal(3.0),
        "wide": lambda: normal(20.0, 100.0),
        "equal": lambda: torch.zeros(ROWS, VOCAB),
        "ties": lambda: torch.randint(-3, 40, (ROWS, VOCAB)) * 0.5,
        "zeros of both signs": lambda: torch.where(torch.rand(ROWS, VOCAB) < 0.5, 0.0, -0.0),
        "masked": lambda: masked(0.9, -torch.inf),
        "few": lambda: masked(0.997, -torch.inf),
        "impossible": lambda: masked(2.0, -torch.inf),
        "penalised": lambda: masked(0.7, -1e4),
        "huge": lambda: normal(1e30),
        "subnormal": lambda: normal(1e-39),
    }
    return makers[kind]()


KINDS = "flat usual wide equal ties one zipf masked few impossible penalised huge subnormal".split() + [
    "zeros of both signs"
]


def choose(values: tuple) -> Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), (ROWS,))]


def options() -> tuple[Tensor, Tensor, Tensor]:
    return choose(TOP_K).int(), choose(TOP_P), choose(MIN_P)


def streams() -> tuple[Tensor, Tensor]:
    return torch.randint(-(2**63), 2**63 - 1, (ROWS,)), torch.randint(0, 2**40, (ROWS,))


def test_sample_tokens(run_kernel: KernelRunner) -> None:
    for kind in KINDS:
        for plain in (False, True):
            cut = options()
            if plain:
                cut = (torch.full_like(cut[0], -1), torch.ones(ROWS), torch.zeros(ROWS))
            arguments = (scores_of(kind), choose(INV_TEMPERATURE), *cut, *streams(), 2)
            expected = sample_reference.run(*arguments)
            (token_ids, best), _ = run_kernel(sample_cuda, *arguments, **SIZES)
            assert torch.equal(token_ids, expected[0]), f"{kind} {arguments[1:]}"
            assert torch.equal(best, expected[1]), kind
    # A row alone is the row in the batch.
    alone, _ = run_kernel(sample_cuda, *(a[3:4] if torch.is_tensor(a) else a for a in arguments), **SIZES)
    assert alone[0] == token_ids[3]


def test_top_p_alone(run_kernel: KernelRunner) -> None:
    """Winners on the list of the largest scores, below it, beside equal scores, and rows where none stays."""
    top_k, min_p = torch.full((ROWS,), -1, dtype=torch.int32), torch.zeros(ROWS)
    top_p = torch.tensor([0.5, 0.5, 0.6, 0.9, 0.95, 0.99, 0.9999999, 0.49])
    for kind in ("flat", "usual", "equal", "ties", "one", "masked", "zeros of both signs"):
        arguments = scores_of(kind), choose((1.0, 0.5, 2.0)), top_k, top_p, min_p, *streams(), 2
        (token_ids, _), _ = run_kernel(sample_cuda, *arguments, **SIZES)
        assert torch.equal(token_ids, sample_reference.run(*arguments)[0]), f"{kind} {arguments[1:]}"


def test_broken_rows(run_kernel: KernelRunner) -> None:
    logits = normal(3.0)
    logits[:4, 700] = torch.nan
    logits[4:6, 3] = torch.inf
    inverse = torch.tensor([1.0, 0.0] * 4)
    for top_k in (-1, 5):
        cut = torch.full((ROWS,), top_k, dtype=torch.int32), torch.ones(ROWS), torch.zeros(ROWS)
        arguments = logits, inverse, *cut, *streams(), 0
        (token_ids, best), _ = run_kernel(sample_cuda, *arguments, **SIZES)
        assert not token_ids[:6].any()
        assert torch.equal(token_ids, sample_reference.run(*arguments)[0])
        assert best[:4].isnan().all() and best[4:6].isinf().all() and best[6:].isfinite().all()


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
