"""Codes of rows with a scale for 128 channels, against the encoding in groups of 32."""

from __future__ import annotations

import torch

from tilelang_ops.common.numerics import decode_e8m0, decode_fp8, encode_fp8
from tilelang_ops.common.row_codes import RowCodes


def test_units_of_rows() -> None:
    """Exact but for what is 2^-6 of the unit's scale and less; an open unit."""
    x = torch.randn(6, 416) * torch.logspace(-7, 2, 13).repeat_interleave(32)
    x[1, :200], x[2, 300] = 0.0, torch.nan
    rows = RowCodes.encode(x)
    codes, scales = encode_fp8(x)
    groups = torch.nn.functional.pad(decode_e8m0(scales), (0, 3)).unflatten(1, (4, 4))
    expected = groups.amax(-1).T
    assert rows.scales.shape == (4, 8) and torch.equal(rows.scales[:, :6].nan_to_num(), expected.nan_to_num())
    rounded, kept = decode_fp8(codes, scales), [0, 1, 3, 4, 5]
    units = expected.T.repeat_interleave(128, 1)[:, :416]
    values = rows.values().float()
    error = (values - rounded).abs()[kept]
    is_small = (rounded.abs() < 2.0**-6 * units)[kept]
    assert not error[~is_small].any() and error.any() and (error <= 2.0**-10 * units[kept]).all()
    assert values[2, 256:384].isnan().all() and not values[2, :256].isnan().any()
    again = RowCodes.encode(rounded[kept]).values()
    assert torch.equal(again, RowCodes.encode(x[kept]).values())
