"""Sort the rows of a grouped product by expert, and gather its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes


@dataclass(frozen=True)
class GroupedInputs:
    """What the experts' products take, in places as `group_rows` chooses them for tiles of one row.

    Attributes:
        rows: [n * k, width] the row of each place; open behind the last.
        factors: [n * k] float32 its routing weight, likewise.
        places: [n, k] int32 the place of each slot; -1 for a slot that was left out.
        offsets: [experts + 1] int32 first place of each expert; the last number is the end of all places.
    """

    rows: Tensor
    factors: Tensor
    places: Tensor
    offsets: Tensor


def gather_grouped(rows: Tensor | RowCodes, weights: Tensor, ids: Tensor, num_experts: int) -> GroupedInputs:
    """A fusion: `group_rows` with tiles of one row, then `gather_slots`.

    Args:
        rows: [n, width] of any dtype of 2 or 4 bytes, contiguous, width a multiple of 32; or by their codes,
            which become bfloat16.
        weights: [n, k] float32, contiguous.
        ids: [n, k] int32 the expert of each slot, contiguous; a slot whose id is outside
            0 ... num_experts - 1 is left out.
        num_experts: E.
    """
    assert ids.dtype == torch.int32 and ids.shape == weights.shape, f"{ids.dtype=} {ids.shape=}"
    table = rows.codes if isinstance(rows, RowCodes) else rows
    assert table.is_contiguous() and weights.is_contiguous() and ids.is_contiguous(), f"{table.stride()=}"
    assert table.shape[0] == ids.shape[0] and table.shape[1] % 32 == 0, f"{table.shape=} {ids.shape=}"
    return backend(__package__, table.device).run(rows, weights, ids, num_experts)
