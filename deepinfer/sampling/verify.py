"""Verification of draft tokens: which drafts stand, and the token that follows them.

The rows of a sequence are consecutive: row j holds the target's distribution after drafts 1 ... j and tests
draft j + 1; the last row tests none. The accepted drafts are the leading run of rows whose test passed; the
first other row supplies one more token. Rows after it are dead.

    coupled   every row draws its token as plain decoding would; a draft stands iff it is that token.
              The output is the plain sampler's, token by token.
    ratio     a draft x stands with probability min(1, p(x) / q(x)); a refused one is replaced from
              max(p - q, 0). The output has the plain sampler's law.

The flag of a request picks draw and test together: the two do not mix. Greedy rows are coupled rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.sampling.draw import gumbel_argmax
from deepinfer.sampling.philox import Domain
from tilelang_ops.sampling import accept_drafts, last_tokens, verify_ratio
from tilelang_ops.sampling.verify_ratio import reference
from tilelang_ops.sampling.verify_ratio.op import Streams


@dataclass(frozen=True)
class Verified:
    """Outcome of verification; S sequences, at most `width` tokens each."""

    emitted: Tensor  # [S, width] int32 accepted drafts, then the sampled token; 0 behind
    num_emitted: Tensor  # [S] int32
    final_rows: Tensor  # [S] int32 output row that drew the last of them

    def of(self, num_seqs: int) -> Verified:
        """That of the first sequences."""
        return Verified(self.emitted[:num_seqs], self.num_emitted[:num_seqs], self.final_rows[:num_seqs])


def verify_decode(
    token_ids: Tensor,
    draft_ids: Tensor,
    faults: Tensor,
    row_offsets: Tensor,
    width: int,
    *,
    fused: bool = False,
    out: Verified | None = None,
) -> Verified:
    """What each sequence of a decode step emits.

    Args:
        token_ids, draft_ids, faults: [R] as for `drafts_that_stand`.
        row_offsets: [S + 1] int32; every sequence has a row.
        width: most tokens that a sequence emits.
        fused: by one operator; the outcome is the same.
        out: what that operator writes to; None for new tensors.
    """
    if fused:
        parts = None if out is None else (out.emitted, out.num_emitted, out.final_rows)
        return Verified(*accept_drafts(token_ids, draft_ids, faults, row_offsets, width, parts))
    run = leading_run(drafts_that_stand(token_ids, draft_ids, faults), row_offsets)
    first = row_offsets[:-1]
    place = torch.arange(width, dtype=torch.int32, device=first.device)
    rows = torch.minimum(first[:, None] + place, first[:, None] + run[:, None])
    emitted = torch.where(place <= run[:, None], token_ids[rows.long()], 0)
    return Verified(emitted, run + 1, first + run)


def verify_prefill(
    token_ids: Tensor, total_lens: Tensor, seqlens_k: Tensor, row_offsets: Tensor, width: int
) -> Verified:
    """What each sequence of a prefill emits: the token of its last output row, if its known tokens end there.

    A sequence that ends where a state is kept has no output rows; one that is scored is never cut there.

    Args:
        token_ids: [R] int32.
        total_lens, seqlens_k: [S] int32, equal where the step holds the last known token of the sequence.
        row_offsets: [S + 1] int32.
        width: columns of `emitted`.
    """
    return Verified(*last_tokens(token_ids, total_lens, seqlens_k, row_offsets, width))


def leading_run(passed: Tensor, row_offsets: Tensor) -> Tensor:
    """Counts the rows at the beginning of each sequence that passed.

    Args:
        passed: [R] bool.
        row_offsets: [S + 1] integers, first row of each sequence; a sequence may have no row.

    Returns:
        [S] int32.
    """
    offsets = row_offsets.long()
    lengths = offsets.diff()
    failures = torch.nn.functional.pad((~passed).long().cumsum(0), (1, 0))  # [R + 1] failures before each row
    owner = torch.repeat_interleave(lengths, output_size=passed.shape[0])
    intact = failures[1:] == failures[offsets[:-1]][owner]
    count = torch.nn.functional.pad(intact.long().cumsum(0), (1, 0))
    return (count[offsets[1:]] - count[offsets[:-1]]).int()


def drafts_that_stand(token_ids: Tensor, draft_ids: Tensor, faults: Tensor) -> Tensor:
    """Whether each row's draft is the token that the row emits; so it is in both kinds of verification.

    Args:
        token_ids: [R] int32 from `Sampler.sample`, forced tokens included.
        draft_ids: [R] int32, -1 where the row tests none.
        faults: [R] uint8; a faulty row has no token, so nothing stands behind it.

    Returns:
        [R] bool.
    """
    return (token_ids == draft_ids) & (draft_ids >= 0) & (faults == 0)


def ratio_verify(
    target: Tensor,
    draft: Tensor | None,
    draft_ids: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    draft_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tests drafts by the ratio of their probabilities and draws each row's token.

    All draws use streams of their own (`Domain.ACCEPT`, `RESIDUAL`, `FRESH`), independent of the one that the
    drafts were drawn from (`Domain.DRAFT`). What it does exactly is in `tilelang_ops.sampling.verify_ratio`.

    Args:
        target: [R, V] float32 scores that the target samples from, after all transforms; -inf = impossible.
        draft: [N, V] float32 scores that the drafts were really drawn from. A row without a finite sum (the
            drafter failed, and its token was no draw), or None for all, means that the draft was certain.
        draft_ids: [R] int32, -1 where the row tests none.
        seeds, token_index: [R] int64.
        draft_rows: [R] int64, each row's row of `draft`, any where there is no draft; None: its own number.

    Returns:
        passed [R] bool, and token_ids [R] int32: the draft where it passed, a token from the residual where
        it was refused, and a fresh one where there was none.
    """
    streams = Streams(int(Domain.ACCEPT), int(Domain.RESIDUAL), int(Domain.FRESH))
    arguments = target, draft, draft_rows, draft_ids, seeds, token_index, streams
    if target.device.type != "cpu":
        return verify_ratio(*arguments)
    return reference.run(*arguments, draw=gumbel_argmax)
