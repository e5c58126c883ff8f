"""Moving rows between tensors."""

from tilelang_ops.memory.gather_dequantize.op import gather_dequantize

__all__ = ["gather_dequantize"]
