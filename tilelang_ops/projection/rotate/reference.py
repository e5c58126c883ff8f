import torch
from torch import Tensor


def run(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    pairs = cos.shape[1]
    turn = torch.complex(cos, -sin if inverse else sin).view(cos.shape[0], *[1] * (x.dim() - 2), pairs)
    tail = x[..., x.shape[-1] - 2 * pairs :]
    wide = tail.float()  # the tail itself when x is float32
    torch.view_as_complex(wide.unflatten(-1, (pairs, 2))).mul_(turn)
    if wide.data_ptr() != tail.data_ptr():
        tail.copy_(wide)
