import torch
from torch import Tensor


def run(
    states: Tensor,
    pool: Tensor,
    ends: Tensor,
    positions: Tensor,
    slots: Tensor,
    preceding: Tensor,
    following: Tensor,
    ratio: int,
    dtype: torch.dtype,
) -> Tensor:
    ring, is_row = pool.shape[1], ends >= 0
    ends = ends.clamp(min=0)
    back = torch.arange(ratio - 1, -1, -1, device=states.device)  # how far a member lies behind the end
    from_rows = states[(ends[:, None] - back).clamp(min=0)]  # [g, ratio, 2, width]
    from_ring = pool[slots[ends][:, None], (positions[ends][:, None] - back) % ring]
    in_rows = (back <= preceding[ends][:, None])[..., None, None]
    scores, latents = torch.where(in_rows, from_rows, from_ring).unbind(2)  # [g, ratio, width] each

    kept = (following < ring).nonzero().squeeze(1)
    pool[slots[kept], positions[kept] % ring] = states[kept]

    weights = torch.exp(scores - scores.amax(1, keepdim=True)).unbind(1)
    total, pooled = weights[0], None
    for weight in weights[1:]:
        total = total + weight
    for weight, latent in zip(weights, latents.unbind(1), strict=True):
        part = weight / total * latent
        pooled = part if pooled is None else pooled + part
    return torch.where(is_row[:, None], pooled, 0.0).to(dtype)
