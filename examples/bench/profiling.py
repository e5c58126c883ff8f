"""Profiling: the time that each component of the model takes, by who launched it.

Parts of the model are wrapped while `components_marked` is entered. On a GPU torch's profiler gives the
kernels and the places of their launches; a kernel belongs to the innermost marked part that launched it, but
all that the drafter launches is the drafter's. Nothing runs aside meanwhile. On a CPU the parts' own time is
taken.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer.models.deepseek_v41 import attention, dspark, engram, hyper_connection, indexer, model, moe
from deepinfer.sampling import sampler
from deepinfer.utils.aside import nothing_aside

OTHER = "other"
_DRAFTER = "drafter"
_MARK = "component: "
_PARTS: tuple[tuple[Any, str, str], ...] = (
    (attention, "sparse_attention", "sparse attention"),
    (attention.Attention, "store_entries", "compressor"),
    (attention.Attention, "store_window", "attention projections"),
    (attention.Attention, "forward", "attention projections"),
    (indexer.Indexer, "select", "indexer"),
    (moe.MoE, "route", "router"),
    (moe.MoE, "shared", "shared expert"),
    (moe.MoE, "__call__", "routed experts"),
    (hyper_connection.HyperConnection, "__call__", "mHC"),
    (hyper_connection.HyperConnection, "normed", "mHC"),
    (hyper_connection.Streams, "collapse", "mHC"),
    (engram.Engram, "__call__", "Engram"),
    (engram.Engram, "look_up", "Engram"),
    (engram.EngramHasher, "__call__", "Engram"),
    (model.DeepseekV41Model, "compute_logits", "head"),
    (sampler.Sampler, "sample", "sampling"),
    (dspark.Drafter, "context", _DRAFTER),
    (dspark.Drafter, "store_context", _DRAFTER),
    (dspark.Drafter, "propose", _DRAFTER),
)


@dataclass
class Marks:
    """The part that runs, and on a CPU the time of each.

    Attributes:
        seconds: of a part, without the parts inside it.
    """

    stack: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    clock: float = 0.0

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Mark what runs in it."""
        name = _DRAFTER if _DRAFTER in self.stack else name
        self._count()
        self.stack.append(name)
        try:
            with torch.profiler.record_function(_MARK + name):
                yield
        finally:
            self._count()
            self.stack.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.clock
        self.clock = now


@contextlib.contextmanager
def components_marked() -> Iterator[Marks]:
    """Wrap the parts of the model for a while."""
    marks = Marks()
    replaced = []
    for owner, name, component in _PARTS:
        whole = vars(owner).get(name)
        if whole is None:  # this version of the model has no such part
            continue
        replaced.append((owner, name, whole))
        setattr(owner, name, _marked(marks, whole, component))
    try:
        yield marks
    finally:
        for owner, name, whole in replaced:
            setattr(owner, name, whole)


def _marked(marks: Marks, whole: Callable[..., Any], component: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with marks.inside(component):
            return whole(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Profile:
    """Milliseconds of one step.

    Attributes:
        components: by name; `OTHER` for what belongs to none.
        kernels: (name, launches, milliseconds), longest first; empty on a CPU.
    """

    components: dict[str, float]
    kernels: list[tuple[str, float, float]]


def profile_steps(run: Callable[[], None], num_steps: int) -> Profile:
    """Profile `num_steps` calls of `run`, each one step."""
    if not torch.cuda.is_available():
        with components_marked() as marks:
            for _ in range(num_steps):
                run()
        return Profile({name: 1e3 * s / num_steps for name, s in marks.seconds.items()}, [])
    torch.cuda.synchronize()  # what runs already was launched by nobody that is marked
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with components_marked(), nothing_aside(), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            run()
        torch.cuda.synchronize()
    return _by_component(profiler.profiler.kineto_results.events(), num_steps)


def _by_component(events: Any, num_steps: int) -> Profile:
    """Kernels by the marked part in which their launch lies."""
    launches, kernels, ranges = {}, [], []
    for event in events:
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            if not event.name().startswith(_MARK):
                kernels.append(event)
        elif event.name().startswith(_MARK):
            start = event.start_ns()
            ranges.append((start, start + event.duration_ns(), event.name().removeprefix(_MARK)))
        elif event.correlation_id():
            launches.setdefault(event.correlation_id(), event.start_ns())
    owner = _Innermost(ranges)
    components: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in kernels:
        ms = event.duration_ns() / 1e6 / num_steps
        components[owner(launches.get(event.correlation_id(), -1))] += ms
        by_name[event.name()][0] += 1 / num_steps
        by_name[event.name()][1] += ms
    longest = sorted(((name, *values) for name, values in by_name.items()), key=lambda row: -row[2])
    return Profile(dict(components), longest)


class _Innermost:
    """The innermost of nested ranges that holds a time."""

    def __init__(self, ranges: list[tuple[int, int, str]]) -> None:
        points: list[tuple[int, str]] = []
        stack: list[tuple[int, str]] = []
        for start, end, name in sorted(ranges, key=lambda each: (each[0], -each[1])):
            while stack and stack[-1][0] <= start:
                closed = stack.pop()[0]
                points.append((closed, stack[-1][1] if stack else OTHER))
            stack.append((end, name))
            points.append((start, name))
        while stack:
            closed = stack.pop()[0]
            points.append((closed, stack[-1][1] if stack else OTHER))
        self._times = [time for time, _ in points]
        self._names = [name for _, name in points]

    def __call__(self, moment: int) -> str:
        place = bisect.bisect_right(self._times, moment) - 1
        return self._names[place] if place >= 0 else OTHER
