"""select_entries on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_index.select_entries.cuda import run

__all__ = ["run"]
