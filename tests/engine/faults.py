"""Faults for tests: what goes wrong inside a forward, between two statements, in another thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from deepinfer.entrypoints.llm import LLM
from tests.support.paths import ROOT

Forward = Callable[..., Any]


class FaultyModel:
    """A model with something between it and the engine.

    Args:
        model: the real one.
        on_forward: (the model's forward, batch, caches, **options) -> what the forward returns.
        on_logits: changes float32 logits [rows, vocab] in place.
    """

    def __init__(
        self, model: Any, on_forward: Forward | None, on_logits: Callable[[Tensor], None] | None
    ) -> None:
        self._model = model
        self._on_forward = on_forward
        self._on_logits = on_logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any, caches: Any, **options: Any) -> Any:
        if self._on_forward is None:
            return self._model.forward(batch, caches, **options)
        return self._on_forward(self._model.forward, batch, caches, **options)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden_states)
        if self._on_logits is not None:
            self._on_logits(logits)
        return logits


@contextmanager
def faulty(
    llm: LLM, *, on_forward: Forward | None = None, on_logits: Callable[[Tensor], None] | None = None
) -> Iterator[None]:
    """Put a `FaultyModel` into an engine for a while."""
    runner = llm.llm_engine.model_runner
    model = runner._model
    runner._model = FaultyModel(model, on_forward, on_logits)
    try:
        yield
    finally:
        runner._model = model


@dataclass
class Interruption:
    """Where this thread was interrupted."""

    count: int = 0  # lines that ran
    place: str | None = None  # file and line, once it has happened


@contextmanager
def interrupted_at(line: int, folders: tuple[str, ...]) -> Iterator[Interruption]:
    """Raise KeyboardInterrupt in this thread before the `line`-th line that runs in some folders."""
    prefixes = tuple(str(ROOT / folder) for folder in folders)
    found = Interruption()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if found.place is not None or not frame.f_code.co_filename.startswith(prefixes):
            return None
        if event == "line":
            found.count += 1
            if found.count == line:
                found.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(before)
