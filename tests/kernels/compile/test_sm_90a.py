"""Programs of the release model for sm_90a: they compile, spill nothing and fit."""

from __future__ import annotations

import pytest

from tests.support.compile_checks import Report, check, covering
from tilelang_ops.build import programs
from tilelang_ops.common.kernels import Program
from tilelang_ops.common.sizes import RELEASE

TARGET = "sm_90a"
pytestmark = pytest.mark.slow  # begun early, so that one process has all of the file


@pytest.mark.parametrize("program", covering(programs(TARGET, RELEASE)), ids=str)
def test_compiles(program: Program, reports: dict[Program, Report]) -> None:
    check(reports[program], uses_tensor_cores=program.factory.uses_tensor_cores)
