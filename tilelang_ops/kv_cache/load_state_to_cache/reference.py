import torch
from torch import Tensor


def run(state: Tensor, rings: Tensor, end: int) -> None:
    window = state.shape[1]
    positions = torch.arange(max(0, end - window), end, device=rings.device)
    rings[:, positions % rings.shape[1]] = state[:, window - positions.shape[0] :]
