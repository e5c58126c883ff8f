"""Moving rows between tensors."""

from tilelang_ops.memory.gather_columns.op import gather_columns
from tilelang_ops.memory.gather_dequantize.op import gather_dequantize
from tilelang_ops.memory.gather_rows import gather_rows

__all__ = ["gather_columns", "gather_dequantize", "gather_rows"]
