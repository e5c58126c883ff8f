"""decode_metadata on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_index.decode_metadata.cuda import run

__all__ = ["run"]
