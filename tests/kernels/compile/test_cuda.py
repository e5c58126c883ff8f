"""Programs of the release model for both architectures: they compile, spill nothing and fit.

One process has all of the file: a program is lowered for the second architecture with what is known from the
first.
"""

from __future__ import annotations

import pytest

from tests.support.compile_checks import Job, Report, check, compile_all, covering
from tilelang_ops.build import programs
from tilelang_ops.common.kernels import CUDA_TARGETS, Program
from tilelang_ops.common.sizes import RELEASE

pytestmark = pytest.mark.slow  # begun early, so that no other process takes a part of the file
JOBS = [
    (program, target)
    for target in CUDA_TARGETS
    for program in covering(programs(target, RELEASE), both_ends=target == CUDA_TARGETS[0])
]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> dict[Job, Report]:
    """Reports of what the selected tests ask about, all of it compiled at the first of them."""
    selected = [item for item in request.session.items if item.path == request.path]
    return compile_all((item.callspec.params["program"], item.callspec.params["target"]) for item in selected)


@pytest.mark.parametrize(("program", "target"), JOBS, ids=str)
def test_compiles(program: Program, target: str, reports: dict[Job, Report]) -> None:
    check(reports[program, target], uses_tensor_cores=program.factory.uses_tensor_cores)
