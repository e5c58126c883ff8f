"""route_topk on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.moe.route_topk.cuda import run

__all__ = ["run"]
