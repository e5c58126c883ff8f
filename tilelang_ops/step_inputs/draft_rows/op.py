"""What drafting needs of the rows that chose the sequences' newest tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


class DraftRows(NamedTuple):
    """Of n sequences that draft, k drafts each."""

    anchors: Tensor  # [n] int32 token chosen last
    positions: Tensor  # [n] int32 where it will stand
    state_slots: Tensor  # [n] int32
    inv_temperature: Tensor  # [n] float32 parameters of the row that chose it, and so on
    top_k: Tensor  # [n] int32
    top_p: Tensor  # [n] float32
    min_p: Tensor  # [n] float32
    seeds: Tensor  # [n] int64
    token_index: Tensor  # [k, n] int64 of each draft


def draft_rows(
    emitted: Tensor,
    num_emitted: Tensor,
    final_rows: Tensor,
    positions: Tensor,
    output_rows: Tensor,
    state_slots: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    num_drafts: int,
    seqs: Tensor | None = None,
    first: int = 0,
) -> DraftRows:
    """Gathers them. int32 unless noted.

    Args:
        emitted: [S, w] tokens of each sequence; the last of `num_emitted` is the anchor, the first where that
            is 0.
        num_emitted: [S].
        final_rows: [S] output row that chose it; clamped to the rows there are.
        positions: [Q] of the step's rows.
        output_rows: [R] the step's row of each output row.
        state_slots: [S].
        parameters: inv_temperature [R] float32, top_k [R], top_p, min_p [R] float32, seeds, token_index [R]
            int64 of the output rows.
        num_drafts: k.
        seqs: [n] the sequences; None for those from `first` on.
        first: see `seqs`.
    """
    num_seqs, rows = num_emitted.shape[0], output_rows.shape[0]
    assert emitted.shape[0] == final_rows.shape[0] == state_slots.shape[0] == num_seqs, f"{emitted.shape=}"
    assert rows > 0 and all(p.shape == (rows,) for p in parameters), f"{rows=} {parameters[0].shape=}"
    assert parameters[4].dtype == parameters[5].dtype == torch.int64, f"{parameters[4].dtype=}"
    assert seqs is None or seqs.dtype == torch.int32, f"{seqs.dtype=}"
    return DraftRows(
        *backend(__package__, emitted.device).run(
            emitted,
            num_emitted,
            final_rows,
            positions,
            output_rows,
            state_slots,
            *parameters,
            num_drafts,
            seqs,
            first,
        )
    )
