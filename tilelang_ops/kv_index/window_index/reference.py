import torch
from torch import Tensor


def run(positions: Tensor, base: Tensor, window: int, ring: int) -> Tensor:
    place = torch.arange(1 - window, 1, device=positions.device)
    position = positions[:, None] + place
    record = base[:, None] + (position % ring if ring else position)
    return torch.where(position < 0, -1, record).int()
