from torch import Tensor

from tilelang_ops.common.formulas import ring_slot


def run(state_slots: Tensor, positions: Tensor, ring: int) -> Tensor:
    return ring_slot(state_slots.long(), positions, ring)
