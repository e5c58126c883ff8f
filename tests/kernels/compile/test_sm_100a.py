"""Programs of the release model for sm_100a: they compile, spill nothing and fit."""

from __future__ import annotations

import pytest

from tests.support.compile_checks import Report, check, covering
from tilelang_ops.build import programs
from tilelang_ops.common.kernels import Program
from tilelang_ops.common.sizes import RELEASE

TARGET = "sm_100a"
pytestmark = pytest.mark.slow  # begun early, so that one process has all of the file
# The threads that copy have few registers where TileLang gives them a warp group of their own.
SPILLED = {"gemm.grouped_linear_mxfp4": 16, "gemm.grouped_swiglu_mxfp4": 16}


@pytest.mark.parametrize("program", covering(programs(TARGET, RELEASE), every_factory=False), ids=str)
def test_compiles(program: Program, reports: dict[Program, Report]) -> None:
    spilled_bytes = SPILLED.get(program.factory.name, 0)
    check(reports[program], uses_tensor_cores=program.factory.uses_tensor_cores, spilled_bytes=spilled_bytes)
