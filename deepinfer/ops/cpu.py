"""The CPU kernels' context: one for each process, with torch's number of threads unless told otherwise."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from deepinfer.native import load_cpu_ops
from tilelang_ops.common.dispatch import UnsupportedOpError

_contexts: list[Any] = []  # none before the first use; one of an earlier process stays behind the current one


def context() -> Any:
    """The process's `_cpu_ops.Context`."""
    if not _contexts:
        _start()
    return _contexts[-1]


def _start() -> None:
    _contexts.append(load_cpu_ops().Context(torch.get_num_threads()))


def _restart_after_fork() -> None:
    """Threads do not survive a fork; the parent's context is kept, because ending it would wait for them."""
    if _contexts:
        _start()


os.register_at_fork(after_in_child=_restart_after_fork)


def use(chosen: Any) -> None:
    """Take another `_cpu_ops.Context` from here on, to choose its instruction set."""
    _contexts.append(chosen)


def set_num_threads(num_threads: int) -> None:
    """Threads of the CPU kernels, the calling one included; results do not depend on it.

    Raises:
        ValueError: fewer than one.
    """
    context().set_num_threads(num_threads)


def require_cpu(op: str, *tensors: Tensor | None) -> None:
    """Raise UnsupportedOpError where a tensor lies on a device that `op` has no implementation for."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            raise UnsupportedOpError(op, tensor.device.type)


def is_bfloat16(tensor: Tensor) -> bool:
    """True for bfloat16, False for float32; anything else is a mistake of the caller."""
    assert tensor.dtype in (torch.float32, torch.bfloat16), f"{tensor.dtype=} is neither float32 nor bfloat16"
    return tensor.dtype == torch.bfloat16
