"""finish_drafts on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.finish_drafts.cuda import run

__all__ = ["run"]
