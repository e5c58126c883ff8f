"""hash_ngrams' kernel: every bit of its reference."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.engram.hash_ngrams import cuda, reference

# The release's constants: multipliers, and a prime for each column.
MULTIPLIERS = (
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
)
FOLDED_IDS = 99092
COLUMNS = 24


def constants() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multipliers, 24 divisors of the release's size for each table, and where their rows begin."""
    primes = 16000057 + torch.arange(2 * COLUMNS).view(2, COLUMNS) * 37
    return torch.tensor(MULTIPLIERS), primes, primes.cumsum(1) - primes


def test_rows(run_kernel: KernelRunner) -> None:
    for num_rows in (1, 5, 33):
        ids = torch.randint(0, FOLDED_IDS, (num_rows, 4), dtype=torch.int32)
        ids[0] = FOLDED_IDS - 1  # the largest products
        ids[-1, 1:] = 2  # padding
        rows, _ = run_kernel.contracting()(cuda, ids, *constants())
        assert_same_bits(rows, reference.run(ids, *constants()), f"{num_rows} rows")


def test_products_of_63_bits(run_kernel: KernelRunner) -> None:
    ids = torch.tensor([[3, 2, 1, 3]], dtype=torch.int32)
    multipliers = torch.full((2, 4), (2**63 - 1) // 3)
    _, primes, offsets = constants()
    rows, _ = run_kernel(cuda, ids, multipliers, primes, offsets)
    assert_same_bits(rows, reference.run(ids, multipliers, primes, offsets))
