"""Add the outputs of a row's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


@dataclass(frozen=True)
class SlotOutputs:
    """Outputs that nobody has added yet, in the dtype of their sum.

    Attributes:
        outputs: [places, width],
        places: [n, k] int32 and
        shared: [n, width] as in `combine_slots`; the outputs carry their weights.
    """

    outputs: Tensor
    places: Tensor
    shared: Tensor

    def combined(self) -> Tensor:
        """[n, width] their sum."""
        return combine_slots(self.outputs, self.places, None, self.shared)


def combine_slots(
    outputs: Tensor,
    places: Tensor,
    weights: Tensor | None = None,
    shared: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sum over slots of weight * outputs[place]`, plus `shared`; in float32, slots in order, rounded once.

    Args:
        outputs: [places, width] float32 or bfloat16, the experts' outputs where `group_rows` put them.
        places: [n, k] int32 the place of every slot; -1 adds nothing.
        weights: [n, k] float32, or None where the outputs carry them.
        shared: [n, width] the shared expert's output, the dtype of `outputs`; None adds nothing.
        dtype: of the result; None for that of `outputs`.

    Returns:
        [n, width] `dtype`.
    """
    num_rows, width = places.shape[0], outputs.shape[1]
    assert outputs.is_contiguous(), f"{outputs.stride()=}"
    assert weights is None or weights.shape == places.shape, f"{weights.shape=} {places.shape=}"
    assert shared is None or (shared.shape == (num_rows, width) and shared.dtype == outputs.dtype), (
        f"{shared.shape=} {shared.dtype=}"
    )
    dtype = dtype or outputs.dtype
    if num_rows == 0:
        return torch.empty(0, width, dtype=dtype, device=outputs.device)
    return backend(__package__, outputs.device).run(outputs, places, weights, shared, dtype)
