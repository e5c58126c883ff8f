"""The indexer: scores of index queries against the compressed keys of their sequence."""

from tilelang_ops.indexer.candidate_scores import candidate_scores
from tilelang_ops.indexer.index_scores import index_scores

__all__ = ["candidate_scores", "index_scores"]
