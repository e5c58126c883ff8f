import torch
import torch.nn.functional as F
from torch import Tensor

from tilelang_ops.kv_index.select_entries import select_entries


def run(scores: Tensor, num_visible: Tensor, block_size: int, k: int) -> Tensor:
    padded = F.pad(scores, (0, -scores.shape[1] % block_size), value=-torch.inf)
    block_scores = padded.unflatten(1, (-1, block_size)).amax(-1)
    block = torch.arange(block_scores.shape[1], device=scores.device)
    last = torch.where(num_visible > 0, (num_visible - 1) // block_size, -1)
    return select_entries(block_scores.masked_fill(block == last[:, None], torch.inf), k)
