"""What each sequence of a prefill emits: the token of its last output row, if its known tokens end there."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def last_tokens(
    token_ids: Tensor, total_lens: Tensor, seqlens_k: Tensor, row_offsets: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The first token of sequences whose prefill ends with this step.

    Args:
        token_ids: [R] int32, each output row's token.
        total_lens: [S] int32 tokens that are computed, and
        seqlens_k: [S] int32 those that are after this step; all of them where both are equal.
        row_offsets: [S + 1] int32, first output row of each sequence; one may have none, and emits nothing.
        width: columns of `emitted`.

    Returns:
        emitted [S, width] int32, the token in front and 0 behind; num_emitted [S] int32, 1 or 0; final_rows
        [S] int32, the last output row, 0 where none comes before.
    """
    assert token_ids.dtype == row_offsets.dtype == torch.int32, f"{token_ids.dtype=} {row_offsets.dtype=}"
    assert total_lens.shape == seqlens_k.shape, f"{total_lens.shape=} {seqlens_k.shape=}"
    run = backend(__package__, row_offsets.device).run
    return run(token_ids, total_lens, seqlens_k, row_offsets, width)
