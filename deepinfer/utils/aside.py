"""Aside: work for a second queue of the device, beside what is launched after it.

    mixes = aside(make_mixes, streams)     begins behind everything launched so far
    ...                                    launches that do not need the mixes
    mixes.result()                         what is launched from here on comes behind them

A step of few rows is a chain of kernels none of which fills a GPU, so what is not on the chain's way costs
nothing beside it. Which of two kernels runs first changes no result; the step's own go first wherever both
want the same processor. Elsewhere than on a GPU the work is done at once.

Memory: what the work reads is kept until its result is asked for, so every result is to be asked for. What it
makes belongs to the second queue, which gives it away to later work aside only, and that begins behind all
launches that were before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Aside(Generic[T]):
    """What is or will be made.

    Args:
        value: it.
        queue: where; None where it is there already.
        inputs: what the work reads.
        done: its end.
    """

    __slots__ = ("_done", "_inputs", "_number", "_queue", "_value")

    def __init__(
        self,
        value: T,
        queue: _SideQueue | None = None,
        inputs: tuple[Any, ...] = (),
        done: torch.cuda.Event | None = None,
    ) -> None:
        self._value = value
        self._queue = queue
        self._inputs = inputs
        self._done = done
        self._number = 0 if queue is None else queue.num_begun

    def result(self) -> T:
        """It; what the caller launches from here on comes behind the work."""
        if self._queue is not None:
            self._queue.join(self._number, self._done)
            self._queue = self._done = None
            self._inputs = ()
        return self._value


def aside(device: torch.device, work: Callable[..., T], *inputs: Any) -> Aside[T]:
    """Launch `work(*inputs)`, which writes nothing but what it returns, aside."""
    if device.type != "cuda" or _nothing_is_aside:
        return Aside(work(*inputs))
    queue = _queue_beside(torch.cuda.current_stream(device))
    queue.side.wait_stream(queue.main)
    with torch.cuda.stream(queue.side):
        value = work(*inputs)
        done = queue.side.record_event()
    queue.num_begun += 1
    return Aside(value, queue, inputs, done)


@contextmanager
def nothing_aside() -> Iterator[None]:
    """Inside, work runs where it is launched: kernels that share the device take longer than each alone."""
    global _nothing_is_aside
    before, _nothing_is_aside = _nothing_is_aside, True
    try:
        yield
    finally:
        _nothing_is_aside = before


def join_captured(main: torch.cuda.Stream) -> None:
    """Let a queue that is being captured wait for all work beside it; without that the capture cannot end."""
    queue = _queues.get(main.cuda_stream)
    if queue is None:
        return
    with torch.cuda.stream(queue.side):
        is_captured = torch.cuda.is_current_stream_capturing()
    if is_captured:
        main.wait_stream(queue.side)
        queue.num_joined = queue.num_begun


@dataclass
class _SideQueue:
    """The queue beside another one.

    Attributes:
        num_begun: works so far.
        num_joined: of these, from the first on, those that the main queue has waited for.
    """

    main: torch.cuda.Stream
    side: torch.cuda.Stream
    num_begun: int = 0
    num_joined: int = 0

    def join(self, number: int, done: torch.cuda.Event) -> None:
        """The main queue waits for a work and those before it, unless it did."""
        if number > self.num_joined:
            self.main.wait_event(done)
            self.num_joined = number


_nothing_is_aside = False
_queues: dict[int, _SideQueue] = {}  # by the handle of the main stream


def _queue_beside(main: torch.cuda.Stream) -> _SideQueue:
    queue = _queues.get(main.cuda_stream)
    if queue is None:
        queue = _queues[main.cuda_stream] = _SideQueue(main, torch.cuda.Stream(main.device, priority=0))
    return queue
