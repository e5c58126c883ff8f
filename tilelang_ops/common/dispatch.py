"""Choose an operator's backend from the device of its tensors.

An operator package holds one module per backend beside its `op.py`. A backend module is imported when a
tensor of its device first arrives, so a machine without an accelerator never loads kernel code. A program
with a faster function for some device registers it, and it takes the module's place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import device as Device

# Device type of a tensor -> name of the module that serves it.
BACKENDS: dict[str, str] = {"cpu": "reference", "cuda": "cuda", "npu": "ascend"}


class UnsupportedOpError(RuntimeError):
    """An operator has no backend for the device of its tensors.

    Attributes:
        op: the operator's name.
        device: the device type that lacks it.
    """

    def __init__(self, op: str, device: str) -> None:
        super().__init__(f"operator {op!r} has no implementation for device type {device!r}")
        self.op = op
        self.device = device


_registered: dict[tuple[str, str], SimpleNamespace] = {}


def register(package: str, device_type: str, run: Callable[..., Any]) -> None:
    """Serve an operator on a device by `run`, which has the signature of its reference's `run`.

    Args:
        package: the operator's package, for example "tilelang_ops.moe.swiglu".
        device_type: "cpu", "cuda" or "npu".
        run: replaces what was registered before.
    """
    _registered[package, device_type] = SimpleNamespace(run=run)
    _load.cache_clear()


def backend(package: str, device: Device) -> ModuleType | SimpleNamespace:
    """What runs operator `package` on `device`: an object with the function `run`.

    Args:
        package: the operator's package, its own `__package__`.
        device: device of the tensors the operator was called with.

    Raises:
        UnsupportedOpError: the operator has nothing for this device.
    """
    return _load(package, device.type)


@cache
def _load(package: str, device_type: str) -> ModuleType | SimpleNamespace:
    if (package, device_type) in _registered:
        return _registered[package, device_type]
    op = package.rpartition(".")[2]
    name = BACKENDS.get(device_type)
    if name is None:
        raise UnsupportedOpError(op, device_type)
    module = f"{package}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the backend exists but one of its own imports is missing
            raise
        raise UnsupportedOpError(op, device_type) from None
