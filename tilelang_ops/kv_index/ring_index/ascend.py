"""ring_index on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_index.ring_index.cuda import run

__all__ = ["run"]
