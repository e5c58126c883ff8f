"""The product of the residual streams with a site's matrix, and the three mixes that it gives."""

from tilelang_ops.hyper_connection.project_mix.op import project_mix

__all__ = ["project_mix"]
