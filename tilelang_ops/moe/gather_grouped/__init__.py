"""Sort the rows of a grouped product by expert, and gather its inputs."""

from tilelang_ops.moe.gather_grouped.op import GroupedInputs, gather_grouped

__all__ = ["GroupedInputs", "gather_grouped"]
