"""Residual streams: mix them into a sublayer's input, and its output back into them."""

from tilelang_ops.hyper_connection.advance_norm import Advanced, advance_norm
from tilelang_ops.hyper_connection.advance_streams.op import advance_streams
from tilelang_ops.hyper_connection.collapse_streams.op import collapse_streams
from tilelang_ops.hyper_connection.expand_streams.op import expand_streams
from tilelang_ops.hyper_connection.mean_streams.op import mean_streams
from tilelang_ops.hyper_connection.mix_coefficients.op import mix_coefficients
from tilelang_ops.hyper_connection.project_mix.op import project_mix
from tilelang_ops.hyper_connection.start_streams.op import start_streams

__all__ = [
    "Advanced",
    "advance_norm",
    "advance_streams",
    "collapse_streams",
    "expand_streams",
    "mean_streams",
    "mix_coefficients",
    "project_mix",
    "start_streams",
]
