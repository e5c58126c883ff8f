"""Bytes that objects hold in tensors."""

from __future__ import annotations

import dataclasses
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
        if isinstance(value, Tensor):
            if device is not None and value.device != device:
                continue
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif id(value) in seen:
            continue
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            seen.add(id(value))
            work += [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, (tuple, list)):
            work += value
        elif isinstance(value, dict):
            work += value.values()
    return sum(storages.values())
