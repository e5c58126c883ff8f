"""Work aside: which queue waits for which, what is kept alive, and on a GPU that nothing is overwritten."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepinfer.utils import aside as module
from deepinfer.utils.aside import aside, join_captured, nothing_aside
from tests.support.compare import assert_same_bits

CUDA = torch.device("cuda", 0)


class Queue:
    """Stands for a stream: notes what is asked of it in a list that all of them share."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self.cuda_stream, self.device = name, log, id(self), CUDA

    def wait_stream(self, other: Queue) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"mark {len(self._log)}"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the streams of a stand-in for the device."""
    found: list[str] = []
    main, side = Queue("main", found), Queue("side", found)

    @contextlib.contextmanager
    def entered(stream: Queue):
        found.append(f"on {stream.name}")
        yield
        found.append("back")

    cuda = SimpleNamespace(current_stream=lambda _: main, Stream=lambda *_, **__: side, stream=entered)
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(module, "_queues", {})
    return found


def test_who_waits(log: list[str]) -> None:
    first = aside(CUDA, lambda: log.append("first"))
    second = aside(CUDA, lambda: log.append("second"))
    begun = [
        "side waits for main",
        "on side",
        "first",
        "back",
        "side waits for main",
        "on side",
        "second",
        "back",
    ]
    assert log == begun
    second.result()
    assert log == [*begun, "main waits for mark 7"]
    first.result()  # the second one comes behind it
    second.result()
    assert len(log) == len(begun) + 1
    third = aside(CUDA, lambda: log.append("third"))
    third.result()
    assert log[-1] == "main waits for mark 12"


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_capture_that_stopped(log: list[str], is_captured: bool) -> None:
    module.torch.cuda.is_current_stream_capturing = lambda: is_captured
    main = module.torch.cuda.current_stream(CUDA)
    join_captured(main)
    assert log == [], "nothing was ever aside"
    waiting = aside(CUDA, lambda: None)
    del log[:]
    join_captured(main)
    assert log == ["on side", "back", *(["main waits for side"] if is_captured else [])]
    del log[:]
    waiting.result()
    assert len(log) == (0 if is_captured else 1)


def test_nothing_aside(log: list[str]) -> None:
    with nothing_aside():
        aside(CUDA, lambda: log.append("work")).result()
    assert log == ["work"]
    aside(CUDA, lambda: None)
    assert len(log) > 1


def test_what_is_kept(log: list[str]) -> None:
    class Value:
        pass

    value = Value()
    alive = weakref.ref(value)
    work = aside(CUDA, lambda _: 5, value)
    del value
    assert alive() is not None
    assert work.result() == 5
    assert alive() is None


def test_at_once_elsewhere() -> None:
    with mock.patch.object(torch.cuda, "current_stream", side_effect=AssertionError):
        x = torch.ones(3)
        assert_same_bits(aside(x.device, lambda x, y: x + y, x, 2).result(), torch.full((3,), 3.0), "sum")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "graph"])
def test_on_a_gpu(is_captured: bool) -> None:
    """Long works aside, while the memory of what they read and made is given away and written."""

    def chain(run) -> torch.Tensor:
        x = torch.linspace(-1, 1, 1 << 20, device=CUDA)
        for step in range(20):
            waiting = run(CUDA, lambda x, s: (x.sin().cos().exp() * s).sort().values, x * 1.01, step + 1)
            y = torch.zeros_like(x)
            for _ in range(step % 3):
                y = torch.cos(y + x)
            x = (y + waiting.result()).remainder(2.0)
        return x

    expected = chain(lambda _, work, *inputs: module.Aside(work(*inputs)))
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = chain(aside)
    stream.synchronize()
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = chain(aside)
        graph.replay()
        torch.cuda.synchronize()
    assert_same_bits(found, expected, "chain")
