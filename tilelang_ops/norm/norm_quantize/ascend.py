"""norm_quantize on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.norm.norm_quantize.cuda import run

__all__ = ["run"]
