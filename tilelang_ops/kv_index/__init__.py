"""Lists of the keys that a query reads: window records, selected entries, candidate blocks."""

from tilelang_ops.kv_index.candidate_blocks import candidate_blocks
from tilelang_ops.kv_index.concat_index import concat_index
from tilelang_ops.kv_index.decode_metadata import DecodeMetadata, decode_metadata
from tilelang_ops.kv_index.entry_slots import entry_slots
from tilelang_ops.kv_index.prefill_metadata import PrefillMetadata, prefill_metadata
from tilelang_ops.kv_index.range_index import paged_range_index, ring_range_index
from tilelang_ops.kv_index.ring_index import ring_index
from tilelang_ops.kv_index.select_entries import select_entries
from tilelang_ops.kv_index.visible_entries import visible_entries
from tilelang_ops.kv_index.window_index import window_index

__all__ = [
    "DecodeMetadata",
    "PrefillMetadata",
    "candidate_blocks",
    "concat_index",
    "decode_metadata",
    "entry_slots",
    "paged_range_index",
    "prefill_metadata",
    "ring_index",
    "ring_range_index",
    "select_entries",
    "visible_entries",
    "window_index",
]
