"""Inputs of the drafter's block."""

from tilelang_ops.step_inputs.draft_inputs.op import DraftInputs, draft_inputs

__all__ = ["DraftInputs", "draft_inputs"]
