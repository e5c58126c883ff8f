"""sum_smaller_probs on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.sum_smaller_probs.cuda import run

__all__ = ["run"]
