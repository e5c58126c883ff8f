import torch
from torch import Tensor


def run(rings: Tensor, end: int, window: int) -> Tensor:
    positions = torch.arange(end - window, end, device=rings.device)
    records = rings.index_select(1, positions % rings.shape[1])
    return records.masked_fill_((positions < 0)[:, None], 0)
