"""Pool groups of tokens and keep in the ring what open groups need."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def pool_groups(
    states: Tensor,
    pool: Tensor,
    ends: Tensor,
    positions: Tensor,
    slots: Tensor,
    preceding: Tensor,
    following: Tensor,
    ratio: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Channel-wise softmax of the gate scores of a group's tokens, applied to their latents.

    Tokens of a group that are not among the rows come from the ring; afterwards the ring holds the last rows
    of every sequence. The rows of a sequence are consecutive positions, in order.

    Args:
        states: [n, 2, width] float32: gate score, latent of each row.
        pool: [num_slots, ring, 2, width] float32, strided; position p lies at `p % ring`.
        ends: [g] int64 the rows that end a group, each of those whose position + 1 is a multiple of `ratio`;
            -1 stands for no row and gives zeros.
        positions: [n] int32, and
        slots: [n] int64 state slot of each row.
        preceding, following: [n] int64 rows of the same sequence before and behind each row.
        ratio: tokens of a group.
        dtype: of the result, rounded once; float32 or bfloat16.

    Returns:
        [g, width] `dtype`.
    """
    assert states.dim() == 3 and pool.shape[2:] == states.shape[1:], f"{states.shape=} {pool.shape=}"
    assert states.dtype == pool.dtype == torch.float32, f"{states.dtype=} {pool.dtype=}"
    if states.shape[0] == 0:
        return states.new_zeros(ends.shape[0], states.shape[2], dtype=dtype)
    return backend(__package__, states.device).run(
        states, pool, ends, positions, slots, preceding, following, ratio, dtype
    )
