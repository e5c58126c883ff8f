"""Everything that a decode step derives from lengths."""

from tilelang_ops.kv_index.decode_metadata.op import DecodeMetadata, decode_metadata

__all__ = ["DecodeMetadata", "decode_metadata"]
