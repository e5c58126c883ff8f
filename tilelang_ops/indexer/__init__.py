"""The indexer: scores of index queries against the compressed keys of their sequence."""

from tilelang_ops.indexer.index_scores import index_scores

__all__ = ["index_scores"]
