"""Two lists of records as one, over joined pools."""

from tilelang_ops.kv_index.concat_index.op import concat_index

__all__ = ["concat_index"]
