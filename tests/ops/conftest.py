"""Fixtures of the tests of operators with native CPU kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.native import load_cpu_ops
from deepinfer.ops import cpu


@pytest.fixture(params=load_cpu_ops().instruction_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every set of kernels that this machine runs, in use for the test, with three threads."""
    monkeypatch.setattr(cpu, "_contexts", [load_cpu_ops().Context(3, request.param)])
    return request.param


@pytest.fixture
def with_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with a number to run the kernels with so many threads for the rest of the test."""

    def use(num_threads: int) -> None:
        monkeypatch.setattr(cpu, "_contexts", [load_cpu_ops().Context(num_threads)])

    return use
