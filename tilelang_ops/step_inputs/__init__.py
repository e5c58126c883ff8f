"""Inputs of a decode step that only the device knows: what the step before left, and the drafter's block."""

from tilelang_ops.step_inputs.correct_rows import CorrectedRows, correct_rows
from tilelang_ops.step_inputs.deal_rows import DealtRows, deal_rows
from tilelang_ops.step_inputs.draft_inputs import DraftInputs, draft_inputs
from tilelang_ops.step_inputs.draft_rows.op import DraftRows, draft_rows
from tilelang_ops.step_inputs.pad_inputs import pad_inputs

__all__ = [
    "CorrectedRows",
    "DealtRows",
    "DraftInputs",
    "DraftRows",
    "correct_rows",
    "deal_rows",
    "draft_inputs",
    "draft_rows",
    "pad_inputs",
]
