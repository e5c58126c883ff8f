"""Engram: rows of a table chosen by a hash of the last tokens, gated into the residual streams."""

from tilelang_ops.engram.gate_streams.op import gate_streams
from tilelang_ops.engram.hash_ngrams.op import hash_ngrams

__all__ = ["gate_streams", "hash_ngrams"]
