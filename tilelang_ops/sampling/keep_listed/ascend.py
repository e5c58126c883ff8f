"""keep_listed on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.keep_listed.cuda import run

__all__ = ["run"]
