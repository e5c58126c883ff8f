"""mix_coefficients on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.hyper_connection.mix_coefficients.cuda import run

__all__ = ["run"]
