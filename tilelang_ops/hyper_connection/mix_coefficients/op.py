"""From the projection of the residual streams to the three mixes of a sublayer."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def mix_coefficients(
    projection: Tensor,
    mean_square: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    num_streams: int,
    num_rounds: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, scale and shift the projection, then squash its three parts.

        z    = projection / sqrt(mean_square + norm_eps) * scale + base
        pre  = sigmoid(z[:m]) + eps
        post = 2 * sigmoid(z[m:2m])
        comb = z[2m:] as [m, m]: softmax of each row, plus eps, then Sinkhorn: columns divided by their sum,
               and `num_rounds - 1` times rows, then columns, divided by theirs; eps joins every sum

    A row's result depends on that row alone, bit for bit.

    Args:
        projection: [n, (2 + m) * m] float32, the streams times the site's matrix.
        mean_square: [n] float32, mean over all streams of a row.
        scale, base: [(2 + m) * m] float32; a checkpoint has one scale for each of pre, post and comb.
        num_streams: m.
        num_rounds: Sinkhorn rounds, at least 1.
        eps: the small number of pre and comb.
        norm_eps: added to the mean square.

    Returns:
        pre [n, m], post [n, m], comb [n, m, m], float32; the first index of comb is the old stream.
    """
    width = (2 + num_streams) * num_streams
    assert projection.shape[1:] == (width,) and scale.shape == base.shape == (width,), (
        f"{projection.shape=} {scale.shape=} {base.shape=}"
    )
    assert num_rounds >= 1, f"{num_rounds=}"
    return backend(__package__, projection.device).run(
        projection, mean_square, scale, base, num_streams, num_rounds, eps, norm_eps
    )
