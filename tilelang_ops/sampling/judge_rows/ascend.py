"""judge_rows on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.sampling.judge_rows.cuda import run

__all__ = ["run"]
