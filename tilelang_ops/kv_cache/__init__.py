"""Write and move cache records.

A pool is [parts, records, fields], strided, last dimension contiguous; record i of it is
`pool[i // records, i % records]`.
"""

from tilelang_ops.kv_cache.copy_records import copy_records
from tilelang_ops.kv_cache.store_index_keys import store_index_keys
from tilelang_ops.kv_cache.store_main import store_main
from tilelang_ops.kv_cache.store_window import store_window

__all__ = ["copy_records", "store_index_keys", "store_main", "store_window"]
