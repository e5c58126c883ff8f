"""Torch meaning of `encode_units`."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.projection.encode_rows.op import Rotation
from tilelang_ops.projection.rotate import reference as rotate


def run(x: Tensor, rotation: Rotation | None) -> RowCodes:
    if rotation is not None:
        x = x.clone()
        rotate.run(x, rotation.cos, rotation.sin, rotation.inverse)
    return RowCodes.encode(x.flatten(1))
