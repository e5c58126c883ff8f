"""store_main on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_cache.store_main.cuda import run

__all__ = ["run"]
