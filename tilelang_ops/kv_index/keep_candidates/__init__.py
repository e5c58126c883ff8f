"""Hide entries outside the candidate blocks."""

from tilelang_ops.kv_index.keep_candidates.op import keep_candidates

__all__ = ["keep_candidates"]
