"""Put what the step before really left into the rows of a decode step that was planned without knowing it.

known length   L = committed_len + num_emitted, of the sequence's row in the step before
row j          position L - 1 + j;  input: the newest token (j = 0), then the drafts
n-gram window  the same tokens, then the emitted ones, then the history before them;
               pad at a barrier and behind it
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilelang_ops.common.dispatch import backend


class CorrectedRows(NamedTuple):
    """Q rows, S sequences, int32 all."""

    input_ids: Tensor  # [Q]
    positions: Tensor  # [Q]
    seqlens_k: Tensor  # [S]
    total_lens: Tensor  # [S]
    ngram_ids: Tensor  # [Q, max_ngram]


def correct_rows(
    input_ids: Tensor,
    positions: Tensor,
    row_seq: Tensor,
    ngram_ids: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    total_lens: Tensor,
    *,
    sources: Tensor,
    committed_lens: Tensor,
    ngram_history: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    drafts: Tensor | None,
    token_map: Tensor | None,
    is_barrier: Tensor | None,
    pad_id: int,
    in_place: bool = False,
) -> CorrectedRows:
    """The rows as they really are; the number of rows of each sequence stands. int32 unless noted.

    Args:
        input_ids, positions, row_seq: [Q] as planned.
        ngram_ids: [Q, max_ngram] as planned.
        cu_seqlens_q: [S + 1], seqlens_k, total_lens: [S] as planned.
        sources: [S] sequence in the step before, -1 where the plan is right.
        committed_lens: [S] tokens known before that step's.
        ngram_history: [S, max_ngram - 1] compressed ids at committed_len - 1, committed_len - 2, ...
        emitted: [P, k + 1] tokens of that step.
        num_emitted: [P] how many of them count.
        drafts: [P, k] that it proposed; None for none.
        token_map: [vocab] compressed ids; None leaves the windows as they are.
        is_barrier: [vocab] bool; None likewise.
        pad_id: the compressed id that stands for nothing.
        in_place: write the results over the arrays as planned, and hand those out.
    """
    assert sources.shape == committed_lens.shape == seqlens_k.shape, f"{sources.shape=} {seqlens_k.shape=}"
    assert emitted.shape[0] == num_emitted.shape[0], f"{emitted.shape=} {num_emitted.shape=}"
    width = ngram_ids.shape[1]
    if token_map is None or is_barrier is None or width == 0:
        token_map = is_barrier = None
    else:
        assert ngram_history.shape[1] == width - 1, f"{ngram_history.shape=} {ngram_ids.shape=}"
    return CorrectedRows(
        *backend(__package__, input_ids.device).run(
            input_ids,
            positions,
            row_seq,
            ngram_ids,
            cu_seqlens_q,
            seqlens_k,
            total_lens,
            sources,
            committed_lens,
            ngram_history,
            emitted,
            num_emitted,
            drafts,
            token_map,
            is_barrier,
            pad_id,
            in_place,
        )
    )
