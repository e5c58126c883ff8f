"""Host memory that kernels read.

A pinned tensor has one address for the host and for every GPU, so a kernel can read it over the bus without a
copy; only the tensor's own device says otherwise.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def device_view(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor as kernels on `device` take it: itself, or the same memory under the device's name.

    The view does not keep the memory alive: the caller keeps `tensor` until the kernel has ended.

    Args:
        tensor: on `device`, or contiguous in pinned host memory.
        device: a GPU; for any other device the tensor must lie there.
    """
    if tensor.device.type == device.type:
        return tensor
    assert device.type == "cuda" and tensor.device.type == "cpu", f"{tensor.device=} {device=}"
    index = torch.cuda.current_device() if device.index is None else device.index
    return _view(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, index)


class _Address:
    """Memory as other libraries hand it to torch."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


@lru_cache(maxsize=256)
def _view(pointer: int, shape: tuple[int, ...], dtype: torch.dtype, device_index: int) -> Tensor:
    """Asking the driver about a pointer takes longer than a launch: once for each tensor."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    with torch.cuda.device(device_index):
        # Raises where the memory is not pinned.
        flat = torch.as_tensor(_Address(pointer, num_bytes), device=torch.device("cuda", device_index))
    assert flat.data_ptr() == pointer, "the memory was copied"
    return flat.view(dtype).view(shape)
