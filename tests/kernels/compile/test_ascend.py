"""Programs of the release model for Ascend 950: they lower to AscendC source and fit. None has run."""

from __future__ import annotations

import pytest

from tests.support.ascend_checks import check, lower
from tests.support.compile_checks import covering
from tilelang_ops.build import programs
from tilelang_ops.common.kernels import ASCEND_TARGET, Program
from tilelang_ops.common.sizes import RELEASE

PROGRAMS = covering(programs(ASCEND_TARGET, RELEASE), both_ends=False)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_lowers(program: Program) -> None:
    check(lower(program), uses_cube=program.factory.uses_tensor_cores)
