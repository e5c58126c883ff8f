"""Scores of index queries against the index keys of their own sequence, read from the paged pool."""

from tilelang_ops.indexer.index_scores.op import index_scores

__all__ = ["index_scores"]
