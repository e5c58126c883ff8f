"""Choose an operator's backend from the device of its tensors.

An operator package holds one module per backend beside its `op.py`. A backend module is imported when a
tensor of its device first arrives, so a machine without an accelerator never loads kernel code.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

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


def backend(package: str, device: Device) -> ModuleType:
    """The module of operator `package` that runs on `device`.

    Args:
        package: the operator's package, its own `__package__`.
        device: device of the tensors the operator was called with.

    Raises:
        UnsupportedOpError: the operator has no module for this device.
    """
    return _load(package, device.type)


@cache
def _load(package: str, device_type: str) -> ModuleType:
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
