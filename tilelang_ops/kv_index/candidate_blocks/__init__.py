"""Candidate blocks of each row."""

from tilelang_ops.kv_index.candidate_blocks.op import candidate_blocks

__all__ = ["candidate_blocks"]
