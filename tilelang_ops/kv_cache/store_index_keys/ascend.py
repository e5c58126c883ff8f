"""store_index_keys on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_cache.store_index_keys.cuda import run

__all__ = ["run"]
