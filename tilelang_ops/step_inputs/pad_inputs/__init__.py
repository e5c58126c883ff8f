"""All small inputs of a step into buffers of fixed shapes."""

from tilelang_ops.step_inputs.pad_inputs.op import COLUMNS, pad_inputs

__all__ = ["COLUMNS", "pad_inputs"]
