"""NVIDIA devices: which one, its queues, and the cores next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from torch import Tensor

from deepinfer.platform.base import GraphMemoryError
from deepinfer.utils.aside import join_captured
from deepinfer.utils.host_memory import HostRing
from deepinfer.utils.numa import bind_near
from deepinfer.utils.sync_guard import SyncGuard
from tilelang_ops.common.kernels import target_of

RING_SIZE = 8  # two buffers for each step, of which two are under way
LEAST_BYTES = 1 << 20  # of a buffer


def problem() -> str | None:
    """Why no GPU can be used; None when one can."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        target_of(torch.device("cuda", torch.cuda.current_device()))
    except ValueError as error:
        return str(error)
    return None


def bind_cores(device: torch.device) -> set[int] | None:
    """Bind the process to the cores near a device; None when they are not known."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, place = (getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device"))
    return bind_near(f"{domain:04x}:{bus:02x}:{place:02x}.0")


class CudaQueue:
    """A stream for the steps and one for copies to the host; a `DeviceQueue`.

    Args:
        device: a CUDA device.
        guard: watches over launches.
    """

    def __init__(self, device: torch.device, guard: SyncGuard) -> None:
        self.device = device
        self._guard = guard
        self.stream = self._stream = torch.cuda.Stream(device, priority=-1)  # before work aside
        self._copies = torch.cuda.Stream(device)
        self._last_fetch: torch.cuda.Event | None = None

    @contextmanager
    def launching(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream), self._guard.forbid():
            yield

    def waiting(self) -> AbstractContextManager[None]:
        return self._guard.allow()

    def host_ring(self) -> HostRing:
        def allocate(num_bytes: int) -> Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

        return HostRing(RING_SIZE, allocate, self.mark, LEAST_BYTES)

    def capture(self) -> GraphCapture:
        return GraphCapture(self)

    def mark(self) -> _StreamMark:
        return _StreamMark(self._stream)

    def fetch(self, tensors: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        self._copies.wait_stream(self._stream)
        done = torch.cuda.Event()
        copies: dict[int, Tensor] = {}
        with torch.cuda.stream(self._copies):
            for whole, parts in spans(tensors):
                copy = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
                copy.copy_(whole, non_blocking=True)
                whole.record_stream(self._copies)  # its memory is not given away before
                for number, start in parts:
                    tensor = tensors[number]
                    part = copy[start : start + tensor.nbytes]
                    copies[number] = part.view(tensor.dtype).view(tensor.shape)
            done.record()
        self._last_fetch = done
        return [copies[number] for number in range(len(tensors))], done

    def hold_for_fetches(self) -> None:
        if self._last_fetch is not None:
            self._stream.wait_event(self._last_fetch)

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def used_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)


def spans(tensors: list[Tensor]) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """Pieces of memory that hold tensors, few of them: those of one allocation lie in one piece.

    Returns:
        uint8 [bytes] of each piece, and its tensors: their numbers and the bytes before them.
    """
    found: dict[int, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous(), f"{tensor.shape=} {tensor.stride()=}"
        start = tensor.storage_offset() * tensor.itemsize
        key = tensor.untyped_storage()._cdata
        found.setdefault(key, []).append((number, start, start + tensor.nbytes))
    pieces = []
    for parts in found.values():
        low, high = min(start for _, start, _ in parts), max(end for *_, end in parts)
        first = tensors[parts[0][0]]
        whole = torch.empty(0, dtype=torch.uint8, device=first.device)
        whole.set_(first.untyped_storage(), low, (high - low,))
        pieces.append((whole, [(number, start - low) for number, start, _ in parts]))
    return pieces


class _StreamMark:
    """An event of one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(self._stream)

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: _StreamMark) -> float:
        return self._event.elapsed_time(end._event)


class GraphCapture:
    """Makes graphs of a queue's launches, in one pool of memory; a `Capture`.

    Their launches run one after the other, so what one needs between its own kernels another may use as well.
    """

    def __init__(self, queue: CudaQueue) -> None:
        self._queue = queue
        self._stream = queue.stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream), self._queue.waiting():
                work()  # compiles kernels, and lets everything grow that grows
                self._stream.synchronize()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    join_captured(self._stream)
                    # Torch refuses a pool whose last graph is gone, and one that it still records in.
                    self._pool = torch.cuda.graph_pool_handle()
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.OutOfMemoryError as error:
            raise GraphMemoryError(name) from error
        return graph.replay
