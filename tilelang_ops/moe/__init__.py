"""Mixture of experts: which experts a row goes through, and the activation between their products."""

from tilelang_ops.moe.route_topk.op import route_topk
from tilelang_ops.moe.swiglu.op import swiglu

__all__ = ["route_topk", "swiglu"]
