"""redistribute on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.speculative.redistribute.cuda import run

__all__ = ["run"]
