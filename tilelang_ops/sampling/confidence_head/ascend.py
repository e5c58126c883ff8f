"""confidence_head on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.confidence_head.cuda import run

__all__ = ["run"]
