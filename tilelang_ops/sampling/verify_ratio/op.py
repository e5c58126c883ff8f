"""Test drafts by the ratio of their probabilities, and draw each row's token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


@dataclass(frozen=True)
class Streams:
    """Noise streams, independent of each other and of the one that the drafts were drawn from."""

    accept: int  # the coin
    residual: int  # the token after a refused draft
    fresh: int  # the token of a row without a draft


def verify_ratio(
    target: Tensor,
    draft: Tensor | None,
    draft_rows: Tensor | None,
    draft_ids: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    streams: Streams,
) -> tuple[Tensor, Tensor]:
    """A draft x passes with probability min(1, p(x) / q(x)); a refused one is replaced from max(p - q, 0).

    With M(v) = `exp_mass` of `truncate_scores`' reference, an integer, of a score's distance from the row's
    largest, p(v) is the float64 quotient of M(v) and the sum of M over the target's row, and q likewise of
    the draft's. x passes where q(x) > 0 and p(x) > u q(x), with a coin u in (0, 1) from the accept stream.
    Another token is that of `draw_tokens`, for scores log(p(v) - q(v)) where p(v) > q(v); for the target's
    own scores where no v has that, or where the row has no draft. Every step is rounded once, so results are
    equal on every device.

    Args:
        target: [R, V] float32 scores of p, finite or -inf.
        draft: [N, V] float32 scores that drafts were drawn from. A row of other than finite sum, or None for
            all, means that its draft was certain: q(x) = 1.
        draft_rows: [R] int64, the draft's row of each target row; any number in range where there is no
            draft. None stands for 0, 1, ... R - 1.
        draft_ids: [R] int32, -1 where the row tests none.
        seeds, token_index: [R] int64.
        streams: of noise.

    Returns:
        passed [R] bool, and token_ids [R] int32: the draft where it passed, the drawn token elsewhere; 0 for
        a target row without a possible token, or with NaN or +inf in it.
    """
    num_rows = target.shape[0]
    assert target.dtype == torch.float32, f"{target.dtype=}"
    assert draft_ids.shape == (num_rows,) and draft_ids.dtype == torch.int32, f"{draft_ids.shape=}"
    for name, tensor in (("seeds", seeds), ("token_index", token_index), ("draft_rows", draft_rows)):
        if tensor is not None:
            assert tensor.shape == (num_rows,) and tensor.dtype == torch.int64, f"{name}: {tensor.shape}"
    if draft is not None:
        assert draft.dtype == torch.float32 and draft.shape[1] == target.shape[1], f"{draft.shape=}"
        assert draft_rows is not None or draft.shape == target.shape, f"{draft.shape=} {target.shape=}"
    if num_rows == 0:
        return draft_ids.new_empty(0, dtype=torch.bool), draft_ids.new_empty(0)
    run = backend(__package__, target.device).run
    return run(target, draft, draft_rows, draft_ids, seeds, token_index, streams)
