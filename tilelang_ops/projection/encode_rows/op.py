"""Norm, rotation, quantisation and store of row vectors in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend

# name -> channels of a group, bytes of its codes, bytes of its scales
FORMATS = {"fp8": (32, 32, 1), "mxfp4": (32, 16, 1), "fp4": (16, 8, 1)}


@dataclass(frozen=True)
class Norm:
    """`rms_norm` of the vectors.

    Attributes:
        weight: [width] float32.
        eps: added to the mean of squares.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Rotation:
    """`rotate` of the vectors' last channels.

    Attributes:
        cos, sin: [n, m] float32, one row for all vectors of a row of x.
        inverse: turn back.
    """

    cos: Tensor
    sin: Tensor
    inverse: bool = False


@dataclass(frozen=True)
class Records:
    """Where codes and scales go: fields of pools, strided.

    Attributes:
        codes: uint8 [parts, records, bytes], or float32 [parts, records, width] to store vectors as they are.
        scales: uint8 [parts, records, scales]; None when they stand behind the codes in the same record.
        index: [vectors] int64 record numbers, part * records + place; -1 writes nothing. No two are equal.
    """

    codes: Tensor
    scales: Tensor | None
    index: Tensor


@dataclass(frozen=True)
class EncodedRows:
    """What `encode_rows` made.

    Attributes:
        codes: [..., bytes of codes] uint8, and
        scales: [..., scales] uint8; None when they went to records.
        normed: the vectors behind the norm and before the rotation, if kept.
    """

    codes: Tensor | None
    scales: Tensor | None
    normed: Tensor | None


def encode_rows(
    x: Tensor,
    format: str,
    *,
    norm: Norm | None = None,
    rotation: Rotation | None = None,
    records: Records | None = None,
    keeps_normed: bool = False,
) -> EncodedRows:
    """A fusion: `rms_norm`, `rotate`, an encoding of `numerics`, a store; all but the encoding may be absent.

    The vectors are rounded to the dtype of x behind the norm and behind the rotation. Without records the
    result is contiguous.

    Args:
        x: [n, ..., width] float32 or bfloat16, width a multiple of 32; contiguous, or [n, width] columns of
            contiguous rows; not changed.
        format: "fp8", "mxfp4" or "fp4".
        norm, rotation, records: see there; None leaves the step out.
        keeps_normed: hand out the normed vectors as well.
    """
    width = x.shape[-1]
    is_slice = x.dim() == 2 and x.stride(1) == 1
    assert (x.is_contiguous() or is_slice) and width % 32 == 0, f"{x.shape=} {x.stride()=}"
    assert norm is None or (norm.weight.shape == (width,) and norm.weight.is_contiguous()), f"{x.shape=}"
    assert norm is not None or not keeps_normed, "there is no norm"
    if rotation is not None:
        cos, sin = rotation.cos, rotation.sin
        assert cos.shape == sin.shape and cos.shape[0] == x.shape[0], f"{x.shape=} {cos.shape=} {sin.shape=}"
        assert 2 * cos.shape[1] <= width and cos.shape[1] % 4 == 0, f"{x.shape=} {cos.shape=}"
    if records is not None:
        assert records.index.shape == (x.numel() // width,), f"{x.shape=} {records.index.shape=}"
        assert records.codes.shape[2] == record_bytes(width, format, records), f"{records.codes.shape=}"
    if x.numel() == 0:
        codes = scales = None
        if records is None:
            group, code_bytes, _ = FORMATS[format]
            codes = x.new_empty(*x.shape[:-1], width // group * code_bytes, dtype=torch.uint8)
            scales = x.new_empty(*x.shape[:-1], width // group, dtype=torch.uint8)
        return EncodedRows(codes, scales, torch.empty_like(x) if keeps_normed else None)
    return backend(__package__, x.device).run(x, format, norm, rotation, records, keeps_normed)


def record_bytes(width: int, format: str, records: Records) -> int:
    """Last dimension of `records.codes`."""
    if records.codes.dtype == torch.float32:
        return width
    group, code_bytes, _ = FORMATS[format]
    return width // group * (code_bytes if records.scales is not None else code_bytes + 1)
