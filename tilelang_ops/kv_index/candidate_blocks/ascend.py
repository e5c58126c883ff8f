"""candidate_blocks on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_index.candidate_blocks.cuda import run

__all__ = ["run"]
