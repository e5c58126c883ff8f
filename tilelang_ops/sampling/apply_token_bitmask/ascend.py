"""apply_token_bitmask on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.apply_token_bitmask.cuda import run

__all__ = ["run"]
