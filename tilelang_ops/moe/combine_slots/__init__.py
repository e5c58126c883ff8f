"""Add the outputs of a row's experts."""

from tilelang_ops.moe.combine_slots.op import SlotOutputs, combine_slots

__all__ = ["SlotOutputs", "combine_slots"]
