"""Write, move and read cache records.

A pool is [parts, records, fields], strided, last dimension contiguous; record i of it is
`pool[i // records, i % records]`.
"""

from tilelang_ops.kv_cache.copy_records import copy_records
from tilelang_ops.kv_cache.copy_rows import copy_rows
from tilelang_ops.kv_cache.load_index_keys import load_index_keys
from tilelang_ops.kv_cache.load_records import load_records
from tilelang_ops.kv_cache.load_state_to_cache import load_state_to_cache
from tilelang_ops.kv_cache.select_state_slice import select_state_slice
from tilelang_ops.kv_cache.store_index_keys import store_index_keys
from tilelang_ops.kv_cache.store_main import store_main
from tilelang_ops.kv_cache.store_window import store_window

__all__ = [
    "copy_records",
    "copy_rows",
    "load_index_keys",
    "load_records",
    "load_state_to_cache",
    "select_state_slice",
    "store_index_keys",
    "store_main",
    "store_window",
]
