"""The inputs of the experts: rows and their routing weights in the order of the experts."""

from tilelang_ops.moe.gather_slots.op import gather_slots

__all__ = ["gather_slots"]
