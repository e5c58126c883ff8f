"""Mixture of experts: which experts a row goes through, and what lies around their products."""

from tilelang_ops.moe.combine_slots import SlotOutputs, combine_slots
from tilelang_ops.moe.gather_grouped import GroupedInputs, gather_grouped
from tilelang_ops.moe.gather_slots.op import gather_slots
from tilelang_ops.moe.group_rows import GroupedRows, group_rows
from tilelang_ops.moe.route_topk.op import route_topk
from tilelang_ops.moe.swiglu.op import swiglu
from tilelang_ops.moe.swiglu_quantize import swiglu_quantize

__all__ = [
    "GroupedInputs",
    "GroupedRows",
    "SlotOutputs",
    "combine_slots",
    "gather_grouped",
    "gather_slots",
    "group_rows",
    "route_topk",
    "swiglu",
    "swiglu_quantize",
]
