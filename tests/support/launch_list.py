"""What a step launches on a GPU, listed without one.

Tensors on torch's "meta" device have shapes and no values. Here operators run their CUDA modules on them and
programs are noted instead of launched, so what a device does is followed to the letter as far as launches go;
kernels of torch's own are seen by a dispatch mode.

    model = on_meta(model)
    with listed() as launches:
        model.forward(batch, caches)
    launches.programs, launches.of_torch
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.layers.rotary import RotaryTable
from tests.support.paths import ROOT
from tilelang_ops.common import dispatch, kernels

META = torch.device("meta")
_WITHOUT_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "set_")


@dataclasses.dataclass
class Launches:
    """What was launched, in order.

    Attributes:
        programs: names of TileLang programs.
        with_sizes: the same with their sizes, each once.
        of_torch: kernels of torch's own, by the operator and the line that called it.
        num_copies: whole copies, which a device makes without a kernel.
    """

    programs: list[str] = dataclasses.field(default_factory=list)
    with_sizes: set[str] = dataclasses.field(default_factory=set)
    of_torch: list[str] = dataclasses.field(default_factory=list)
    num_copies: int = 0


def on_meta(value: Any, done: dict[int, Any] | None = None) -> Any:
    """A model, or a part of one, with its tensors on the "meta" device.

    Args:
        value: records, tuples and tensors change; what is nothing of these stays.
        done: what has been changed already, by `id`; one dictionary for parts that share something.
    """
    done = {} if done is None else done
    if id(value) not in done:
        changed = value
        if isinstance(value, Tensor):
            changed = value.to(META)
        elif isinstance(value, RotaryTable):
            changed = RotaryTable(value.frequencies.to(META))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            changed = dataclasses.replace(value, **{n: on_meta(getattr(value, n), done) for n in names})
        elif isinstance(value, tuple):
            changed = tuple(on_meta(part, done) for part in value)
        done[id(value)] = changed
    return done[id(value)]


@contextmanager
def listed() -> Iterator[Launches]:
    """Notes what is launched inside."""
    found = Launches()

    def note(program: kernels.Program, arguments: tuple[Any, ...]) -> None:
        found.programs.append(program.factory.name)
        found.with_sizes.add(str(program))

    h200 = mock.Mock(multi_processor_count=132)
    with (
        mock.patch.dict(dispatch.BACKENDS, {"meta": "cuda"}),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=h200),
        kernels.running_with(note),
        _Watch(found),
    ):
        try:
            yield found
        finally:
            kernels.num_sms.cache_clear()
            dispatch._load.cache_clear()


class _Watch(TorchDispatchMode):
    """Sees every operator of torch that is called."""

    def __init__(self, found: Launches) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if not isinstance(out, Tensor) or out.device != META or out.numel() == 0 or name in _WITHOUT_WORK:
            return out
        is_view = any(isinstance(a, Tensor) and _memory(a) == _memory(out) for a in args)
        if is_view and not name.endswith("_"):
            return out
        if _is_whole_copy(out, args, name):
            self._found.num_copies += 1
        else:
            self._found.of_torch.append(f"{name} at {_caller()}")
        return out


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_whole_copy(out: Tensor, args: Any, name: str) -> bool:
    if name not in ("copy_", "_to_copy", "to"):
        return False
    source = args[1] if name == "copy_" else args[0]
    is_whole = source.is_contiguous() and out.is_contiguous() and source.shape == out.shape
    return source.dtype == out.dtype and is_whole


def _caller() -> str:
    """The line of our own that called torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file.startswith((f"{ROOT}/deepinfer", f"{ROOT}/tilelang_ops")):
            return f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
