"""Routed gated MLPs: each row goes through its own k experts, whose outputs are summed in slot order."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.activation import round_activations
from deepinfer.ops.gemm import grouped_linear


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

    Args:
        x: [M, H] float32 or bfloat16. With bfloat16 the two products round to bfloat16 as the release does.
        expert_ids: [M, k] int32, 0..E-1.
        expert_weights: [M, k] float32, applied before the second product.
        w13: [E, 2 * I, H] float32, the rows of the gate, then those of the up projection.
        w2: [E, H, I] float32.
        limit: bound of the activations, 0 for none.
        round_inputs: round the inputs of both products to E4M3 in groups of 32.

    Returns:
        [M, H] float32; slots are added in order 0..k-1.
    """
    num_rows, num_slots = expert_ids.shape
    num_experts, hidden = w2.shape[:2]
    if num_rows == 0:
        return x.new_zeros(0, hidden, dtype=torch.float32)
    order = torch.argsort(expert_ids.flatten(), stable=True)
    counts = torch.bincount(expert_ids.flatten(), minlength=num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = round_activations(x) if round_inputs else x
    gate, up = grouped_linear(rows[order // num_slots], w13, offsets).to(x.dtype).float().chunk(2, dim=1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    product = gate / (1 + torch.exp(-gate)) * up * expert_weights.flatten()[order, None]
    product = round_activations(product) if round_inputs else product.to(x.dtype)
    out = torch.empty(num_rows * num_slots, hidden, dtype=torch.float32)
    out[order] = grouped_linear(product, w2, offsets).to(x.dtype).float()
    slots = out.view(num_rows, num_slots, hidden)
    total = slots[:, 0].clone()
    for slot in range(1, num_slots):
        total += slots[:, slot]
    return total
