import torch
from torch import Tensor

from tilelang_ops.common.formulas import ring_slot
from tilelang_ops.kv_index.window_index import reference as window_index


def run(
    anchors: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    block_size: int,
    window: int,
    ring: int,
    noise_token_id: int,
) -> tuple[Tensor, ...]:
    slots = state_slots.long()
    place = torch.arange(block_size, dtype=torch.int32, device=positions.device)
    block_positions = positions[:, None] + place
    records = ring_slot(slots[:, None], block_positions, ring)
    ends = positions.long() + (block_size - 1)
    index = window_index.run(ends, slots * ring, window + block_size, ring)
    input_ids = anchors.new_full((block_size, anchors.shape[0]), noise_token_id)
    input_ids[0] = anchors
    return (
        input_ids.flatten(),
        block_positions.t().flatten(),
        records.t().flatten(),
        index.repeat(block_size, 1),
    )
