"""apply_penalties on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.apply_penalties.cuda import run

__all__ = ["run"]
