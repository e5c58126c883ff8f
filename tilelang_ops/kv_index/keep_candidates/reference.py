import torch
from torch import Tensor


def run(scores: Tensor, blocks: Tensor, block_size: int) -> None:
    num_rows, width = scores.shape
    num_blocks = -(-width // block_size)
    outside = torch.ones(num_rows, num_blocks + 1, dtype=torch.bool, device=scores.device)
    outside.scatter_(1, torch.where(blocks < 0, num_blocks, blocks).long(), False)  # the last column is a bin
    scores.masked_fill_(outside[:, :num_blocks].repeat_interleave(block_size, dim=1)[:, :width], -torch.inf)
