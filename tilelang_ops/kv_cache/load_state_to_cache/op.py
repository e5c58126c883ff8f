"""Put what `select_state_slice` took back into a slot's rings."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def load_state_to_cache(state: Tensor, rings: Tensor, end: int) -> None:
    """Write records of positions `end - window ... end - 1` to rings; negative positions are left out.

    Args:
        state: [layers, window, fields], contiguous, of the rings' dtype.
        rings: [layers, ring, fields], of one state slot; a layer's records are contiguous.
        end: first position behind the state.
    """
    layers, window, fields = state.shape
    assert (layers, fields) == (rings.shape[0], rings.shape[2]), f"{state.shape=} {rings.shape=}"
    assert rings.stride(2) == 1 and rings.stride(1) == fields, f"{rings.stride()=}"
    assert 0 < window <= rings.shape[1] and end >= 0 and state.is_contiguous(), f"{window=} {end=}"
    backend(__package__, rings.device).run(state, rings, end)
