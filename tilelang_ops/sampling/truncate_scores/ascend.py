"""truncate_scores on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.truncate_scores.cuda import run

__all__ = ["run"]
