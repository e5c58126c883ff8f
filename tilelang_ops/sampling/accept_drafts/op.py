"""Which drafts stand, and what each sequence emits."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def accept_drafts(
    token_ids: Tensor,
    draft_ids: Tensor,
    faults: Tensor,
    row_offsets: Tensor,
    width: int,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts the leading rows of each sequence whose draft is the token that the row emits.

    A faulty row has no token, so nothing stands behind it. The first row whose draft does not stand, or that
    tests none, supplies one more token.

    Args:
        token_ids: [R] int32, each row's token.
        draft_ids: [R] int32, -1 where the row tests none; a sequence's last row tests none.
        faults: [R] uint8, 0 = none.
        row_offsets: [S + 1] int32, first row of each sequence; a sequence has a row or more.
        width: most tokens that a sequence emits.
        out: what the results are written to; None for new tensors.

    Returns:
        emitted [S, width] int32, 0 behind the last; num_emitted [S] int32; final_rows [S] int32, the row that
        supplied the last token.
    """
    assert token_ids.shape == draft_ids.shape == faults.shape, f"{token_ids.shape=} {draft_ids.shape=}"
    assert token_ids.dtype == draft_ids.dtype == row_offsets.dtype == torch.int32, f"{row_offsets.dtype=}"
    assert faults.dtype == torch.uint8, f"{faults.dtype=}"
    if out is None:
        num_seqs = row_offsets.shape[0] - 1
        out = token_ids.new_empty(num_seqs, width), *token_ids.new_empty(2, num_seqs).unbind()
    if out[0].shape[0] > 0:
        backend(__package__, token_ids.device).run(token_ids, draft_ids, faults, row_offsets, *out)
    return out
