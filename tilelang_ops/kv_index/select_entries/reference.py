import torch
import torch.nn.functional as F
from torch import Tensor

from tilelang_ops.kv_index.select_entries.op import entries_of

LAST = 0x7FFFFFFF  # larger than any column; sorts behind them


def run(scores: Tensor, k: int, blocks: Tensor | None = None, block_size: int = 0) -> Tensor:
    width = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0: equal scores must have equal bits
    order = bits ^ ((bits >> 31) & LAST)  # ascending as integers
    column = torch.arange(width, device=scores.device)
    keys = (order.long() << 32) | (LAST - column)  # distinct: a tie is won by the lower column
    best = keys.topk(min(k, width), dim=1, sorted=False).values
    chosen = torch.where((best >> 32) > _order_of_minus_inf(), LAST - (best & LAST), LAST)
    chosen = chosen.sort(dim=1).values
    chosen = F.pad(torch.where(chosen == LAST, -1, chosen).int(), (0, k - chosen.shape[1]), value=-1)
    return entries_of(chosen, blocks, block_size)


def _order_of_minus_inf() -> int:
    return -0x7F800001  # 0xFF800000 with the magnitude's bits flipped, as a signed number
