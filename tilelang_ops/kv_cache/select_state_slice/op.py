"""Take the last positions out of a slot's rings, in order."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def select_state_slice(rings: Tensor, end: int, window: int) -> Tensor:
    """Records of positions `end - window ... end - 1` of every ring; position p lies at `p % ring`.

    What comes out does not depend on the length of the rings, so it outlives a change of theirs.

    Args:
        rings: [layers, ring, fields] uint8 or float32, of one state slot; a layer's records are contiguous.
        end: first position that is left out.
        window: at most the ring's records.

    Returns:
        [layers, window, fields]; zeros where a position is negative.
    """
    assert rings.stride(2) == 1 and rings.stride(1) == rings.shape[2], f"{rings.stride()=}"
    assert 0 < window <= rings.shape[1] and end >= 0, f"{window=} {end=} {rings.shape=}"
    return backend(__package__, rings.device).run(rings, end, window)
