import torch
from torch import Tensor


def run(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tail = x[..., x.shape[-1] - 2 * cos.shape[1] :]
    per_row = (cos.shape[0], *[1] * (x.dim() - 2), cos.shape[1])
    cos, sin = cos.view(per_row), sin.view(per_row)
    even, odd = tail.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    tail.copy_(turned.flatten(-2))
