"""Functions that are rewritten once give what functions give that are rewritten each time."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import tilelang.language as T
from tilelang.language.eager import ast, builder
from tvm.ir import structural_equal

from tests.support.compile_checks import covering
from tests.support.macro_cache import MacroCache
from tilelang_ops.build import programs
from tilelang_ops.common.sizes import RELEASE

SIZED = [  # two of a factory: their sizes are variables around the functions
    program
    for program in covering(programs("sm_90a", RELEASE))
    if program.factory.name in ("gemm.linear", "gemm.linear_fp8")
]


def test_traces_are_the_same() -> None:
    assert len(SIZED) == 4
    with mock.patch.object(builder, "mutate", ast.mutate):
        plain = [program.trace(target) for program in SIZED for target in ("sm_90a", "sm_100a")]
    cache = MacroCache()
    with cache.applied():
        found = [program.trace(target) for program in SIZED for target in ("sm_90a", "sm_100a")]
    assert cache.taken > len(found)
    assert all(structural_equal(one, other) for one, other in zip(found, plain, strict=True))
    assert not structural_equal(found[0], found[2]), "other sizes, another program"


def define(enter: Any) -> Any:
    @T.macro
    def body() -> None:
        with enter(1):
            pass

    return body


@pytest.mark.parametrize("other", [contextlib.nullcontext, min])
def test_names_that_stand_for_something_else_are_noticed(other: Any) -> None:
    """TileLang asks what a `with` statement calls."""
    cache = MacroCache()
    with cache.applied():
        for enter, taken in ((T.Kernel, 0), (T.Kernel, 1), (other, 1), (other, 2), (T.Kernel, 2)):
            source = define(enter).source
            assert cache.taken == taken
            with mock.patch.object(builder, "mutate", ast.mutate):
                assert define(enter).source == source
