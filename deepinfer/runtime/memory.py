"""Bytes that objects hold in tensors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor


def held_bytes(*roots: Any, device: torch.device | None = None) -> int:
    """Bytes of all tensors reached through dataclasses, tuples, lists and dicts; shared ones count once.

    Args:
        roots: where to begin.
        device: count the tensors on it; None for all.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    work = list(roots)
    while work:
        value = work.pop()
        names = _field_names(type(value))
        if isinstance(value, Tensor):
            if device is not None and value.device != device:
                continue
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif id(value) in seen:
            continue
        elif names:
            seen.add(id(value))
            work += [getattr(value, name) for name in names]
        elif isinstance(value, (tuple, list)):
            work += value
        elif isinstance(value, dict):
            work += value.values()
    return sum(storages.values())


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Of a dataclass; those of any other type are none."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
