"""Choose the experts of every row and weigh them."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def route_topk(
    logits: Tensor,
    bias: Tensor,
    num_selected: int,
    scale: float,
    image_bias: Tensor | None = None,
    is_image: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts with the largest `score + bias`; the bias takes no part in their weights.

        score  = sqrt(softplus(logit))
        weight = score / (sum of the chosen scores + 1e-20) * scale

    Args:
        logits: [n, experts] float32.
        bias: [experts] float32.
        num_selected: experts of a row.
        scale: sum of a row's weights.
        image_bias: [experts] float32, in place of `bias` for rows of images; needed with `is_image` only.
        is_image: [n] bool, None when there is none.

    Returns:
        ids [n, num_selected] int32, best first, the lower id first among equals; weights [n, num_selected]
        float32 in the same order.
    """
    assert 0 < num_selected <= logits.shape[1] == bias.shape[0], (
        f"{num_selected=} {logits.shape=} {bias.shape=}"
    )
    assert is_image is None or image_bias is not None, "rows of images need their own bias"
    return backend(__package__, logits.device).run(logits, bias, num_selected, scale, image_bias, is_image)
