"""select_state_slice on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_cache.select_state_slice.cuda import run

__all__ = ["run"]
