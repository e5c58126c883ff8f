"""Fixtures of the kernels' tests. They need neither the native extension nor a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel_runs import KernelRunner, places
from tests.support.macro_cache import MacroCache


@pytest.fixture(scope="session", autouse=True)
def macro_cache() -> Iterator[None]:
    """From the first of these tests on, functions of kernels are rewritten once."""
    with MacroCache().applied():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that run kernels do so everywhere that their folder's family, or their file's operator, needs."""
    if "run_kernel" in metafunc.fixturenames:
        path = metafunc.definition.path
        op = path.stem.removeprefix("test_")
        metafunc.parametrize("run_kernel", places(path.parent.name, op), indirect=True)


@pytest.fixture
def run_kernel(request: pytest.FixtureRequest) -> KernelRunner:
    """Runs a backend module at one of `places`."""
    return KernelRunner(request.param)
