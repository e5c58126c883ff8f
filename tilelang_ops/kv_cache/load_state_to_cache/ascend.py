"""load_state_to_cache on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_cache.load_state_to_cache.cuda import run

__all__ = ["run"]
