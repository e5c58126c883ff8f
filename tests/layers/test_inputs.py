"""Inputs: rows that several products take."""

from __future__ import annotations

import torch

from deepinfer.layers.inputs import Inputs
from tilelang_ops.common.row_codes import RowCodes


def test_rows_by_their_places() -> None:
    rows = torch.randn(6, 160).bfloat16()
    inputs = Inputs(rows, rows * 2, RowCodes.encode(rows))
    assert inputs.num_rows == Inputs(rows).num_rows == Inputs(None, rows).num_rows == 6
    places = torch.tensor([5, 0, 0, 3, 1])
    taken = inputs.take(places)
    assert taken.codes is not None and taken.codes.scales.shape == (2, 8)
    assert torch.equal(taken.values, rows[places]) and torch.equal(taken.rounded, 2 * rows[places])
    assert torch.equal(taken.codes.values(), RowCodes.encode(rows[places]).values())
