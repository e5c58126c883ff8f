"""Small arrays to the device in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGN = 64  # bytes, as kernels may want it


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Tensors with the arrays' values on a device; on a CPU they share their memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGN) * ALIGN
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=True):
        view = buffer[start : start + array.nbytes].numpy()
        view[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = buffer.to(device, non_blocking=True)
    return [
        whole[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def upload_one(array: np.ndarray, device: torch.device) -> Tensor:
    """`upload` of one array."""
    return upload([array], device)[0]
