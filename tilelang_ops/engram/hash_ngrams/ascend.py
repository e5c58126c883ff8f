"""hash_ngrams on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.engram.hash_ngrams.cuda import run

__all__ = ["run"]
