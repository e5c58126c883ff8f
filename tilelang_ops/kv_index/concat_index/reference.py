import torch
from torch import Tensor


def run(window: Tensor, selected: Tensor, window_offset: int, selected_offset: int) -> Tensor:
    parts = (window, window_offset), (selected, selected_offset)
    return torch.cat([torch.where(index < 0, -1, index + offset) for index, offset in parts], 1)
