"""Everything between two sublayers but the mixes: one pass over the residual streams."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.moe.combine_slots.op import SlotOutputs

ENCODINGS = ("", "codes", "rounded", "units")


@dataclass(frozen=True)
class Advanced:
    """The streams behind a sublayer, and the next sublayer's input.

    Attributes:
        streams: [n, m, width] and
        mean_square: [n] float32 as `advance_streams` makes them.
        values: [n, width] the normalised collapsed vector, if kept.
        codes: [n, width] and
        scales: [n, width / 32] uint8, `values` as FP8, if asked for.
        rounded: [n, width] what these mean, in the dtype of the streams, if asked for.
        units: what `rounded` becomes for products in FP8, if asked for.
    """

    streams: Tensor
    mean_square: Tensor
    values: Tensor | None
    codes: Tensor | None
    scales: Tensor | None
    rounded: Tensor | None = None
    units: RowCodes | None = None


def advance_norm(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    output: Tensor | SlotOutputs | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    *,
    keeps_values: bool = True,
    encoding: str = "",
) -> Advanced:
    """A fusion: `advance_streams`, then `rms_norm` of the collapsed vector, then FP8.

    Args:
        streams: [n, m, width]; it, pre, output, post and comb are as in `advance_streams`.
        output: also what `combine_slots` would add up to it.
        weight, eps: as in `rms_norm`.
        keeps_values: hand out the normalised vector.
        encoding: how to hand it out encoded: "codes" with scales, "rounded", "units", for these the width is
            a multiple of 128, or "" for none; then it must be kept.
    """
    assert streams.is_contiguous() and pre.shape == streams.shape[:2], f"{streams.shape=} {pre.shape=}"
    assert weight.shape == streams.shape[2:] and weight.is_contiguous(), f"{streams.shape=} {weight.shape=}"
    assert encoding in ENCODINGS, f"{encoding=} is none of {ENCODINGS}"
    assert keeps_values or encoding, "nothing to hand out"
    assert not encoding or streams.shape[2] % 32 == 0, f"{streams.shape=}"
    return backend(__package__, streams.device).run(
        streams, pre, weight, eps, output, post, comb, keeps_values, encoding
    )
