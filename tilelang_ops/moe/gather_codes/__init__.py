"""Sort the rows of the experts' products in FP8 by expert, and gather their codes."""

from tilelang_ops.moe.gather_codes.op import GroupedCodes, gather_codes

__all__ = ["GroupedCodes", "gather_codes"]
