"""CPU kernels of operators that treat every row alone, in the place of their torch references.

Each `run` has the signature of the reference it stands for and the same meaning; `register` puts them all in
the operators' dispatch. A row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16
from deepinfer.ops.norm import rms_norm
from tilelang_ops.common.dispatch import register as register_backend
from tilelang_ops.kv_cache.store_index_keys import reference as store_index_keys_reference
from tilelang_ops.kv_cache.store_main import reference as store_main_reference
from tilelang_ops.kv_cache.store_window import reference as store_window_reference
from tilelang_ops.moe.swiglu import reference as swiglu_reference
from tilelang_ops.projection.encode_rows import EncodedRows, Norm, Records, Rotation
from tilelang_ops.projection.encode_rows import reference as encode_rows_reference

FP8, FP4, MXFP4 = 0, 1, 2  # encodings of `store_records`


def register() -> None:
    """Serve CPU tensors by the kernels of this file."""
    for package, run in {
        "norm.rms_norm": rms_norm,
        "projection.encode_rows": encode_rows,
        "projection.rotate": rotate,
        "hyper_connection.advance_streams": advance_streams,
        "hyper_connection.collapse_streams": collapse_streams,
        "hyper_connection.expand_streams": expand_streams,
        "hyper_connection.mix_coefficients": mix_coefficients,
        "moe.route_topk": route_topk,
        "moe.swiglu": swiglu,
        "engram.gate_streams": gate_streams,
        "kv_cache.store_window": store_window,
        "kv_cache.store_main": store_main,
        "kv_cache.store_index_keys": store_index_keys,
    }.items():
        register_backend(f"tilelang_ops.{package}", "cpu", run)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """`tilelang_ops.projection.rotate`."""
    pairs, width = cos.shape[1], x.shape[-1]
    row_size = x.stride(0) if x.shape[0] > 1 else x.numel()
    cos, sin = cos.contiguous(), (-sin if inverse else sin).contiguous()
    context().rotate(
        x.data_ptr() + (width - 2 * pairs) * x.element_size(),
        is_bfloat16(x),
        row_size,
        width,
        x.shape[0],
        x.numel() // (x.shape[0] * width),
        cos.data_ptr(),
        sin.data_ptr(),
        pairs,
    )


def encode_rows(
    x: Tensor,
    format: str,
    norm: Norm | None,
    rotation: Rotation | None,
    records: Records | None,
    keeps_normed: bool,
) -> EncodedRows:
    """`tilelang_ops.projection.encode_rows`: into records by the kernels of its parts, else its reference."""
    if records is None:
        return encode_rows_reference.run(x, format, norm, rotation, records, keeps_normed)
    normed = x if norm is None else rms_norm(x, norm.weight, norm.eps)
    vectors = normed
    if rotation is not None:
        vectors = normed.clone() if keeps_normed or norm is None else normed
        rotate(vectors, rotation.cos, rotation.sin, rotation.inverse)
    vectors = vectors.view(-1, x.shape[-1])
    if format == "mxfp4":
        store_index_keys(vectors, records.codes, records.scales, records.index)
    else:
        store = store_window if format == "fp8" else store_main
        store(vectors, records.codes, records.index)
    return EncodedRows(None, None, normed if keeps_normed else None)


def advance_streams(
    streams: Tensor, pre: Tensor, output: Tensor | None, post: Tensor | None, comb: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`tilelang_ops.hyper_connection.advance_streams`."""
    num_rows, _, width = streams.shape
    new = streams if output is None else torch.empty_like(streams)
    collapsed = torch.empty(num_rows, width, dtype=streams.dtype)
    mean_square = torch.empty(num_rows)
    _advance(streams, output, post, comb, new, pre, collapsed, mean_square)
    return new, collapsed, mean_square


