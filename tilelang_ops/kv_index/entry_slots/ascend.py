"""entry_slots on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_index.entry_slots.cuda import run

__all__ = ["run"]
