"""verify_ratio on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.verify_ratio.cuda import run

__all__ = ["run"]
