"""Fixtures of the kernels' tests. They need neither the native extension nor a GPU."""

from __future__ import annotations

import pytest

from tests.support.kernel_runs import PLACES, KernelRunner


@pytest.fixture(params=PLACES)
def run_kernel(request: pytest.FixtureRequest) -> KernelRunner:
    """Runs a backend module: on the GPU if there is one, and on the CPU as traced for each architecture."""
    return KernelRunner(request.param)
