"""doc/kernels.md names every operator, and every kernel has a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel_table import PAGE, covering, lenders, operators, program_counts, table
from tilelang_ops.common.kernels import CUDA_TARGETS

WITH_KERNELS = [folder for folder in operators() if (folder / "cuda.py").exists()]


def test_the_page_holds_the_table() -> None:
    assert table() in PAGE.read_text(), "python -m tests.support.kernel_table"


@pytest.mark.parametrize("folder", WITH_KERNELS, ids=lambda path: f"{path.parent.name}.{path.name}")
def test_every_kernel_has_a_test_and_both_targets(folder: Path) -> None:
    op = f"{folder.parent.name}.{folder.name}"
    assert any("kernels" in test.parts for test in covering(op)), "no test of its kernel"
    counts = program_counts(op)
    assert set(counts) >= set(CUDA_TARGETS) or lenders(folder / "cuda.py"), counts
