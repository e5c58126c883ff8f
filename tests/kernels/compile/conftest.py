"""Compiles what a file's selected tests ask about, all of it at the first of them."""

from __future__ import annotations

import pytest

from tests.support.compile_checks import Report, compile_all
from tilelang_ops.common.kernels import Program


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> dict[Program, Report]:
    """Reports of the programs in the selected tests of this module, for its `TARGET`."""
    programs = [
        item.callspec.params["program"]
        for item in request.session.items
        if item.path == request.path and "program" in getattr(item, "callspec", item).params
    ]
    return compile_all(programs, request.module.TARGET)
