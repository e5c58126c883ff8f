"""How many drafts each sequence verifies, when the total of a step is fixed."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def redistribute(
    num_rows: int,
    sources: Tensor,
    survivals: Tensor,
    limits: Tensor | None = None,
    confidence_odds: Tensor | None = None,
) -> Tensor:
    """Query rows of each sequence.

    Every sequence gets one row; the others go to the largest survivals, ties to the lower flat index
    (sequence, position). A sequence's survivals never increase with the position, so each gets a prefix of
    its drafts. Sequences without a source count as survival 0; with limits they keep theirs, for the host
    has planned them exactly.

    Args:
        num_rows: query rows of the step.
        sources: [S] int32 row of each sequence in `survivals`, -1 for none.
        survivals: [P, k] float32 probability that the drafts up to each one stand.
        limits: [S] int32 most rows of each sequence, k + 1 when None.
        confidence_odds: [k] float32; when given, `survivals` are confidences of single drafts. Their odds are
            multiplied by these, 0 staying 0, and survivals are the products up to each draft.

    Returns:
        [S] int32.
    """
    assert sources.dim() == 1 and survivals.dim() == 2, f"{sources.shape=} {survivals.shape=}"
    assert num_rows >= sources.shape[0], f"{num_rows=} {sources.shape=}"
    return backend(__package__, sources.device).run(num_rows, sources, survivals, limits, confidence_odds)
