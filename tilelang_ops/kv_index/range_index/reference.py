import torch
from torch import Tensor

from tilelang_ops.common.formulas import entry_block, entry_slot, ring_slot


def run(
    cu_lens: Tensor, firsts: Tensor, tables: Tensor, total: int, part_size: int, is_paged: bool
) -> Tensor:
    place = torch.arange(total, device=cu_lens.device)
    seq = torch.searchsorted(cu_lens[1:].long(), place, right=True).clamp(max=firsts.shape[0] - 1)
    item = firsts[seq].long() + place - cu_lens[seq]
    is_listed = (place < cu_lens[-1]) & (item >= 0)
    item = item.masked_fill(~is_listed, 0)
    if is_paged:
        record = entry_slot(tables[seq, entry_block(item, part_size)].long(), item, part_size)
    else:
        record = ring_slot(tables[seq, 0].long(), item, part_size)
    return torch.where(is_listed, record, -1)
