"""gather_logprobs on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.gather_logprobs.cuda import run

__all__ = ["run"]
