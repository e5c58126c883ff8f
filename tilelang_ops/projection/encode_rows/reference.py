"""Torch meaning of `encode_rows`: what it fuses, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import encode_fp4, encode_fp8, encode_mxfp4
from tilelang_ops.common.records import flat_rows, row_numbers
from tilelang_ops.norm.rms_norm import reference as rms_norm
from tilelang_ops.projection.encode_rows.op import EncodedRows, Norm, Records, Rotation
from tilelang_ops.projection.rotate import reference as rotate

ENCODE = {"fp8": encode_fp8, "mxfp4": encode_mxfp4, "fp4": encode_fp4}


def run(
    x: Tensor,
    format: str,
    norm: Norm | None,
    rotation: Rotation | None,
    records: Records | None,
    keeps_normed: bool,
) -> EncodedRows:
    if norm is not None:
        x = rms_norm.run(x, norm.weight, norm.eps)
    normed = x if keeps_normed else None
    if rotation is not None:
        x = x.clone()
        rotate.run(x, rotation.cos, rotation.sin, rotation.inverse)
    if records is None:
        return EncodedRows(*ENCODE[format](x), normed)
    vectors = x.flatten(0, -2)
    chosen = (records.index >= 0).nonzero().squeeze(1)
    vectors, index = vectors.index_select(0, chosen), records.index.index_select(0, chosen)
    if records.codes.dtype == torch.float32:
        _store(records.codes, index, vectors.float())
        return EncodedRows(None, None, normed)
    codes, scales = ENCODE[format](vectors)
    if records.scales is None:
        _store(records.codes, index, torch.cat([codes, scales], dim=1))
    else:
        _store(records.codes, index, codes)
        _store(records.scales, index, scales)
    return EncodedRows(None, None, normed)


def _store(pool: Tensor, index: Tensor, fields: Tensor) -> None:
    flat_rows(pool).index_copy_(0, row_numbers(pool, index), fields)
