"""Moving rows between tensors."""

from tilelang_ops.memory.gather_dequantize.op import gather_dequantize
from tilelang_ops.memory.gather_rows import gather_rows

__all__ = ["gather_dequantize", "gather_rows"]
