"""Scores of index queries against the entries of their candidate blocks."""

from tilelang_ops.indexer.candidate_scores.op import candidate_scores

__all__ = ["candidate_scores"]
