"""Everything that a prefill step derives from positions."""

from tilelang_ops.kv_index.prefill_metadata.op import PrefillMetadata, prefill_metadata

__all__ = ["PrefillMetadata", "prefill_metadata"]
