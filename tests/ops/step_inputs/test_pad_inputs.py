"""Inputs of a step in buffers of fixed shapes."""

from __future__ import annotations

import pytest
import torch

from tilelang_ops.step_inputs import pad_inputs


def test_matrices_go_to_the_corners_of_their_buffers() -> None:
    source = torch.arange(10, 22, dtype=torch.int32)
    target = torch.full((16,), -7, dtype=torch.int32)
    table = torch.tensor([[0, 2, 1, 1, 3, 1, 0], [2, 2, 3, 5, 2, 4, 99], [9, 0, 1, 14, 1, 1, 5]]).int()
    pad_inputs(source, table, target)
    assert target.tolist() == [-7, 10, 11, 0, -7, 12, 13, 14, 99, 15, 16, 17, 99, -7, 5, -7]
    pad_inputs(source, table[:0], target)
    with pytest.raises(AssertionError, match="shape"):
        pad_inputs(source, table[:, :6], target)
