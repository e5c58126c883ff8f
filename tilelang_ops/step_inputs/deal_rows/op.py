"""Deal the rows of a planned decode step to its sequences anew; the total stays."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilelang_ops.common.dispatch import backend


class DealtRows(NamedTuple):
    """Q rows, S sequences, int32 all."""

    cu_seqlens_q: Tensor  # [S + 1]
    seqlens_k: Tensor  # [S]
    row_seq: Tensor  # [Q]
    positions: Tensor  # [Q]
    input_ids: Tensor  # [Q]
    ngram_ids: Tensor  # [Q, max_ngram]


def deal_rows(
    seqlens_q: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, input_ids: Tensor, ngram_ids: Tensor
) -> DealtRows:
    """Give each sequence another number of rows. int32 all.

    A row keeps its place in the sequence; one behind the planned rows repeats the ids of the last of them,
    for `correct_rows` to put its own in.

    Args:
        seqlens_q: [S] rows from now on, each at least 1, together as many as planned.
        cu_seqlens_q: [S + 1] as planned, each sequence with a row at least.
        seqlens_k: [S], input_ids: [Q], ngram_ids: [Q, max_ngram] as planned.
    """
    assert seqlens_q.shape == seqlens_k.shape and cu_seqlens_q.shape[0] == seqlens_k.shape[0] + 1, (
        f"{seqlens_q.shape=} {seqlens_k.shape=} {cu_seqlens_q.shape=}"
    )
    assert input_ids.shape[0] == ngram_ids.shape[0], f"{input_ids.shape=} {ngram_ids.shape=}"
    return DealtRows(
        *backend(__package__, seqlens_q.device).run(seqlens_q, cu_seqlens_q, seqlens_k, input_ids, ngram_ids)
    )
