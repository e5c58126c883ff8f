"""draft_rows on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.step_inputs.draft_rows.cuda import run

__all__ = ["run"]
