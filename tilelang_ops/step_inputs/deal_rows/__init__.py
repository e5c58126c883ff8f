"""Rows of a step dealt to its sequences anew."""

from tilelang_ops.step_inputs.deal_rows.op import DealtRows, deal_rows

__all__ = ["DealtRows", "deal_rows"]
