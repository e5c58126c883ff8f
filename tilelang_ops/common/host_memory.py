"""Host memory that kernels read.

A pinned tensor has one address for the host and for every GPU, so a kernel can read it over the bus without a
copy; only the tensor's own device says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

_views: dict[tuple[int, torch.Size, torch.dtype, torch.device], Tensor] = {}


def device_view(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor as kernels on `device` take it: itself, or the same memory under the device's name.

    The view does not keep the memory alive: the caller keeps `tensor` until the kernel has ended.

    Args:
        tensor: on `device`, or contiguous in pinned host memory.
        device: a GPU with its index; for any other device the tensor must lie there.

    Raises:
        ValueError: host memory that is not pinned.
    """
    if tensor.device.type == device.type:
        return tensor
    assert device.type == "cuda" and tensor.is_contiguous(), f"{tensor.device=} {device=} {tensor.stride()=}"
    # Asking the driver about a pointer takes longer than a launch: once for each tensor.
    key = tensor.data_ptr(), tensor.shape, tensor.dtype, device
    if key not in _views:
        if not tensor.is_pinned():
            raise ValueError("a GPU reads host memory only where it is pinned: Tensor.pin_memory()")
        flat = torch.as_tensor(_Address(tensor.data_ptr(), tensor.nbytes), device=device)
        assert flat.data_ptr() == tensor.data_ptr(), "the memory was copied"
        _views[key] = flat.view(tensor.dtype).view(tensor.shape)
    return _views[key]


class _Address:
    """Memory as other libraries hand it to torch."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
