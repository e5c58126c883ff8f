"""Codes of rows against what `row_codes` says."""

from __future__ import annotations

from torch import Tensor

from tests.support.compare import assert_same_bits
from tilelang_ops.common.row_codes import RowCodes


def assert_same_units(actual: RowCodes | None, rows: Tensor) -> None:
    """Equal bytes; under a NaN scale codes mean nothing.

    Args:
        actual: of a kernel.
        rows: [n, width] the values that it encoded.
    """
    assert actual is not None
    expected = RowCodes.encode(rows)
    num_rows = rows.shape[0]
    assert_same_bits(actual.scales[:, :num_rows], expected.scales[:, :num_rows], "scales of units")
    is_number = ~expected.scales[:, :num_rows].isnan().T.repeat_interleave(128, 1)[:, : rows.shape[1]]
    assert_same_bits(actual.codes[is_number], expected.codes[is_number], "codes of units")