def expand_streams(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`tilelang_ops.hyper_connection.expand_streams`."""
    new = torch.empty_like(streams)
    _advance(streams, output, post, comb, new, None, None, None)
    return new


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """`tilelang_ops.hyper_connection.collapse_streams`."""
    collapsed = torch.empty(streams.shape[0], streams.shape[2], dtype=streams.dtype)
    _advance(streams, None, None, None, None, pre, collapsed, None)
    return collapsed


def _advance(
    streams: Tensor,
    output: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    new: Tensor | None,
    pre: Tensor | None,
    collapsed: Tensor | None,
    mean_square: Tensor | None,
) -> None:
    streams, output, post = _packed(streams), _packed(output), _packed(post)
    comb, pre = _packed(comb), _packed(pre)
    context().advance_streams(
        streams.data_ptr(),
        is_bfloat16(streams),
        *streams.shape,
        _address(output),
        _address(post),
        _address(comb),
        _address(new),
        _address(pre),
        _address(collapsed),
        _address(mean_square),
    )


def mix_coefficients(
    projection: Tensor,
    mean_square: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int,
    num_rounds: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tilelang_ops.hyper_connection.mix_coefficients`."""
    num_rows = projection.shape[0]
    projection, mean_square = projection.contiguous(), mean_square.contiguous()
    pre, post = torch.empty(num_rows, num_streams), torch.empty(num_rows, num_streams)
    comb = torch.empty(num_rows, num_streams, num_streams)
    context().mix_coefficients(
        projection.data_ptr(),
        mean_square.data_ptr(),
        scale.data_ptr(),
        base.data_ptr(),
        num_rows,
        num_streams,
        num_rounds,
        eps,
        norm_eps,
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
    )
    return pre, post, comb


def route_topk(
    logits: Tensor,
    bias: Tensor,
    num_selected: int,
    scale: float,
    image_bias: Tensor | None,
    is_image: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`tilelang_ops.moe.route_topk`."""
    num_rows, num_experts = logits.shape
    logits, is_image = logits.contiguous(), _packed(is_image)
    ids = torch.empty(num_rows, num_selected, dtype=torch.int32)
    weights = torch.empty(num_rows, num_selected)
    context().route_topk(
        logits.data_ptr(),
        bias.data_ptr(),
        _address(image_bias),
        _address(is_image),
        num_rows,
        num_experts,
        num_selected,
        scale,
        ids.data_ptr(),
        weights.data_ptr(),
    )
    return ids, weights


def swiglu(
    gate_up: Tensor, limit: float, dtype: torch.dtype, weight: Tensor | None, rounds: bool = False
) -> Tensor:
    """`tilelang_ops.moe.swiglu`."""
    if rounds:
        return swiglu_reference.run(gate_up, limit, dtype, weight, rounds)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up, weight = gate_up.contiguous(), _packed(weight)
    out = torch.empty(num_rows, width, dtype=dtype)
    context().swiglu(
        gate_up.data_ptr(),
        is_bfloat16(gate_up),
        2 * width,
        _address(weight),
        limit,
        out.data_ptr(),
        is_bfloat16(out),
        num_rows,
        width,
    )
    return out


def gate_streams(
    streams: Tensor, key_value: Tensor, weight: Tensor, eps: float, passes: Tensor | None = None
) -> Tensor:
    """`tilelang_ops.engram.gate_streams`."""
    key_value = key_value.contiguous()
    out = torch.empty_like(streams)
    context().gate_streams(
        streams.data_ptr(),
        key_value.data_ptr(),
        is_bfloat16(streams),
        weight.data_ptr(),
        *streams.shape,
        eps,
        streams.shape[2] ** -0.5,
        out.data_ptr(),
    )
    return out if passes is None else torch.where(passes.view(-1, 1, 1), streams, out)


def store_window(values: Tensor, pool: Tensor, index: Tensor) -> None:
    """`tilelang_ops.kv_cache.store_window`."""
    if pool.dtype != torch.uint8:
        return store_window_reference.run(values, pool, index)
    width = values.shape[1]
    _store(values, FP8, pool[..., :width], pool[..., width:], index)


def store_main(values: Tensor, pool: Tensor, index: Tensor) -> None:
    """`tilelang_ops.kv_cache.store_main`."""
    if pool.dtype != torch.uint8:
        return store_main_reference.run(values, pool, index)
    width = values.shape[1] // 2
    _store(values, FP4, pool[..., :width], pool[..., width:], index)


def store_index_keys(keys: Tensor, codes: Tensor, scales: Tensor | None, index: Tensor) -> None:
    """`tilelang_ops.kv_cache.store_index_keys`."""
    if scales is None:
        return store_index_keys_reference.run(keys, codes, scales, index)
    _store(keys, MXFP4, codes, scales, index)


def _store(values: Tensor, encoding: int, codes: Tensor, scales: Tensor, index: Tensor) -> None:
    values, index = values.contiguous(), index.contiguous()
    assert index.dtype == torch.int64, f"{index.dtype=}"
    context().store_records(
        values.data_ptr(),
        is_bfloat16(values),
        values.shape[1],
        encoding,
        codes.data_ptr(),
        codes.stride(0),
        codes.stride(1),
        scales.data_ptr(),
        scales.stride(0),
        scales.stride(1),
        codes.shape[0],
        codes.shape[1],
        index.data_ptr(),
        *values.shape,
    )


def _packed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
