"""Work on rows of logits."""

from tilelang_ops.sampling.apply_token_bitmask.op import apply_token_bitmask

__all__ = ["apply_token_bitmask"]
