"""last_tokens on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.last_tokens.cuda import run

__all__ = ["run"]
