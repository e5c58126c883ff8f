import torch
from torch import Tensor

from tilelang_ops.common.formulas import entry_block, entry_slot


def run(entries: Tensor, row_seq: Tensor, block_tables: Tensor, entries_per_block: int) -> Tensor:
    entry = entries.clamp(min=0)
    tables = block_tables.index_select(0, row_seq)
    block = tables.gather(1, entry_block(entry, entries_per_block).long())
    return torch.where(entries < 0, -1, entry_slot(block, entry, entries_per_block)).int()
