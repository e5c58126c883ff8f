"""Sort the rows of the experts' products in FP8 by expert, and gather their codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes


@dataclass(frozen=True)
class GroupedCodes:
    """What the experts' products in FP8 take, in places as `group_rows` chooses them for tiles of four rows.

    Attributes:
        rows: the row of each place; open where a place is empty, like
        factors: [places] float32 its routing weight.
        places: [n, k] int32 the place of each slot; -1 for a slot that was left out.
        offsets: [experts + 1] int32 first place of each expert; the last number is the end of all places.
    """

    rows: RowCodes
    factors: Tensor
    places: Tensor
    offsets: Tensor


def gather_codes(rows: RowCodes, weights: Tensor, ids: Tensor, num_experts: int) -> GroupedCodes:
    """A fusion: `group_rows` with tiles of four rows, then the row of each place.

    Args:
        rows: n rows, contiguous, their width a multiple of 32.
        weights: [n, k] float32, contiguous.
        ids: [n, k] int32 the expert of each slot, contiguous; a slot whose id is outside
            0 ... num_experts - 1 is left out.
        num_experts: E.
    """
    assert ids.dtype == torch.int32 and ids.shape == weights.shape, f"{ids.dtype=} {ids.shape=}"
    assert rows.codes.is_contiguous() and rows.scales.is_contiguous(), f"{rows.codes.stride()=}"
    assert weights.is_contiguous() and ids.is_contiguous(), f"{weights.stride()=} {ids.stride()=}"
    assert rows.codes.shape[0] == ids.shape[0] and rows.codes.shape[1] % 32 == 0, f"{rows.codes.shape=}"
    return backend(__package__, ids.device).run(rows, weights, ids, num_experts)
