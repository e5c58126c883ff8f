import torch
from torch import Tensor


def run(num_visible: Tensor, k: int) -> Tensor:
    entry = torch.arange(k, dtype=torch.int32, device=num_visible.device)
    return torch.where(entry < num_visible[:, None], entry, -1)
