"""keep_candidates on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_index.keep_candidates.cuda import run

__all__ = ["run"]
