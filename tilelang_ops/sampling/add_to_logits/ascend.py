"""add_to_logits on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.add_to_logits.cuda import run

__all__ = ["run"]
