"""Normalisation of activations."""

from tilelang_ops.norm.norm_quantize import Normed, norm_quantize
from tilelang_ops.norm.rms_norm import rms_norm

__all__ = ["Normed", "norm_quantize", "rms_norm"]
