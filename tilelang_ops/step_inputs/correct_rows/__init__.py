"""Rows of a step that was planned one step behind."""

from tilelang_ops.step_inputs.correct_rows.op import CorrectedRows, correct_rows

__all__ = ["CorrectedRows", "correct_rows"]
