"""gather_codes against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.moe.gather_codes import cuda, reference


@pytest.mark.parametrize("rounds", [1, 2])
def test_gather_codes(run_kernel: KernelRunner, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """One launch for few slots, two or three for many."""
    monkeypatch.setattr(cuda, "FEW_ROUNDS", 1)
    monkeypatch.setattr(cuda, "ROUNDS", rounds)
    for num_rows in (1, 90, 150):
        rows, weights = RowCodes.encode(torch.randn(num_rows, 160)), torch.rand(num_rows, 3)
        ids = torch.randint(-1, 6, (num_rows, 3)).int()
        actual, _ = run_kernel(cuda, rows, weights, ids, 5)
        expected = reference.run(rows, weights, ids, 5)
        assert_same_bits(actual.places, expected.places, "places")
        assert_same_bits(actual.offsets, expected.offsets, "offsets")
        filled = expected.places[expected.places >= 0].long()
        assert_same_bits(actual.rows.codes[filled], expected.rows.codes[filled], "codes")
        assert_same_bits(actual.rows.scales[:, filled], expected.rows.scales[:, filled], "scales")
        assert_same_bits(actual.factors[filled], expected.factors[filled], "factors")
    empty = cuda.run(RowCodes(rows.codes[:0], rows.scales[:, :0]), weights[:0], ids[:0], 5)
    assert empty.rows.codes.shape == (0, 160) and not empty.offsets.any()
