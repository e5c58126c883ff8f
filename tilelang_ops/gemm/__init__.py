"""Matrix products of packed and plain weights, whose rows do not depend on the batch they stand in."""

from tilelang_ops.gemm.grouped_linear_mxfp4.op import grouped_linear_mxfp4
from tilelang_ops.gemm.grouped_swiglu_mxfp4.op import grouped_swiglu_mxfp4
from tilelang_ops.gemm.linear.op import linear
from tilelang_ops.gemm.linear_fp8.op import linear_fp8
from tilelang_ops.gemm.linear_w8a8.op import linear_w8a8

__all__ = ["grouped_linear_mxfp4", "grouped_swiglu_mxfp4", "linear", "linear_fp8", "linear_w8a8"]
