"""Routed gated MLPs: each row goes through its own k experts, whose outputs are summed in slot order."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu
from deepinfer.ops.gemm import grouped_linear_reference
from deepinfer.ops.quant import round_fp8


def routed_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    *,
    round_inputs: bool = False,
) -> Tensor:
    """Sum over the k slots of a row of `w2 @ (weight * silu(min(g, limit)) * clamp(u, -limit, limit))`.

    A row's bits do not depend on the other rows. With bfloat16 `x` the products and the activation round
    to bfloat16, the activation before `round_inputs` takes it to E4M3.

    Args:
        x: [M, H] float32 or bfloat16; the last dimension contiguous.
        expert_ids: [M, k] int32, 0..E-1.
        expert_weights: [M, k] float32, applied before the second product.
        w13: [E, 2 * I, H] float32 or bfloat16, the rows of the gate, then those of the up projection.
        w2: [E, H, I], like `w13`.
        limit: bound of the activations, 0 for none.
        round_inputs: round the inputs of both products to E4M3 in groups of 32.

    Returns:
        [M, H] float32; slots are added in order 0..k-1.

    Raises:
        IndexError: an expert id outside 0..E-1.
    """
    num_rows, num_slots = expert_ids.shape
    num_experts, hidden, inner = w2.shape
    assert w13.shape == (num_experts, 2 * inner, hidden) and w13.dtype == w2.dtype, (
        f"{w13.shape=} {w2.shape=}"
    )
    assert x.shape == (num_rows, hidden) and expert_weights.shape == expert_ids.shape, f"{x.shape=}"
    assert expert_ids.dtype == torch.int32 and expert_weights.dtype == torch.float32, f"{expert_ids.dtype=}"
    assert w13.is_contiguous() and w2.is_contiguous(), f"{w13.stride()=} {w2.stride()=}"
    assert not round_inputs or (hidden % 32 == 0 and inner % 32 == 0), f"{hidden=} {inner=}"
    require_cpu("routed_experts", x, expert_ids, expert_weights, w13, w2)
    if x.stride(1) != 1:
        x = x.contiguous()
    ids, weights = expert_ids.contiguous(), expert_weights.contiguous()
    out = torch.empty(num_rows, hidden)
    context().routed_experts(
        x.data_ptr(),
        is_bfloat16(x),
        x.stride(0),
        ids.data_ptr(),
        weights.data_ptr(),
        w13.data_ptr(),
        w2.data_ptr(),
        is_bfloat16(w2),
        out.data_ptr(),
        num_rows,
        num_slots,
        num_experts,
        hidden,
        inner,
        limit,
        round_inputs,
    )
    return out


def routed_experts_reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    *,
    round_inputs: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The meaning of `routed_experts`, with its products and activation computed in `dtype`."""

    def rounded(product: Tensor) -> Tensor:
        return product.to(x.dtype).to(dtype) if x.dtype == torch.bfloat16 else product

    num_slots = expert_ids.shape[1]
    order = torch.argsort(expert_ids.flatten(), stable=True)
    counts = torch.bincount(expert_ids.flatten(), minlength=w2.shape[0])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = (round_fp8(x) if round_inputs else x)[order // num_slots]
    gate, up = rounded(grouped_linear_reference(rows, w13, offsets, dtype)).chunk(2, dim=1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    product = gate / (1 + torch.exp(-gate)) * up * expert_weights.flatten()[order, None]
    product = rounded(product)
    if round_inputs:
        product = round_fp8(product.float()).to(dtype)
    out = torch.empty(expert_ids.numel(), w2.shape[1], dtype=dtype)
    out[order] = rounded(grouped_linear_reference(product, w2, offsets, dtype))
    return out.unflatten(0, (-1, num_slots)).sum(1)
